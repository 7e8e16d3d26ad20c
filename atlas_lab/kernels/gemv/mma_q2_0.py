"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, Q2_0 codes repacked into the lanes' own order."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import first_product, of_unit, opaque, part_of, product, scaled_rows, tile_of
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN = 128  # K of a unit of 16 rows
RUN = 16  # K of a lane in half a unit
# 128 + code·4^p in bf16 pairs becomes code - 1 by one exact multiply-add: 4^-p, and -(128·4^-p + 1).
MAGIC = 0x43004300
SCALE = (0x3F803F80, 0x3E803E80, 0x3D803D80)
SHIFT = (0xC301C301, 0xC204C204, 0xC110C110)


@functools.cache
def reader_of(group: int, tiles: int, columns: int, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept)
    half_of_x = of_x.part
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled, mine = scaled_rows(columns), part_of(4 * columns)
    groups = SPAN // group
    size = 512 + 32 * groups  # bytes of a unit
    held = 512 + 128 * groups  # and in the ring, where each lane has its own scales

    @L.device
    def locate(args, which, row, count, k):
        tile = tile_of(row, count)
        return (L.offset(one_of(which, args[0], args[1], args[2]), L.i64(tile) * L.i32((k >> 7) * size)),)

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        here = L.offset(source[0], L.i32(unit * size))
        L.cp_async_16(ring, at + 16 * lane, here, 16 * lane, 16)
        if groups == 2:
            L.cp_async_8(ring, at + 512 + 8 * lane, here, 512 + 8 * (lane >> 2), 8)
        else:
            L.cp_async_4(ring, at + 512 + 4 * lane, here, 512 + 4 * (lane >> 2), 4)

    @L.device
    def decoded(word, magic):
        """16 codes less 1: eight bf16 pairs."""
        out = ()
        for i in L.unroll(8):
            p = i % 3
            v = L.u32(L.u32(word >> (6 * (i // 3))) & (0x00030003 << (2 * p)) | magic)
            out = out + (L.bfma2(v, SCALE[p], SHIFT[p]),)
        return out

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        magic = opaque(MAGIC, k)
        parts = ()
        for half in L.unroll(2):
            v = half_of_x(x, rows, k, unit, kind, half)
            out = ()
            found = ()
            for t in L.unroll(tiles):
                here = L.i32(at + held * t)
                now = mine(sums, t)
                q = L.lds_v2_b32(ring, here + 16 * lane + 8 * half)
                a, b = decoded(q[0], magic), decoded(q[1], magic)
                if groups == 2 or half == 0:
                    part = begin((a[0], b[0], a[1], b[1]), v, 0)
                else:
                    part = add(mine(parts, t), 0, (a[0], b[0], a[1], b[1]), v, 0)
                for j in L.unroll(1, 4):
                    part = add(part, 0, (a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1]), v, j)
                if groups == 2 or half == 1:
                    s = L.lds_b32(ring, here + 512 + 4 * groups * lane + 4 * half * (groups - 1))
                    now = scaled(now, part, L.f16_lo(s), L.f16_hi(s))
                found = found + part
                out = out + now
            parts = found
            sums = out
        return sums

    return Reader(
        SPAN, held, 1, locate, copy, use, no_alpha, take=of_x.take, registers=of_x.registers, place=of_x.place
    )


@L.family
def mma_q2_0(
    group: int = 64,
    warps: int = 8,
    depth: int = 4,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    cluster: int = 1,
    kept: int = 0,
):
    """Weights as `repacked_q2_0` makes them, U8 `[ceil(n/16), k/128, 576 or 544]` for groups of 64 or 128, x BF16
    `[m, k]`, y BF16 `[m, n]`; m at most 8·columns; of several weights the first; `cluster` and
    `kept` as in `mma_nvfp4_lanes`. The sum of (code - 1)·x over a group is scaled in FP32."""
    reader = reader_of(group, tiles, columns, kept > 0)
    run = stream(reader, warps, depth, tiles, columns, cluster=cluster, kept=kept)

    @L.kernel(launch_bounds=(32 * warps // cluster, blocks))
    def kernel(
        w0: L.In[L.u8],
        w1: L.In[L.u8],
        w2: L.In[L.u8],
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
