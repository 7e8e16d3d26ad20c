"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, NVFP4 weights as checkpoints store them."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import of_unit, product, rows_at, rows_of_tile
from atlas_lab.kernels.gemv.stream import Reader, one_of, stream

SPAN, UNIT = 128, 1280  # K and bytes of a unit of 16 rows: the codes of both rows of a lane, then their scales
RUN = 32  # K of a lane: a load of 16 bytes, two groups


@functools.cache
def reader_of(tiles: int, columns: int, whole: bool, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, whole=whole)
    part_of_x = of_x.part
    add = product(columns, tiles, RUN)

    @L.device
    def locate(args, which, row, count, k):
        upper, lower = rows_of_tile(row, count)
        w = one_of(which, args[0], args[3], args[6])
        s = one_of(which, args[1], args[4], args[7])
        scales = rows_at(s, upper, lower, k >> 4)
        return rows_at(w, upper, lower, k >> 1) + scales

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        column = L.i32(unit * SPAN + RUN * (lane & 3))
        valid = 16 if whole or column < k else 0
        column = column if whole or column < k else L.i32(0)
        to, scale = L.i32(at + 16 * lane), L.i32(at + 1024 + 4 * lane)
        for h in L.unroll(2):
            L.cp_async_16_stream(ring, to + 512 * h, source[h], column >> 1, valid)
            if whole:  # four scales: a lane's two and those of a neighbour
                L.cp_async_4(ring, scale + 128 * h, source[2 + h], 8 * unit + (lane & 2) * 2, 4)

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        v = part_of_x(x, rows, k, unit, kind, 0)
        for t in L.unroll(tiles):
            here = L.i32(at + UNIT * t)
            p, q = L.lds_v4_b32(ring, here + 16 * lane), L.lds_v4_b32(ring, here + 512 + 16 * lane)
            # the lane's two scales of the upper row, then of the lower one, a byte each
            if whole:
                a, b = L.lds_b32(ring, here + 1024 + 4 * lane), L.lds_b32(ring, here + 1152 + 4 * lane)
                four = L.prmt(a, b, 0x7632 if lane & 1 else 0x5410)
            else:
                column = L.i32(unit * SPAN + RUN * (lane & 3))
                column = column if column < k else L.i32(0)
                four = L.u32(
                    L.ldg_b16(source[4 * t + 2], column >> 4) | L.ldg_b16(source[4 * t + 3], column >> 4) << 16
                )
            s = L.e4m3x4_bf16x2(four)
            for j in L.unroll(4):
                # words 0 and 1 are the first group of 16, 2 and 3 the second
                pick = 0x1010 if j < 2 else 0x3232
                g, h = L.prmt(s[0], 0, pick), L.prmt(s[1], 0, pick)
                upper, lower = L.e2m1x8_bf16x2(p[j]), L.e2m1x8_bf16x2(q[j])
                for i in L.unroll(2):
                    c, d = 2 * i, 2 * i + 1
                    step = (L.bmul2(upper[c], g), L.bmul2(lower[c], h), L.bmul2(upper[d], g), L.bmul2(lower[d], h))
                    sums = add(sums, t, step, v, 2 * j + i)
        return sums

    @L.device
    def alpha(args, which):
        g = L.ldg_f32(one_of(which, args[2], args[5], args[8]), 0)
        return L.div_rn(L.f32(1), g) if args[9] else g

    return Reader(SPAN, UNIT, 4, locate, copy, use, alpha, take=of_x.take, registers=of_x.registers, place=of_x.place)


@L.family
def mma_nvfp4(
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
    """Codes U8 `[n_i, k/2]`, block scales E4M3 `[n_i, k/16]` and F32 tensor scales of up to three projections; x BF16
    `[m, k]`, y BF16 `[m, n]`; m at most 8·columns, k a multiple of 32, of 128 if `whole`. `first`, `second`, `pair`,
    `clamp`, `cluster`, `kept` and `divides` as in `mma_nvfp4_lanes`. A code times its block scale is exact in BF16.
    Raises ValueError for `kept` where k is not `whole` units.
    """
    if kept and not whole:
        raise ValueError(f"kept: found {kept} units of a K that is not whole, expected K whole or kept 0")
    reader = reader_of(tiles, columns, whole, kept > 0)
    run = stream(reader, warps, depth, tiles, columns, joined, pair, clamp, cluster, kept)

    @L.kernel(launch_bounds=(32 * warps // cluster, blocks))
    def kernel(
        w0: L.In[L.u8],
        s0: L.In[L.e4m3],
        g0: L.In[L.f32],
        w1: L.In[L.u8],
        s1: L.In[L.e4m3],
        g1: L.In[L.f32],
        w2: L.In[L.u8],
        s2: L.In[L.e4m3],
        g2: L.In[L.f32],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        first: L.i32,
        second: L.i32,
        kind: L.i32,
        full: L.i32,
        divides: L.i32,
    ):
        run((w0, s0, g0, w1, s1, g1, w2, s2, g2, divides), x, y, m, n, k, first, second, kind, full)

    return kernel
