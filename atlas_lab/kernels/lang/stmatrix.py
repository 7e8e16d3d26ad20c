"""Matrices of 8x8 16-bit elements from a warp's registers to shared memory (`stmatrix`): the inverse of `ldmatrix`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED, registers
from atlas_lab.kernels.lang.op import Effect, Needs, Op, Vec
from atlas_lab.kernels.lang.types import Pointer, u32


def _stmatrix(matrices: int, trans: bool) -> Op:
    name = f"stmatrix_x{matrices}" + ("_trans" if trans else "")

    def combine(threads: Sequence[Any], args: Sequence[tuple[Pointer, int, Sequence[int]]]) -> list[None]:
        m = np.array([a[2] for a in args], np.uint32).T.reshape(matrices, 8, 4)
        if trans:
            halves = np.ascontiguousarray(m).view(np.uint16).transpose(0, 2, 1)
            m = np.ascontiguousarray(halves).view(np.uint32)
        for lane, row in enumerate(m.reshape(-1, 4).tolist()):
            p, i, _ = args[lane]
            threads[lane].write(p, i, u32, row)
        return [None] * 32

    def run(p: Pointer, i: int, values: Any) -> None:
        current().warp_op(name, 0xFFFFFFFF, (p, i, (values,) if matrices == 1 else tuple(values)), combine)

    run.__doc__ = (
        f"Store {matrices} matrices: lane l gives the address of row l % 8 of matrix l // 8, lane 4·g + t holds row g, "
        f"columns 2t and 2t+1{' of the transposed matrix' if trans else ''}, one register a matrix."
    )
    value = Vec(u32, matrices) if matrices > 1 else u32
    source = registers(matrices, 1) if matrices > 1 else "{$1}"
    return Op(
        name,
        (SHARED, value),
        None,
        ptx=f"stmatrix.sync.aligned.m8n8.x{matrices}{'.trans' if trans else ''}.shared.b16 [$0], {source};",
        numpy=run,
        effect=Effect.WRITE,
        needs=Needs((9, 0)),
        section="9.7.14.5.16 stmatrix",
        convergent=True,
    )


stmatrix_x1, stmatrix_x2, stmatrix_x4 = (_stmatrix(n, False) for n in (1, 2, 4))
stmatrix_x1_trans, stmatrix_x2_trans, stmatrix_x4_trans = (_stmatrix(n, True) for n in (1, 2, 4))
