"""Block-scaled matrix products of one warp: E2M1 with an unsigned E4M3 scale for each 16 of K (sm_120a).

Fragments of m16n8k64, for lane = 4·g + t, each register eight elements, the lowest index in the low bits:

    A [16 rows, 64 k]   a0 (g, 8t..)   a1 (g+8, 8t..)   a2 (g, 8t+32..)   a3 (g+8, 8t+32..)
    B [64 k, 8 columns] b0 (8t.., g)   b1 (8t+32.., g)
    C [16 rows, 8]      as m16n8k16
    scales              one register of four bytes, byte i for K from 16·i: of A from lanes t = 0 (row g) and t = 1
                        (row g+8), of B from lane t = 0 (column g); what other lanes give is not read

Rounding: as `tensor`, products with both scales exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.kernels.lang.fragments import gather, scatter
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.multiply import U_MMA_NARROW, accumulate, elements
from atlas_lab.kernels.lang.op import Needs, Op, Vec
from atlas_lab.kernels.lang.types import e4m3, f32, u32

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def _nibbles(registers: np.ndarray) -> np.ndarray:
    """[…, n] u32 to float64 […, n, 8]."""
    return np.asarray(_E2M1[registers[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)])


def _scales(registers: Sequence[int]) -> np.ndarray:
    """[n] u32 to float64 [n, 64], a scale for each of K; raises ValueError for a byte that is no unsigned e4m3."""
    codes = np.array(registers, np.uint32)[:, None].view(np.uint8)
    if codes.max() > 0x7E:
        raise ValueError(f"mma_m16n8k64_nvfp4: found scale byte {codes.max():#04x}, expected an unsigned e4m3 number")
    return elements(codes, e4m3).repeat(16, axis=1)


def _multiply(mt: int, nt: int) -> Any:
    """Acts on the registers of a whole warp: mt row tiles by nt column tiles, a scale register for each."""

    def combine(threads: Sequence[Any], args: Sequence[tuple[Any, ...]]) -> Any:
        a, b = (_nibbles(gather([x[i] for x in args], np.uint32)) for i in (1, 2))
        # a: lane (g, t), tile, register (k half, row half), nibble; b: lane (g, t), tile, register (k half), nibble
        left = a.reshape(8, 4, mt, 2, 2, 8).transpose(2, 4, 0, 3, 1, 5).reshape(16 * mt, 64)
        right = b.reshape(8, 4, nt, 2, 8).transpose(2, 0, 3, 1, 4).reshape(8 * nt, 64)
        left *= _scales([args[4 * g + h][3][i] for i in range(mt) for h in range(2) for g in range(8)])
        right *= _scales([args[4 * g][4][i] for i in range(nt) for g in range(8)])
        product = (left @ right.T).reshape(mt, 2, 8, nt, 4, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, -1)
        return scatter(accumulate(gather([x[0] for x in args], np.float32), product, f32))

    return combine


_ONE = _multiply(1, 1)


def _run(acc: Any, a: Any, b: Any, scale_a: int, scale_b: int) -> Any:
    """m16n8k64 of E2M1 with E4M3 scales: acc + (A·scales)·(B·scales)."""
    return current().warp_op("mma_m16n8k64_nvfp4", 0xFFFFFFFF, (acc, a, b, (scale_a,), (scale_b,)), _ONE)


_SM120A, _SECTION = Needs((12, 0), "a"), "9.7.14.5.14 mma with block scaling"
_TEXT = (
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
    "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7}, {$14}, {0, 0}, {$15}, {0, 0};"
)

mma_m16n8k64_nvfp4 = Op(
    "mma_m16n8k64_nvfp4",
    (Vec(f32, 4), Vec(u32, 4), Vec(u32, 2), u32, u32),
    Vec(f32, 4),
    ptx=_TEXT,
    numpy=_run,
    needs=_SM120A,
    section=_SECTION,
    tied=(0,),
    convergent=True,
    unit_roundoff=U_MMA_NARROW,
)


@functools.cache
def mma_nvfp4_tile(m_tiles: int, n_tiles: int) -> Op:
    """m_tiles x n_tiles products m16n8k64: `(acc, a, b, scales_a, scales_b) -> acc`.

    acc: Vec(f32, 4·m_tiles·n_tiles), row-major over (row tile, column tile); a: Vec(u32, 4·m_tiles); b: Vec(u32,
    2·n_tiles); a register of scales for each tile (one of them is a tuple of one).
    """
    name, count, combine = f"mma_{m_tiles}x{n_tiles}_m16n8k64_nvfp4", 4 * m_tiles * n_tiles, _multiply(m_tiles, n_tiles)

    def emit(e: Any, *registers: Any) -> Any:
        acc, rest = list(registers[:count]), list(registers[count:])
        a, rest = rest[: 4 * m_tiles], rest[4 * m_tiles :]
        b, scales_a, scales_b = rest[: 2 * n_tiles], rest[2 * n_tiles : -n_tiles], rest[-n_tiles:]
        for m in range(m_tiles):
            for n in range(n_tiles):
                at = 4 * (m * n_tiles + n)
                args = [*acc[at : at + 4], *a[4 * m : 4 * m + 4], *b[2 * n : 2 * n + 2], scales_a[m], scales_b[n]]
                acc[at : at + 4] = e.asm(_TEXT, [acc[0].type] * 4, args, tied=range(4))
        return acc

    def run(acc: Any, a: Any, b: Any, scales_a: Any, scales_b: Any) -> Any:
        return current().warp_op(name, 0xFFFFFFFF, (acc, a, b, scales_a, scales_b), combine)

    run.__doc__ = f"{m_tiles}x{n_tiles} tiles of m16n8k64, E2M1 with E4M3 scales."
    of_acc, of_a, of_b = Vec(f32, count), Vec(u32, 4 * m_tiles), Vec(u32, 2 * n_tiles)
    return Op(
        name,
        (of_acc, of_a, of_b, Vec(u32, m_tiles), Vec(u32, n_tiles)),
        of_acc,
        ptx=emit,
        numpy=run,
        needs=_SM120A,
        section=_SECTION,
        convergent=True,
        unit_roundoff=U_MMA_NARROW,
    )
