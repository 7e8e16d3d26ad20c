"""What the GEMVs share: the rows a warp holds, and how their sums leave it."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@functools.cache
def rows_of_warp(warps: int, rows: int):
    """Two device functions for warps of `rows` output rows.

    `begin(at, acc, n, k)` empties the sums, finds where the rows start in `[n, k]` weights and returns the first row;
    `end(y, acc, first, n)` adds the lanes up, 16 apart first, and stores what exists of the rows. `at` and `acc` are
    local arrays of `rows` i64 and f32.
    """

    @L.device
    def begin(at, acc, n, k):
        first = (cuda.blockIdx.x * warps + L.warp_id()) * rows
        for r in L.unroll(rows):
            # rows past the last repeat it; they are not stored
            at[r] = L.i64(min(first + r, n - 1)) * k
            acc[r] = L.f32(0)
        return first

    @L.device
    def end(y, acc, first, n):
        for r in L.unroll(rows):
            total = L.warp_sum(acc[r])
            if L.lane_id() == 0 and first + r < n:
                L.stg_bf16(y, first + r, total)

    return begin, end
