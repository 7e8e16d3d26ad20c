"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, BF16 weights as stored."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.abreast import Straight, abreast_of, refuse_all_but_plain
from atlas_lab.kernels.gemv.columns import of_unit, part_of, product, rows_at, rows_of_tile
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN, UNIT = 64, 2048  # K and bytes of a unit of 16 rows
RUN = 8  # K of a lane in a load


@functools.cache
def half_of(tiles: int, columns: int):
    """A device function `(sums, tile, a, b, v)`: sums plus half a unit of that tile, four words of the lane's upper row
    and of its lower one, times the half's x."""
    add = product(columns, tiles, RUN)

    @L.device
    def half(sums, tile, a, b, v):
        for j in L.unroll(2):
            sums = add(sums, tile, (a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1]), v, j)
        return sums

    return half


@L.device
def start_of(args, which, row, count, k):
    """Where the lane's two rows of the tile begin."""
    upper, lower = rows_of_tile(row, count)
    return rows_at(one_of(which, args[0], args[1], args[2]), upper, lower, k)


@functools.cache
def reader_of(tiles: int, columns: int, whole: bool, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, whole=whole)
    part_of_x, half = of_x.part, half_of(tiles, columns)

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
                sums = half(sums, t, a, b, v)
        return sums

    return Reader(
        SPAN, UNIT, 2, start_of, copy, use, no_alpha, take=of_x.take, registers=of_x.registers, place=of_x.place
    )


@functools.cache
def straight_of(columns: int) -> Straight:
    """How they are read into registers and multiplied, the same products and sums."""
    half, quad = half_of(1, columns), part_of(4)

    @L.device
    def locate(args, which, row, count, k):
        upper, lower = start_of(args, which, row, count, k)
        run = RUN * (L.lane_id() & 3)
        return L.offset(upper, run), L.offset(lower, run)

    @L.device
    def load(source, unit, k):
        words = ()
        for h in L.unroll(2):
            here = L.offset(source[h], L.i32(unit * SPAN))
            words = words + L.ldg_v4_b32_line(here, 0) + L.ldg_v4_b32_line(here, 32)
        return words

    @L.device
    def use(sums, words, source, args, of_x, unit):
        for i in L.unroll(2):
            sums = half(sums, 0, quad(words, i), quad(words, 2 + i), of_x(unit, i))
        return sums

    return Straight(SPAN, RUN, 16, locate, load, use, no_alpha)


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
    abreast: int = 0,
):
    """W BF16 `[n_i, k]` of up to three projections, x BF16 `[m, k]`, y BF16 `[m, n]`; m at most 8·columns,
    k a multiple of 8, of 64 if `whole`. `first`, `second`, `pair`, `clamp`, `cluster`, `kept` and `abreast` as in
    `mma_nvfp4_lanes`."""
    if abreast:
        asked = {"joined": joined, "pair": pair, "clamp": clamp, "not whole": not whole, "kept": kept > 0}
        refuse_all_but_plain("abreast", asked, tiles, cluster)
        run = abreast_of(straight_of(columns), warps, abreast, columns, depth)
    else:
        reader = reader_of(tiles, columns, whole, kept > 0)
        run = stream(reader, warps, depth, tiles, columns, joined, pair, False, clamp, cluster, kept)

    of_x = L.InMap[L.bf16] if abreast else L.In[L.bf16]

    @L.kernel(launch_bounds=(32 * warps * max(abreast, 1) // cluster, blocks))
    def kernel(
        w0: L.In[L.bf16],
        w1: L.In[L.bf16],
        w2: L.In[L.bf16],
        x: of_x,
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
