"""Matrices of 8x8 16-bit elements from a warp's registers to shared memory (`stmatrix`): the inverse of `ldmatrix`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.fragments import gather
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.op import SM90, Effect, Op, Vec
from atlas_lab.kernels.lang.types import Pointer, u32


def _stmatrix(matrices: int, trans: bool, tiles: int = 1, step: int = 0) -> Op:
    name = f"stmatrix_x{matrices}" + ("_trans" if trans else "") + (f"_{tiles}x{step}" if tiles > 1 else "")
    count = matrices * tiles

    def combine(threads: Sequence[Any], args: Sequence[tuple[Pointer, int, Sequence[int]]]) -> list[None]:
        m = gather([a[2] for a in args], np.uint32).T.reshape(count, 8, 4)
        if trans:
            halves = np.ascontiguousarray(m).view(np.uint16).transpose(0, 2, 1)
            m = np.ascontiguousarray(halves).view(np.uint32)
        rows = m.reshape(tiles, 8 * matrices, 4).tolist()
        for tile in range(tiles):
            for lane in range(8 * matrices):
                p, i, _ = args[lane]
                threads[lane].write(p, i + tile * step // p.dtype.bytes, u32, rows[tile][lane])
        return [None] * 32

    def run(p: Pointer, i: int, values: Any) -> None:
        current().warp_op(name, 0xFFFFFFFF, (p, i, (values,) if count == 1 else values), combine)

    def emit(e: Any, address: Any, *values: Any) -> None:
        for tile in range(tiles):
            text = f"{instruction} [$0+{tile * step}], {{{inputs}}};"
            e.asm(text, [], [address, *values[matrices * tile : matrices * (tile + 1)]])

    instruction = f"stmatrix.sync.aligned.m8n8.x{matrices}{'.trans' if trans else ''}.shared.b16"
    inputs = ", ".join(f"${i + 1}" for i in range(matrices))
    run.__doc__ = (
        f"Store {matrices} matrices: lane l gives the address of row l % 8 of matrix l // 8, lane 4·g + t holds row g, "
        f"columns 2t and 2t+1{' of the transposed matrix' if trans else ''}, one register a matrix."
    )
    return Op(
        name,
        (SHARED, Vec(u32, count) if count > 1 else u32),
        None,
        ptx=emit,
        numpy=run,
        effect=Effect.WRITE,
        needs=SM90,
        section="9.7.14.5.16 stmatrix",
        convergent=True,
    )


stmatrix_x1, stmatrix_x2, stmatrix_x4 = (_stmatrix(n, False) for n in (1, 2, 4))
stmatrix_x1_trans, stmatrix_x2_trans, stmatrix_x4_trans = (_stmatrix(n, True) for n in (1, 2, 4))


@functools.cache
def stmatrix_tile(tiles: int, step: int, trans: bool = False) -> Op:
    """`tiles` x4 stores in one: `(p, i, Vec(u32, 4·tiles))`, tile j `step` bytes after tile j-1.

    With `step` 32 bytes: the packed accumulators (`pack_tile`) of 16·`tiles` columns of `mma` or `wgmma`, to rows
    that are not swizzled, lane l giving row l % 16, column 8·(l // 16). Raises ValueError if `step` is no multiple of
    16 bytes.
    """
    if tiles < 1 or step % 16:
        raise ValueError(f"stmatrix_tile: found {tiles} tiles, step {step}; expected 1 or more, a multiple of 16 bytes")
    return _stmatrix(4, trans, tiles, step)
