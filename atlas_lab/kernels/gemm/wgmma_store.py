"""How the accumulators of a warpgroup's tile become BF16 rows of y: by the copy engine, or thread by thread."""

from __future__ import annotations

import functools
from typing import Any

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import storer
from atlas_lab.kernels.gemm.wgmma_ring import ROW

OUT_ROWS, OUT_COLUMNS = 16, ROW // 2  # what a warp stores at once: the box of y's map, swizzled by 128 bytes
OUT_BYTES = OUT_ROWS * ROW
WARP_BYTES = 2 * OUT_BYTES  # one box is filled while the other is stored


@functools.cache
def map_storer(bn: int, out_at: int, send: Any = L.tma_store_2d):
    """A device function `(y, acc, warp, row, col)`: y a map of boxes [16, 64], `warp` the number among those that
    consume, `row` and `col` the first of its 16 x bn outputs. Its memory lies from byte `out_at`, WARP_BYTES a warp.
    `send` stores a box, where y is not one map what it takes.

    Stores are still read when it returns: lane 0 waits for that before it exits (`bulk_wait_read`). Raises ValueError
    where boxes do not divide the columns or its memory starts within what a swizzle repeats after.
    """
    if out_at % (8 * ROW):
        raise ValueError(f"map_storer: found memory from byte {out_at}, expected a multiple of {8 * ROW}")
    if bn % OUT_COLUMNS:
        raise ValueError(f"map_storer: found {bn} columns, expected a multiple of {OUT_COLUMNS}")
    pack, boxes = L.pack_tile(L.bf16, bn // 2), bn // OUT_COLUMNS

    @L.device
    def run(y, acc, warp, row, col):
        out = L.dynamic_shared(L.u8, out_at)
        lane = L.lane_id()
        r = lane & 15
        # the 16-byte chunks of row r are exchanged by XOR with r % 8
        at = warp * WARP_BYTES + r * ROW + (((lane >> 4) ^ (r & 7)) << 4)
        words = pack(acc)
        for c in L.unroll(boxes):
            box = c % 2 * OUT_BYTES
            if lane == 0:
                if c == 0 and boxes % 2:  # the last box of the tile before lay here too
                    L.bulk_wait_read(0)
                else:
                    L.bulk_wait_read(1)
            L.cuda.syncwarp()
            for j in L.unroll(4):
                i = 16 * c + 4 * j
                L.stmatrix_x4(out, (at ^ (32 * j)) + box, (words[i], words[i + 1], words[i + 2], words[i + 3]))
            L.fence_proxy_async()
            L.cuda.syncwarp()
            if lane == 0:
                send(y, (row, col + OUT_COLUMNS * c), out, warp * WARP_BYTES + box)
                L.bulk_commit()

    return run


@functools.cache
def thread_storer(bn: int):
    """A device function `(y, acc, row, col, m, n, pitch, odd)`: y of n columns, rows `pitch` elements apart; `row` and
    `col` as above; `odd` is odd where y's address, n or pitch are no multiples of two elements."""
    pairs, singles = storer(1, bn // 8, True), storer(1, bn // 8, False)

    @L.device
    def run(y, acc, row, col, m, n, pitch, odd):
        r, c = row + (L.lane_id() >> 2), col + 2 * (L.lane_id() & 3)
        if odd & 1:
            singles(y, acc, r, c, m, n, pitch, L.f32(1))
        else:
            pairs(y, acc, r, c, m, n, pitch, L.f32(1))

    return run
