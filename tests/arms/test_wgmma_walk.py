"""Where tiles of rows begin."""

from __future__ import annotations

import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_store import OUT_ROWS
from atlas_lab.kernels.gemm.wgmma_walk import walk

BM = 128


def begins(m: int, inside: bool) -> list[int]:
    """The first rows of the tiles that blocks take first, one for each."""
    start = walk(BM, 64, 16, inside=inside).start

    @L.kernel
    def rows_of_tiles(out: L.Out[L.i32], m: L.i32):
        _, part = start(m, L.i32(64), L.i32(4), L.i32(0))
        L.stg_b32(out, L.i32(L.cuda.blockIdx.x), L.u32(part[3]))

    tiles = -(-m // BM)
    out = simt.Buffer("out", 4 * tiles)
    simt.run(rows_of_tiles, grid=tiles, block=1, args=(out, m))
    return [int(row) for row in out.array(np.int32, (tiles,))]


@pytest.mark.parametrize("m", [1, 100, 128, 129, 143, 144, 200, 320, 384, 385])
def test_tiles_that_would_reach_past_x_begin_earlier(m: int) -> None:
    plain, found = begins(m, inside=False), begins(m, inside=True)
    assert plain == list(range(0, m, BM))
    *before, last = found
    assert before == plain[:-1]
    assert (plain[-1] - last) % OUT_ROWS == 0
    if m < BM:
        assert last == 0
    else:
        assert 0 <= last + BM - m < OUT_ROWS, "all rows of x are in a tile, and fewer past it than a warp stores"
