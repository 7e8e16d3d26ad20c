"""How the accumulators of a warpgroup's tile become BF16 rows of y.

A warp turns 64 columns at a time through shared memory of its own (`stmatrix`, then 16 bytes a lane), so that it stores
whole lines and waits for nothing: a copy engine would still be reading the memory when the next columns are due.
"""

from __future__ import annotations

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import ROW

OUT_ROWS, OUT_COLUMNS = 16, ROW // 2  # what a warp stores at once
WARP_BYTES = OUT_ROWS * ROW
CHUNK = 8  # columns of 16 bytes
ROWS = 32 * CHUNK // OUT_COLUMNS  # that a warp stores together


@functools.cache
def _turned(columns: int, out_at: int):
    """A device function that stores 16 rows of so many columns, at most OUT_COLUMNS, as `row_storer` says."""
    pairs, rest, chunks = columns // 16, columns % 16, columns // CHUNK

    @L.device
    def run(y, words, warp, row, col, m, n, pitch, odd):
        out = L.dynamic_shared(L.u8, out_at)
        lane = L.lane_id()
        r = lane & 15
        # rows of 128 bytes; the 16-byte chunks of row r are exchanged by XOR with r % 8
        to = warp * WARP_BYTES + r * ROW + (((lane >> 4) ^ (r & 7)) << 4)
        for j in L.unroll(pairs):
            L.stmatrix_x4(out, to ^ (32 * j), (words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]))
        if rest:
            L.stmatrix_x2(out, to ^ (32 * pairs), (words[4 * pairs], words[4 * pairs + 1]))
        L.cuda.syncwarp()
        chunk = lane & 7
        column = col + CHUNK * chunk
        for i in L.unroll(OUT_ROWS // ROWS):
            mine = ROWS * i + (lane >> 3)
            if (chunks == OUT_COLUMNS // CHUNK or chunk < chunks) and row + mine < m and column < n:
                v = L.lds_v4_b32(out, warp * WARP_BYTES + mine * ROW + ((chunk ^ (mine & 7)) << 4))
                at = L.i64(row + mine) * pitch + column
                if odd & 7 == 0:
                    L.stg_v4_b32(y, at, v)
                else:
                    for j in L.unroll(CHUNK):
                        if column + j < n:
                            L.stg_b16(y, at + j, L.u32(v[j // 2] >> (16 * (j % 2))) & 0xFFFF)
        L.cuda.syncwarp()

    return run


@functools.cache
def row_storer(bn: int, out_at: int):
    """A device function `(y, acc, warp, row, col, m, n, pitch, odd)`: y of n columns, its rows `pitch` elements apart;
    `warp` the number among those that consume, `row` and `col` the first of its 16 x bn outputs; `odd` is a multiple of
    8 where y's address, n and pitch are multiples of 8 elements. Its memory lies from byte `out_at`, WARP_BYTES a warp.
    Raises ValueError for a bn that is no multiple of 8 and memory not aligned to 16 bytes.
    """
    if bn % CHUNK:
        raise ValueError(f"row_storer: found {bn} columns, expected a multiple of {CHUNK}")
    if out_at % 16:
        raise ValueError(f"row_storer: found memory from byte {out_at}, expected a multiple of 16")
    pack, whole, rest = L.pack_tile(L.bf16, bn // 2), bn // OUT_COLUMNS, bn % OUT_COLUMNS
    store, store_rest, words_of = _turned(OUT_COLUMNS, out_at), _turned(rest, out_at), OUT_COLUMNS // 4

    @L.device
    def run(y, acc, warp, row, col, m, n, pitch, odd):
        words = pack(acc)
        for c in L.unroll(whole):
            some = ()
            for j in L.unroll(words_of):
                some = some + (words[c * words_of + j],)
            store(y, some, warp, row, L.i32(col + OUT_COLUMNS * c), m, n, pitch, odd)
        if rest:
            some = ()
            for j in L.unroll(rest // 4):
                some = some + (words[whole * words_of + j],)
            store_rest(y, some, warp, row, L.i32(col + OUT_COLUMNS * whole), m, n, pitch, odd)

    return run
