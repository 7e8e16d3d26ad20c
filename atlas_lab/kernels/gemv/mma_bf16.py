"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, BF16 weights as stored."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import of_unit, product, rows_at, rows_of_tile
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN, UNIT = 64, 2048  # K and bytes of a unit of 16 rows
RUN = 8  # K of a lane in a load


@functools.cache
def reader_of(tiles: int, columns: int, whole: bool, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, whole=whole)
    part_of_x = of_x.part
    add = product(columns, tiles, RUN)

    @L.device
    def locate(args, which, row, count, k):
        upper, lower = rows_of_tile(row, count)
        w = one_of(which, args[0], args[1], args[2])
        return rows_at(w, upper, lower, k)

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        for i in L.unroll(2):
            column = L.i32(unit * SPAN + 32 * i + RUN * (lane & 3))
            valid = 16 if whole or column < k else 0
            column = column if whole or column < k else L.i32(0)
            for h in L.unroll(2):
                L.cp_async_16_stream(ring, at + 512 * (2 * i + h) + 16 * lane, source[h], column, valid)

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        for i in L.unroll(2):
            v = part_of_x(x, rows, k, unit, kind, i)
            for t in L.unroll(tiles):
                here = L.i32(at + UNIT * t + 1024 * i + 16 * lane)
                a, b = L.lds_v4_b32(ring, here), L.lds_v4_b32(ring, here + 512)
                for j in L.unroll(2):
                    sums = add(sums, t, (a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1]), v, j)
        return sums

    return Reader(
        SPAN, UNIT, 2, locate, copy, use, no_alpha, take=of_x.take, registers=of_x.registers, place=of_x.place
    )


@L.family
def mma_bf16(
    warps: int = 8,
    depth: int = 4,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    whole: bool = True,
    joined: bool = False,
    pair: bool = False,
    clamp: bool = False,
    cluster: int = 1,
    kept: int = 0,
):
    """W BF16 `[n_i, k]` of up to three projections, x BF16 `[m, k]`, y BF16 `[m, n]`; m at most 8·columns,
    k a multiple of 8, of 64 if `whole`. `first`, `second`, `pair`, `clamp`, `cluster` and `kept` as in
    `mma_nvfp4_lanes`."""
    reader = reader_of(tiles, columns, whole, kept > 0)
    run = stream(reader, warps, depth, tiles, columns, joined, pair, clamp, cluster, kept)

    @L.kernel(launch_bounds=(32 * warps // cluster, blocks))
    def kernel(
        w0: L.In[L.bf16],
        w1: L.In[L.bf16],
        w2: L.In[L.bf16],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        first: L.i32,
        second: L.i32,
        kind: L.i32,
        full: L.i32,
    ):
        run((w0, w1, w2), x, y, m, n, k, first, second, kind, full)

    return kernel
