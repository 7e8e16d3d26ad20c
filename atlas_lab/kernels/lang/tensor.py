"""Tensor-core matrix products of one warp (`mma.sync`) and their loads from shared memory (`ldmatrix`).

Fragments of m16n8k16, for lane = 4·g + t, each register two 16-bit elements, the lower index in the low half:

    A [16 rows, 16 k]   a0 (g, 2t..)   a1 (g+8, 2t..)   a2 (g, 2t+8..)   a3 (g+8, 2t+8..)
    B [16 k, 8 columns] b0 (2t.., g)   b1 (2t+8.., g)
    C [16 rows, 8]      c0 c1 (g, 2t and 2t+1)          c2 c3 (g+8, 2t and 2t+1)

`ldmatrix_x4` loads A from row-major shared memory with lane l giving the address of row l % 16, k 8·(l // 16); and
two neighbouring B tiles from memory that holds columns as rows (weights [N, K]) with lane l giving row
l % 8 + 8·(l // 16), k 8·(l // 8 % 2). Rows are 16 bytes, wherever the address points, so any swizzle of 16-byte
chunks is the address's business; `ldmatrix_tile` steps down the rows by a constant, which leaves a swizzle that
repeats every 8 or 16 rows alone.

Of 8-bit elements a register has four, the lowest index in the low bits: m16n8k32 is the same picture with 4t and 16 for
2t and 8; m16n8k16 of s8 is its first half of K, a0 a1 and b0.

Rounding: products are exact and their sum with the accumulator is rounded once to float32 on the interpreter. Hardware
adds in another order and with fewer bits: `unit_roundoff` bounds it. Sums of s8 are exact in 32 bits and wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.fragments import gather, scatter
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.multiply import ELEMENTS, UNIT_ROUNDOFF, accumulate, elements
from atlas_lab.kernels.lang.op import Const, Effect, Needs, Op, Vec
from atlas_lab.kernels.lang.types import Pointer, Scalar, bf16, e4m3, f16, f32, i8, i32, u32

_SM80 = Needs((8, 0))
_LDMATRIX, _MMA = "9.7.14.5.15 ldmatrix", "9.7.14.5.14 mma"
_ALL = 0xFFFFFFFF


def _matrices(rows: Sequence[Sequence[int]], trans: bool) -> np.ndarray:
    """[matrices, 8 rows, 4 u32] as lanes receive it: [32 lanes, matrices]."""
    m = np.array(rows, np.uint32).reshape(-1, 8, 4)
    if trans:
        halves = m.view(np.uint16).reshape(-1, 8, 8)
        m = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32)
    return m.reshape(-1, 32).T


def _load_tiles(name: str, matrices: int, tiles: int, step: int, trans: bool) -> Any:
    """Tiles of `matrices` 8x8 matrices: lane l gives row l % 8 of matrix l // 8; tile i is i·step bytes further."""

    def combine(threads: Sequence[Any], args: Sequence[tuple[Pointer, int]]) -> Any:
        parts = []
        for tile in range(tiles):
            rows = []
            for lane in range(8 * matrices):
                p, i = args[lane]
                rows.append(threads[lane].read(p, i + tile * step // p.dtype.bytes, u32, 4))
            parts.append(_matrices(rows, trans))
        return scatter(np.concatenate(parts, axis=1) if tiles > 1 else np.ascontiguousarray(parts[0]))

    def run(p: Pointer, i: int) -> Any:
        found = current().warp_op(name, _ALL, (p, i), combine)
        return found if matrices * tiles > 1 else found[0]

    return run


def _ldmatrix(matrices: int, trans: bool, tiles: int = 1, step: int = 0) -> Op:
    name = f"ldmatrix_x{matrices}" + ("_trans" if trans else "") + (f"_{tiles}x{step}" if tiles > 1 else "")
    instruction = f"ldmatrix.sync.aligned.m8n8.x{matrices}{'.trans' if trans else ''}.shared.b16"
    outputs = ", ".join(f"${i}" for i in range(matrices))

    def emit(e: Any, address: Any) -> Any:
        out = []
        for tile in range(tiles):
            text = f"{instruction} {{{outputs}}}, [${matrices}+{tile * step}];"
            out += e.asm(text, [e.const(0).type] * matrices, [address])
        return out if matrices * tiles > 1 else out[0]

    count = matrices * tiles
    return Op(
        name,
        (SHARED,),
        Vec(u32, count) if count > 1 else u32,
        ptx=emit,
        effect=Effect.READ,
        section=_LDMATRIX,
        numpy=_load_tiles(name, matrices, tiles, step, trans),
        convergent=True,
    )


ldmatrix_x1, ldmatrix_x2, ldmatrix_x4 = (_ldmatrix(n, False) for n in (1, 2, 4))
ldmatrix_x1_trans, ldmatrix_x2_trans, ldmatrix_x4_trans = (_ldmatrix(n, True) for n in (1, 2, 4))


@functools.cache
def ldmatrix_tile(tiles: int, step: int, trans: bool = False) -> Op:
    """`tiles` x4 loads in one: `(p, i) -> Vec(u32, 4·tiles)`, tile j `step` bytes after tile j-1.

    With `step` 16 rows: the A fragments of `tiles` row tiles, or the B fragments of 2·`tiles` column tiles, in the
    order that `mma_tile` takes. Raises ValueError if `step` is no multiple of 16 bytes.
    """
    if tiles < 1 or step % 16:
        raise ValueError(f"ldmatrix_tile: found {tiles} tiles, step {step}; expected 1 or more, a multiple of 16 bytes")
    return _ldmatrix(4, trans, tiles, step)


@dataclass(frozen=True)
class Shape:
    """m16n8k`k` of one type. `halves`: registers of B, and half of those of A."""

    dtype: Scalar
    k: int

    @property
    def halves(self) -> int:
        return self.k * self.dtype.bits // 128

    @property
    def accumulator(self) -> Scalar:
        return i32 if self.dtype is i8 else f32

    @property
    def needs(self) -> Needs:
        return Needs((8, 9)) if self.dtype is e4m3 else _SM80

    @property
    def text(self) -> str:
        """PTX of registers `$0…`: results, then the accumulators tied to them, A, B."""
        a, b = range(8, 8 + 2 * self.halves), range(8 + 2 * self.halves, 8 + 3 * self.halves)
        groups = (", ".join(f"${i}" for i in group) for group in (range(4), a, b, range(4, 8)))
        kind, acc = ELEMENTS[self.dtype].ptx, "s32" if self.accumulator is i32 else "f32"
        registers = ", ".join(f"{{{g}}}" for g in groups)
        return f"mma.sync.aligned.m16n8k{self.k}.row.col.{acc}.{kind}.{kind}.{acc} {registers};"

    def multiply(self, mt: int, nt: int) -> Any:
        """Acts on the registers of a whole warp."""
        dtype, k, halves = self.dtype, self.k, self.halves
        host = np.int32 if self.accumulator is i32 else np.float32

        def combine(threads: Sequence[Any], args: Sequence[tuple[Any, Any, Any]]) -> Any:
            a = elements(gather([x[1] for x in args], np.uint32), dtype)
            b = elements(gather([x[2] for x in args], np.uint32), dtype)
            c = gather([x[0] for x in args], host)
            # a: lane (g, t), tile, register (k half, row half), element -> row, k
            left = a.reshape(8, 4, mt, halves, 2, -1).transpose(2, 4, 0, 3, 1, 5).reshape(16 * mt, k)
            # b: lane (g, t), tile, register (k half), element -> k, column
            right = b.reshape(8, 4, nt, halves, -1).transpose(3, 1, 4, 2, 0).reshape(k, 8 * nt)
            # c: lane (g, t), row tile, column tile, row half, pair
            product = (left @ right).reshape(mt, 2, 8, nt, 4, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, -1)
            return scatter(accumulate(c, product, self.accumulator))

        return combine


_K = {bf16: (16,), f16: (16,), e4m3: (32,), i8: (32, 16)}


@functools.cache
def mma_tile(dtype: Scalar, m_tiles: int, n_tiles: int, k: int | None = None) -> Op:
    """m_tiles × n_tiles products m16n8k`k`: `(acc, a, b) -> acc`, summed in float32 (i8: in i32).

    k is 16 for bf16 and f16, 32 for e4m3 and i8, or 16 for i8. acc: Vec(f32 or i32, 4·m_tiles·n_tiles), row-major over
    (row tile, column tile); a: Vec(u32, 4·m_tiles); b: Vec(u32, 2·n_tiles); for k 16 of i8 half of these (one register
    is a tuple of one). Raises ValueError for another dtype or k.
    """
    if dtype not in _K:
        raise ValueError(f"mma_tile: found {dtype}, expected bf16, f16, e4m3 or i8")
    k = _K[dtype][0] if k is None else k
    if k not in _K[dtype]:
        raise ValueError(f"mma_tile: found k {k}, expected {' or '.join(map(str, _K[dtype]))} for {dtype}")
    shape = Shape(dtype, k)
    name = f"mma_{m_tiles}x{n_tiles}_m16n8k{k}_{dtype}"
    combine = shape.multiply(m_tiles, n_tiles)
    count, per_a, per_b, text = 4 * m_tiles * n_tiles, 2 * shape.halves, shape.halves, shape.text

    def emit(e: Any, *registers: Any) -> Any:
        acc, a, b = list(registers[:count]), registers[count : count + per_a * m_tiles], registers[-per_b * n_tiles :]
        for m in range(m_tiles):
            for n in range(n_tiles):
                at = 4 * (m * n_tiles + n)
                args = [*acc[at : at + 4], *a[per_a * m : per_a * (m + 1)], *b[per_b * n : per_b * (n + 1)]]
                acc[at : at + 4] = e.asm(text, [acc[0].type] * 4, args, tied=range(4))
        return acc

    def run(acc: Any, a: Any, b: Any) -> Any:
        return current().warp_op(name, _ALL, (acc, a, b), combine)

    run.__doc__ = f"{m_tiles}x{n_tiles} tiles of m16n8k{k}, {dtype}."
    operands = (Vec(shape.accumulator, count), Vec(u32, per_a * m_tiles), Vec(u32, per_b * n_tiles))
    return Op(
        name,
        operands,
        operands[0],
        ptx=emit,
        numpy=run,
        needs=shape.needs,
        section=_MMA,
        convergent=True,
        unit_roundoff=UNIT_ROUNDOFF.get(dtype),
    )


def _first(dtype: Scalar) -> Op:
    """The first product of a sum: `(a, b) -> acc`, with no accumulator to clear."""
    combine = Shape(dtype, 16).multiply(1, 1)
    name = f"mma_m16n8k16_{dtype}_first"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
        "{$8, $9}, {$10, $11, $12, $13};"
    )

    def emit(e: Any, *registers: Any) -> Any:
        return e.asm(text, [e.zero().type] * 4, [*registers, *[e.zero()] * 4])

    def run(a: Any, b: Any) -> Any:
        return current().warp_op(name, _ALL, ((np.float32(0),) * 4, a, b), combine)

    run.__doc__ = f"m16n8k16 of {dtype} added to zero."
    return Op(
        name,
        (Vec(u32, 4), Vec(u32, 2)),
        Vec(f32, 4),
        ptx=emit,
        numpy=run,
        needs=_SM80,
        section=_MMA,
        convergent=True,
        unit_roundoff=UNIT_ROUNDOFF[dtype],
    )


mma_m16n8k16_bf16 = mma_tile(bf16, 1, 1)
mma_m16n8k16_bf16_first = _first(bf16)
mma_m16n8k16_f16 = mma_tile(f16, 1, 1)
mma_m16n8k16_s8 = mma_tile(i8, 1, 1, 16)
mma_m16n8k32_e4m3 = mma_tile(e4m3, 1, 1)
mma_m16n8k32_s8 = mma_tile(i8, 1, 1)


def _zeros(dtype: Scalar) -> Op:
    zero = np.float32(0) if dtype is f32 else 0

    def run(count: int) -> tuple[Any, ...]:
        return (zero,) * count

    def emit(e: Any, count: int) -> Any:
        return [e.zero() if dtype is f32 else e.const(0)] * count

    run.__doc__ = f"`count` zeros of {dtype}: an empty accumulator."
    return Op(
        "zeros" if dtype is f32 else f"zeros_{dtype}",
        (Const("count"),),
        lambda count: Vec(dtype, count),
        numpy=run,
        section="9.7.9 mov",
        ptx=emit,
    )


zeros, zeros_i32 = _zeros(f32), _zeros(i32)
