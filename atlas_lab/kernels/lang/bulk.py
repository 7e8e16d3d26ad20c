"""Bulk copies of contiguous bytes by the copy engine, and the groups in which bulk stores complete.

A load completes at an mbarrier, which counts its bytes; a store belongs to a group of the thread that issued it:
`bulk_commit` closes the group, `bulk_wait_read(n)` waits until all but the newest n have read their shared memory,
which may then be written again, `bulk_wait(n)` until they are visible in global memory too. A thread waits for the
reads of its stores before it exits. Addresses and sizes are multiples of 16 bytes.
"""

from __future__ import annotations

import functools

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED, WRITABLE
from atlas_lab.kernels.lang.op import SM90, SM90A, Const, Effect, Op, Operand, Ptr
from atlas_lab.kernels.lang.types import Pointer, u16, u32

_BULK = "9.7.9.25.4 cp.async.bulk"
_READABLE = Ptr(("global",), ("in", "inout"))
HINTS = ("", "evict_normal", "evict_first", "evict_last")


def hinted(instruction: str, hint: str, form: str) -> str:
    """A copy's text: `form` has `{hint}` where the qualifier goes and `{policy}` where its operand does."""
    if hint not in HINTS:
        raise ValueError(f"{instruction}: found hint {hint!r}, expected one of {', '.join(map(repr, HINTS))}")
    if not hint:
        return form.replace("{hint}", "").replace("{policy}", "")
    text = form.replace("{hint}", ".L2::cache_hint").replace("{policy}", ", policy")
    return f"{{ .reg .b64 policy; createpolicy.fractional.L2::{hint}.b64 policy, 1.0; {text} }}"


def name_of(base: str, multicast: bool, hint: str) -> str:
    """`base_multicast_evict_first`."""
    return base + "_multicast" * multicast + (f"_{hint}" if hint else "")


def window(multicast: bool) -> str:
    """The shared window that a load's addresses are in. Only a block's own lets the compiler know that destination and
    mbarrier are of one block, which it otherwise has compute capability 12 check at run time."""
    return "cluster" if multicast else "cta"


@functools.cache
def bulk_load(multicast: bool = False, hint: str = "") -> Op:
    """The copy from global to shared memory: `(dst, i, src, j, size, mbarriers, k)`, size in bytes; with `multicast`
    one more: the mask of ranks of the cluster whose blocks receive it, each at the same place and mbarrier of its own.

    `hint` is the L2 eviction priority: "evict_first", "evict_normal" or "evict_last"; raises ValueError for others.
    """
    form = (
        f"cp.async.bulk.shared::{window(multicast)}.global.mbarrier::complete_tx::bytes"
        f"{'.multicast::cluster' * multicast}{{hint}} [$0], [$1], $2, [$3]{', $4' * multicast}{{policy}};"
    )

    def plain(dst: Pointer, i: int, src: Pointer, j: int, size: int, bar: Pointer, k: int) -> None:
        current().bulk_load(dst, int(i), src, int(j), int(size), bar, int(k), None)

    def many(dst: Pointer, i: int, src: Pointer, j: int, size: int, bar: Pointer, k: int, mask: int) -> None:
        current().bulk_load(dst, int(i), src, int(j), int(size), bar, int(k), int(mask))

    operands: tuple[Operand, ...] = (SHARED, _READABLE, u32, SHARED) + (u16,) * multicast
    name = name_of("bulk_load", multicast, hint)
    return Op(
        name,
        operands,
        None,
        ptx=hinted(name, hint, form),
        numpy=many if multicast else plain,
        effect=Effect.WRITE,
        needs=SM90A if multicast else SM90,
        section=_BULK,
    )


@functools.cache
def bulk_store(hint: str = "") -> Op:
    """The copy from shared to global memory: `(dst, i, src, j, size)`, size in bytes, in this thread's open group."""
    form = "cp.async.bulk.global.shared::cta.bulk_group{hint} [$0], [$1], $2{policy};"

    def run(dst: Pointer, i: int, src: Pointer, j: int, size: int) -> None:
        current().bulk_store(dst, int(i), src, int(j), int(size))

    name = name_of("bulk_store", False, hint)
    return Op(
        name,
        (WRITABLE, SHARED, u32),
        None,
        ptx=hinted(name, hint, form),
        numpy=run,
        effect=Effect.WRITE,
        needs=SM90,
        section=_BULK,
    )


def _commit() -> None:
    """Close the group of this thread's bulk stores so far."""
    current().bulk_commit()


def _wait(n: int) -> None:
    """All but the newest `n` groups of this thread are complete, their bytes visible to it."""
    current().bulk_wait(n, False)


def _wait_read(n: int) -> None:
    """All but the newest `n` groups of this thread have read their shared memory."""
    current().bulk_wait(n, True)


bulk_commit = Op(
    "bulk_commit",
    (),
    None,
    ptx="cp.async.bulk.commit_group;",
    numpy=_commit,
    effect=Effect.SYNC,
    needs=SM90,
    section=_BULK,
)
bulk_wait, bulk_wait_read = (
    Op(
        name,
        (Const("n"),),
        None,
        ptx=f"cp.async.bulk.wait_group{read} {{n}};",
        numpy=run,
        effect=Effect.SYNC,
        needs=SM90,
        section=_BULK,
    )
    for name, read, run in (("bulk_wait", "", _wait), ("bulk_wait_read", ".read", _wait_read))
)
