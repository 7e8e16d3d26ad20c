"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, int8 weights with one scale for 32 of a row."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import (
    first_product,
    of_unit,
    opaque,
    part_of,
    product,
    rows_at,
    rows_of_tile,
    scaled_rows,
)
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN = 128  # K of a unit of 16 rows
ROW, UNIT = 1536, 3072  # bytes of a unit: a lane's upper row, its codes and scales, then its lower row
RUN = 8  # K of a lane in a group of 32
LOW, SIGN, MAGIC = 0x007F007F, 0x00800080, 0x43004300


@functools.cache
def reader_of(tiles: int, columns: int, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, crossed=True)
    group_of_x = of_x.part
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled, mine = scaled_rows(columns), part_of(4 * columns)

    @L.device
    def locate(args, which, row, count, k):
        upper, lower = rows_of_tile(row, count)
        w = one_of(which, args[0], args[2], args[4])
        s = one_of(which, args[1], args[3], args[5])
        scales = rows_at(s, upper, lower, k >> 5)
        return rows_at(w, upper, lower, k) + scales

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        column = L.i32(unit * SPAN + RUN * (lane & 3))
        to, scale = L.i32(at + 8 * lane), L.i32(at + 1024 + 16 * lane)
        for h in L.unroll(2):
            here = L.offset(source[h], column)
            for c in L.unroll(4):
                L.cp_async_8(ring, to + ROW * h + 256 * c, here, 32 * c, 8)
            L.cp_async_16(ring, scale + ROW * h, source[2 + h], 4 * unit, 16)

    @L.device
    def pairs(word, magic):
        """Bytes 0 and 2, then 1 and 3: 128 + the low seven bits, less 128 or, for the negative ones, 256."""
        w = L.u32(word >> 8)
        even = L.badd2(word & LOW | magic, word & SIGN | (magic | 0x80008000))
        return even, L.badd2(w & LOW | magic, w & SIGN | (magic | 0x80008000))

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        magic = opaque(MAGIC, k)
        for g in L.unroll(4):
            v = group_of_x(x, rows, k, unit, kind, g)
            out = ()
            for t in L.unroll(tiles):
                here = L.i32(at + UNIT * t)
                p = L.lds_v2_b32(ring, here + 256 * g + 8 * lane)
                q = L.lds_v2_b32(ring, here + ROW + 256 * g + 8 * lane)
                a, b = pairs(p[0], magic), pairs(q[0], magic)
                part = begin((a[0], b[0], a[1], b[1]), v, 0)
                a, b = pairs(p[1], magic), pairs(q[1], magic)
                part = add(part, 0, (a[0], b[0], a[1], b[1]), v, 1)
                f = L.lds_f32(ring, here + 1024 + 16 * lane + 4 * g)
                h = L.lds_f32(ring, here + ROW + 1024 + 16 * lane + 4 * g)
                out = out + scaled(mine(sums, t), part, f, h)
            sums = out
        return sums

    return Reader(
        SPAN, UNIT, 4, locate, copy, use, no_alpha, take=of_x.take, registers=of_x.registers, place=of_x.place
    )


@L.family
def mma_int8(
    warps: int = 8,
    depth: int = 1,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    cluster: int = 1,
    kept: int = 0,
):
    """q I8 `[n, k]` and scales F32 `[n, k/32]`, x BF16 `[m, k]`, y BF16 `[m, n]`; m at most 8·columns, k a multiple of
    128; of several weights the first; `cluster` and `kept` as in `mma_nvfp4_lanes`. Weights become BF16 in
    registers, exactly; sums over 32 of K are scaled and added in FP32."""
    reader = reader_of(tiles, columns, kept > 0)
    run = stream(reader, warps, depth, tiles, columns, cluster=cluster, kept=kept)

    @L.kernel(launch_bounds=(32 * warps // cluster, blocks))
    def kernel(
        w0: L.In[L.i8],
        s0: L.In[L.f32],
        w1: L.In[L.i8],
        s1: L.In[L.f32],
        w2: L.In[L.i8],
        s2: L.In[L.f32],
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
        run((w0, s0, w1, s1, w2, s2), x, y, m, n, k, first, second, kind, full)

    return kernel
