"""What an epilogue adds to the sums of a warpgroup's tile before they are rounded: BF16 `[m, n]`, one or two of them.

They come the way that stores go, through a warp's own memory: 16 bytes a lane, the next ones while these are added,
then `ldmatrix`, which hands each lane what its accumulators are added to. A launch before may have written them: warps
that multiply have waited for it (`wgmma_ring.roles`).
"""

from __future__ import annotations

import functools
from typing import Any

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.gemm.wgmma_store import CHUNK, OUT_COLUMNS, OUT_ROWS, ROWS, WARP_BYTES

ADDENDS = "addends"
"""The parameter `epilogue` of a kernel that has them."""


def refuse_epilogue(family: str, epilogue: str | None, known: tuple[str, ...], joined: bool = False) -> None:
    """Raises ValueError for an epilogue that is neither None nor among those known, and for one of projections that are
    `joined`."""
    if epilogue is not None and (joined or epilogue not in known):
        of = " of several projections" if joined else ""
        raise ValueError(f"{family}: found epilogue {epilogue!r}{of}, expected None or, of one, {', '.join(known)}")


@L.device
def eight(addend, row, column, m, n, odd):
    """8 elements of a row from a column on, as pairs; 0 past m and n. `odd` is a multiple of 8 where n is."""
    v = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
    if row < m and column < n:
        here = L.offset(addend, L.i64(row) * n + column)
        if odd & 7 == 0:
            v = L.ld_in_v4_b32(here, 0)
        else:
            some = ()
            for j in L.unroll(4):
                low, high = L.u32(0), L.u32(0)
                if column + 2 * j < n:
                    low = L.ld_in_b16(here, 2 * j)
                if column + 2 * j + 1 < n:
                    high = L.ld_in_b16(here, 2 * j + 1)
                some = some + (L.u32(low | high << 16),)
            v = some
    return v


@functools.cache
def _add_first(count: int, pairs: int) -> L.Op:
    """Accumulators, the first of them plus so many pairs of BF16."""
    acc, words = L.Vec(L.f32, count), L.Vec(L.u32, pairs)

    def emit(e: Any, *v: Any) -> list[Any]:
        out = list(v[:count])
        for j, word in enumerate(v[count:]):
            for i, half in enumerate((e.builder.shl(word, e.const(16)), e.builder.and_(word, e.const(0xFFFF0000)))):
                out[2 * j + i] = e.f32("add.rn.f32 $0, $1, $2;", out[2 * j + i], e.bits_f32(half))
        return out

    def run(acc: Any, words: Any) -> tuple[Any, ...]:
        out = list(acc)
        for j, word in enumerate(words):
            out[2 * j : 2 * j + 2] = L.add_rn(out[2 * j], L.bf16_lo(word)), L.add_rn(out[2 * j + 1], L.bf16_hi(word))
        return tuple(out)

    return L.intrinsic(f"add_first_{count}_{pairs}", (acc, words), acc, ptx=emit, numpy=run, section="9.7.3 add")


@functools.cache
def _turn(count: int, first: int) -> L.Op:
    """Accumulators, the first so many after the others."""
    acc = L.Vec(L.f32, count)
    return L.intrinsic(
        f"turn_{count}_{first}",
        (acc,),
        acc,
        ptx=lambda e, *v: [*v[first:], *v[:first]],
        numpy=lambda acc: (*tuple(acc)[first:], *tuple(acc)[:first]),
        section="6.4 Operands",
    )


@functools.cache
def _columns(count: int, columns: int, out_at: int) -> tuple[L.DeviceFunction, L.DeviceFunction]:
    """Device functions for 16 rows of so many columns, at most OUT_COLUMNS: `fetch(addend, row, col, m, n, odd)`, what
    a lane loads of them; `add(acc, fetched, warp)`, the first accumulators plus that."""
    pairs, rest, chunks = columns // 16, columns % 16, columns // CHUNK
    add_first = _add_first(count, columns // 4)

    @L.device
    def fetch(addend, row, col, m, n, odd):
        lane = L.lane_id()
        chunk, out = lane & 7, ()
        for i in L.unroll(OUT_ROWS // ROWS):
            last = m if chunks == OUT_COLUMNS // CHUNK or chunk < chunks else L.i32(0)
            out = out + (eight(addend, row + ROWS * i + (lane >> 3), L.i32(col + CHUNK * chunk), last, n, odd),)
        return out

    @L.device
    def add(acc, fetched, warp):
        out = L.dynamic_shared(L.u8, out_at)
        lane = L.lane_id()
        r, chunk = lane & 15, lane & 7
        # rows of 128 bytes; the 16-byte chunks of row r are exchanged by XOR with r % 8
        to = warp * WARP_BYTES + r * ROW + (((lane >> 4) ^ (r & 7)) << 4)
        for i in L.unroll(OUT_ROWS // ROWS):
            mine = ROWS * i + (lane >> 3)
            L.sts_v4_b32(out, warp * WARP_BYTES + mine * ROW + ((chunk ^ (mine & 7)) << 4), fetched[i])
        L.cuda.syncwarp()
        words = ()
        for j in L.unroll(pairs):
            words = words + L.ldmatrix_x4(out, to ^ (32 * j))
        if rest:
            words = words + L.ldmatrix_x2(out, to ^ (32 * pairs))
        L.cuda.syncwarp()
        return add_first(acc, words)

    return fetch, add


@functools.cache
def row_adder(bn: int, out_at: int) -> L.DeviceFunction:
    """A device function `(acc, addends, warp, row, col, m, n) -> acc`: sums of 16 x bn outputs, `row` and `col` the
    first, plus addends `(before, last, both)`: `before`, where there are `both`, then `last`. Memory as of
    `row_storer(bn, out_at)`."""
    count, whole, rest = bn // 2, bn // OUT_COLUMNS, bn % OUT_COLUMNS
    fetch, add = _columns(count, OUT_COLUMNS, out_at)
    fetch_rest, add_rest = _columns(count, rest or OUT_COLUMNS, out_at)
    turn, turn_rest = _turn(count, OUT_COLUMNS // 2), _turn(count, rest // 2)

    @L.device
    def run(acc, addends, warp, row, col, m, n):
        before, last, both = addends
        if whole:
            ahead = fetch(last, row, col, m, n, n)
        for c in L.unroll(whole):
            fetched = ahead
            if both:
                acc = add(acc, fetch(before, row, L.i32(col + OUT_COLUMNS * c), m, n, n), warp)
            if c + 1 < whole:
                ahead = fetch(last, row, L.i32(col + OUT_COLUMNS * (c + 1)), m, n, n)
            acc = turn(add(acc, fetched, warp))
        if rest:
            at = L.i32(col + OUT_COLUMNS * whole)
            fetched = fetch_rest(last, row, at, m, n, n)
            if both:
                acc = add_rest(acc, fetch_rest(before, row, at, m, n, n), warp)
            acc = turn_rest(add_rest(acc, fetched, warp))
        return acc

    return run
