"""What a GEMM of int8 does with the sums of 32 of K: it makes them float32 and adds them, times their scales.

Sums are those of 64x64 outputs of a warpgroup, 32 of a thread, 4·j + 2·h + e for row g + 8·h and column 8·j + 2·t + e
of its warp's 16 x 64. They are below 2**19 in magnitude: float32 holds them.
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
def scaled_sums(blocks: int, fresh: bool = False) -> L.Op:
    """`(acc, sums, rows, columns, block, group) -> acc`: accumulators of `blocks` times 64 rows with sums·(row scale ·
    column scale) added to those of one block by a fused multiply-add; `fresh`: put in their place instead. `columns`
    are as `column_scales` returns them, `group` which of those held."""
    total = COUNT * blocks

    def emit(e: Any, *v: Any, block: int, group: int) -> list[Any]:
        out, sums = list(v[:total]), v[total : total + COUNT]
        rows, columns = v[total + COUNT : total + COUNT + 2], v[total + COUNT + 2 :]
        for i in range(COUNT):
            half, column = _of(i)
            factor = e.f32("mul.rn.f32 $0, $1, $2;", rows[half], columns[OWN * group + column])
            value = e.asm("cvt.rn.f32.s32 $0, $1;", [out[0].type], [sums[i]])[0]
            at = COUNT * block + i
            if fresh:
                out[at] = e.f32("mul.rn.f32 $0, $1, $2;", value, factor)
            else:
                out[at] = e.f32("fma.rn.f32 $0, $1, $2, $3;", value, factor, out[at])
        return out

    def run(acc: Any, sums: Any, rows: Any, columns: Any, block: int, group: int) -> tuple[Any, ...]:
        out, here = list(acc), slice(COUNT * block, COUNT * (block + 1))
        row, column = np.array(rows, np.float32), np.array(columns[OWN * group : OWN * (group + 1)], np.float32)
        with np.errstate(all="ignore"):
            factor = row[_HALVES] * column[_COLUMNS]
            value = np.array(sums, np.int32).astype(np.float32)
            out[here] = value * factor if fresh else fused(value, factor, np.array(out[here], np.float32))
        return tuple(out)

    vec = L.Vec(L.f32, total)
    # ordered: an addition that is moved past the next product into the same registers was seen compiled to take that
    # product's sums (ptxas 13.5), its own product dropped
    return L.intrinsic(
        f"scaled_sums_{blocks}{'_fresh' * fresh}",
        (vec, L.Vec(L.i32, COUNT), L.Vec(L.f32, 2), L.Vec(L.f32, HELD * OWN), L.Const("block"), L.Const("group")),
        vec,
        ptx=emit,
        numpy=run,
        effect="synchronises",
        section="9.7.3 fma, 9.7.9 cvt",
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
def block_of(blocks: int) -> L.Op:
    """`(acc, block)`: the accumulators of one of `blocks` times 64 rows."""

    def emit(e: Any, *v: Any, block: int) -> Any:
        return v[COUNT * block : COUNT * (block + 1)]

    def run(acc: Any, block: int) -> tuple[Any, ...]:
        return tuple(acc[COUNT * block : COUNT * (block + 1)])

    operands = (L.Vec(L.f32, COUNT * blocks), L.Const("block"))
    return L.intrinsic(f"block_of_{blocks}", operands, L.Vec(L.f32, COUNT), ptx=emit, numpy=run, section="9.7.9 mov")
