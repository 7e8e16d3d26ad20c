"""Copies of tensor tiles by the copy engine (TMA), described by a tensor map: `m: L.InMap[L.bf16]` in a kernel.

The launch's argument is `TensorMap(view, box, swizzle)`. Coordinates are elements of the view in the order of its
shape (row, column), the first element of the box; they may be negative or past the end: elements outside are zero
when loaded and not written when stored. In shared memory the box is row-major and contiguous, 128-byte aligned; with
a swizzle of 128 (64, 32) bytes, address bits 4 to 6 (5, 4) are XORed with bits 7 to 9 (8, 7). An mbarrier counts the
bytes of the whole box, also where it reaches outside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from atlas_lab.kernels.lang.bulk import hinted, name_of, window
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.op import SM90, SM90A, Effect, Op, Operand, Ptr, Vec
from atlas_lab.kernels.lang.types import Pointer, i32, u16

_TENSOR = "9.7.9.27.1 cp.async.bulk.tensor"
_PREFETCH = "9.7.9.16 prefetch.tensormap"
_SOURCE = Ptr(("map",), ("in", "inout"), indexed=False)
_TARGET = Ptr(("map",), ("out", "inout"), indexed=False)
RANKS = (1, 2, 3, 4, 5)


def _coordinates(rank: int, first: int) -> str:
    """The registers of a tile's coordinates; PTX takes the innermost first."""
    if rank not in RANKS:
        raise ValueError(f"found a tensor map of rank {rank}, expected 1 to 5")
    return "{" + ", ".join(f"${first + d}" for d in reversed(range(rank))) + "}"


@functools.cache
def tma_load(rank: int, multicast: bool = False, hint: str = "") -> Op:
    """Load one box: `(dst, i, map, coordinates, mbarriers, k)`; with `multicast` one more: the mask of ranks of the
    cluster whose blocks receive it, each at the same place and mbarrier of its own.

    `hint` is the L2 eviction priority, as in `bulk_load`. Raises ValueError for another rank than 1 to 5 or hint.
    """
    bar = 2 + rank
    form = (
        f"cp.async.bulk.tensor.{rank}d.shared::{window(multicast)}.global.tile.mbarrier::complete_tx::bytes"
        f"{'.multicast::cluster' * multicast}{{hint}} [$0], [$1, {_coordinates(rank, 2)}], [${bar}]"
        f"{f', ${bar + 1}' * multicast}{{policy}};"
    )

    def plain(dst: Pointer, i: int, source: Pointer, at: Sequence[int], bars: Pointer, k: int) -> None:
        current().tma_load(dst, int(i), source, [int(x) for x in at], bars, int(k), None)

    def many(dst: Pointer, i: int, source: Pointer, at: Sequence[int], bars: Pointer, k: int, mask: int) -> None:
        current().tma_load(dst, int(i), source, [int(x) for x in at], bars, int(k), int(mask))

    operands: tuple[Operand, ...] = (SHARED, _SOURCE, Vec(i32, rank), SHARED) + (u16,) * multicast
    name = name_of(f"tma_load_{rank}d", multicast, hint)
    return Op(
        name,
        operands,
        None,
        ptx=hinted(name, hint, form),
        numpy=many if multicast else plain,
        effect=Effect.WRITE,
        needs=SM90A if multicast else SM90,
        section=_TENSOR,
    )


@functools.cache
def tma_store(rank: int, hint: str = "") -> Op:
    """Store one box: `(map, coordinates, src, i)`, in this thread's open group (`bulk_commit`, `bulk_wait_read`).

    Raises ValueError for another rank than 1 to 5 or an unknown hint.
    """
    form = (
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group{{hint}} "
        f"[$0, {_coordinates(rank, 1)}], [${1 + rank}]{{policy}};"
    )

    def run(target: Pointer, at: Sequence[int], src: Pointer, i: int) -> None:
        current().tma_store(target, [int(x) for x in at], src, int(i))

    name = name_of(f"tma_store_{rank}d", False, hint)
    return Op(
        name,
        (_TARGET, Vec(i32, rank), SHARED),
        None,
        ptx=hinted(name, hint, form),
        numpy=run,
        effect=Effect.WRITE,
        needs=SM90,
        section=_TENSOR,
    )


def _prefetch(m: Pointer) -> None:
    """Fetch the tensor map itself, so that the first copy need not wait for it."""
    current().tma_prefetch(m)


tma_load_2d, tma_load_3d, tma_store_2d, tma_store_3d = tma_load(2), tma_load(3), tma_store(2), tma_store(3)
tma_prefetch = Op(
    "tma_prefetch",
    (Ptr(("map",), indexed=False),),
    None,
    ptx="prefetch.tensormap [$0];",
    numpy=_prefetch,
    effect=Effect.SYNC,
    needs=SM90,
    section=_PREFETCH,
)
