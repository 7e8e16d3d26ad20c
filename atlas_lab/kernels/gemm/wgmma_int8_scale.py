"""What a GEMM of int8 does with the sums of 32 of K: it makes them float32 and adds them, times their scales.

Sums are those of 64x64 outputs of a warpgroup, 32 of a thread, 4·j + 2·h + e for row g + 8·h and column 8·j + 2·t + e
of its warp's 16 x 64, as integers; of a transposed product of integers in F16 they are floats. They are below 2**19 in
magnitude: float32 holds them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED

GROUP = 32  # of K under a scale
COLUMNS = 64  # of W that a warpgroup multiplies by
COUNT = COLUMNS // 2  # sums of a thread for 64 rows
OWN = COLUMNS // 4  # columns of a thread
GROUPS = 4  # of a stage
HELD = 2  # of which a thread holds W's scales at once


def _column_scales() -> L.Op:
    step = [GROUPS * (8 * (c >> 1) + (c & 1)) for c in range(OWN)]  # elements from the first column to each

    def emit(e: Any, address: Any) -> list[Any]:
        loads = [f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {4 * at}];" for at in step]
        found = [e.asm(text, [e.zero().type] * HELD, [address]) for text in loads]
        return [f[g] for g in range(HELD) for f in found]

    def run(p: L.Pointer, i: int) -> tuple[Any, ...]:
        """`(p, i)`: W's scales of a thread's columns for two groups of K, the group first: of scales `[columns, 4]` in
        shared memory, from its first column and the first of the groups."""
        found = [current().read(p, i + at, L.f32, HELD) for at in step]
        return tuple(f[g] for g in range(HELD) for f in found)

    count = L.Vec(L.f32, HELD * OWN)
    return L.intrinsic("column_scales", (SHARED,), count, ptx=emit, numpy=run, effect="reads", section="9.7.9 ld")


column_scales = _column_scales()


def _of(i: int) -> tuple[int, int]:
    """Row half and own column of sum i."""
    return (i >> 1) & 1, 2 * (i >> 2) + (i & 1)


_HALVES, _COLUMNS = np.array([_of(i) for i in range(COUNT)]).T


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c of float32, rounded once: to odd in float64 first."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    t = total - product
    error = (product - (total - t)) + (c - t)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    bits += np.where((bits & 1 == 0) & np.isfinite(error) & (error != 0), toward, 0)
    return total.astype(np.float32)


@functools.cache
def scaled_sums(fresh: bool = False) -> L.Op:
    """`(acc, sums, rows, columns, group) -> acc`: accumulators of 64 rows with sums·(row scale · column scale) added by
    a fused multiply-add; `fresh`: put in their place instead. `columns` are as `column_scales` returns them, `group`
    which of those held."""

    def emit(e: Any, *v: Any, group: int) -> list[Any]:
        acc, sums, rows, columns = v[:COUNT], v[COUNT : 2 * COUNT], v[2 * COUNT : 2 * COUNT + 2], v[2 * COUNT + 2 :]
        out = []
        for i in range(COUNT):
            half, column = _of(i)
            factor = e.f32("mul.rn.f32 $0, $1, $2;", rows[half], columns[OWN * group + column])
            value = e.asm("cvt.rn.f32.s32 $0, $1;", [acc[i].type], [sums[i]])[0]
            if fresh:
                out.append(e.f32("mul.rn.f32 $0, $1, $2;", value, factor))
            else:
                out.append(e.f32("fma.rn.f32 $0, $1, $2, $3;", value, factor, acc[i]))
        return out

    def run(acc: Any, sums: Any, rows: Any, columns: Any, group: int) -> tuple[Any, ...]:
        row, column = np.array(rows, np.float32), np.array(columns[OWN * group : OWN * (group + 1)], np.float32)
        with np.errstate(all="ignore"):
            factor = row[_HALVES] * column[_COLUMNS]
            value = np.array(sums, np.int32).astype(np.float32)
            return tuple(value * factor if fresh else fused(value, factor, np.array(acc, np.float32)))

    vec = L.Vec(L.f32, COUNT)
    # ordered: an addition that is moved past the next product into the same registers was seen compiled to take that
    # product's sums (ptxas 13.5), its own product dropped
    return L.intrinsic(
        f"scaled_sums{'_fresh' * fresh}",
        (vec, L.Vec(L.i32, COUNT), L.Vec(L.f32, 2), L.Vec(L.f32, HELD * OWN), L.Const("group")),
        vec,
        ptx=emit,
        numpy=run,
        effect="synchronises",
        section="9.7.3 fma, 9.7.9 cvt",
    )


@functools.cache
def add_scaled(bm: int, blocks: int, loads: bool = False) -> L.Op:
    """`(acc, sums, columns, rows, block) -> acc`: accumulators of `blocks` transposed products of 64 rows of W by bm
    rows of x with sums·(W's scale · x's scale) added to those of one by a fused multiply-add; `columns` are x's scales
    of a thread's columns, `rows` W's of its two rows.

    With `loads` it takes `(p, i)` too, before the block, and returns accumulators and then other columns: from element
    i of shared memory on, where a lane's four of each 16 rows lie side by side. Each four take the place of others as
    soon as those are used.
    """
    count, own = bm // 2, bm // 4

    def which(i: int) -> tuple[int, int]:
        """Row half and own column of sum i."""
        return i >> 1 & 1, i >> 3 << 2 | i >> 1 & 2 | i & 1

    def emit(e: Any, *v: Any, block: int) -> list[Any]:
        out, sums = list(v[: count * blocks]), v[count * blocks : count * (blocks + 1)]
        columns, rows = v[count * (blocks + 1) : count * (blocks + 1) + own], v[count * (blocks + 1) + own :]
        after = []
        for first in range(0, count, 8):
            factors = [
                e.f32("mul.rn.f32 $0, $1, $2;", columns[c], rows[h]) for h, c in map(which, range(first, first + 8))
            ]
            if loads:
                text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {8 * first}];"
                after += e.asm(text, [e.zero().type] * 4, [rows[2]])
            for i, factor in enumerate(factors, first):
                at = count * block + i
                out[at] = e.f32("fma.rn.f32 $0, $1, $2, $3;", sums[i], factor, out[at])
        return out + after

    def run(acc: Any, sums: Any, columns: Any, rows: Any, *rest: Any) -> tuple[Any, ...]:
        *source, block = rest
        out, here = list(acc), slice(count * block, count * (block + 1))
        halves, of = np.array([which(i) for i in range(count)]).T
        with np.errstate(all="ignore"):
            factor = np.array(columns, np.float32)[of] * np.array(rows, np.float32)[halves]
            out[here] = fused(np.array(sums, np.float32), factor, np.array(out[here], np.float32))
        if not loads:
            return tuple(out)
        p, i = source
        return (*out, *(v for at in range(0, bm, 16) for v in current().read(p, i + at, L.f32, 4)))

    acc = L.Vec(L.f32, count * blocks)
    operands = (acc, L.Vec(L.f32, count), L.Vec(L.f32, own), L.Vec(L.f32, 2), *((SHARED,) if loads else ()))
    return L.intrinsic(
        f"add_scaled_{bm}_{blocks}{'_loads' * loads}",
        (*operands, L.Const("block")),
        L.Vec(L.f32, count * blocks + own * loads),
        ptx=emit,
        numpy=run,
        effect="synchronises",  # as `scaled_sums`
        section="9.7.3 fma, 9.7.9 ld",
    )


@functools.cache
def joined(count: int) -> L.Op:
    """`(acc, part) -> acc + part`, elementwise."""

    def emit(e: Any, *v: Any) -> list[Any]:
        return [e.f32("add.rn.f32 $0, $1, $2;", v[i], v[count + i]) for i in range(count)]

    def run(acc: Any, part: Any) -> tuple[Any, ...]:
        return tuple(L.add_rn(a, p) for a, p in zip(acc, part, strict=True))

    vec = L.Vec(L.f32, count)
    return L.intrinsic(f"joined_{count}", (vec, vec), vec, ptx=emit, numpy=run, section="9.7.3 add")


@functools.cache
def some_of(count: int, of: int) -> L.Op:
    """`(values, first)`: `count` of `of` values, from number `first` on."""

    def emit(e: Any, *v: Any, first: int) -> Any:
        return v[first : first + count]

    def run(values: Any, first: int) -> tuple[Any, ...]:
        return tuple(values[first : first + count])

    operands = (L.Vec(L.f32, of), L.Const("first"))
    name = f"some_of_{count}_{of}"
    return L.intrinsic(name, operands, L.Vec(L.f32, count), ptx=emit, numpy=run, section="9.7.9 mov")
