"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, Q4_K blocks as GGUF stores them."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import activations, first_product, ones, opaque, part_of, product, scaled_rows
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream
from atlas_lab.kernels.lang import cuda

SPAN, BYTES = 256, 144  # weights and bytes of a block: a unit is 16 of them
RUN = 8  # K of a lane in a group of 32
PIECES = BYTES // 16
ROW, UNIT = 224, 3584  # bytes of a row in the ring: a block, the factors of its eight groups, 16 to spread the banks
MAGIC, EIGHT = 0x43, 0xC308C308  # the upper byte of bf16 128, whose low mantissa bits a code fills; -(128 + 8) twice
INTEGER = 8388608.0  # 2^23: a byte below its bits 0x4B000000 is the float 2^23 + byte


@functools.cache
def reader_of(tiles: int, columns: int) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    place, fetch = activations(columns, RUN, ordered=True)
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled = scaled_rows(columns)
    mine, sum_of = part_of(4 * columns), ones(columns, RUN)

    @L.device
    def locate(args, which, row, count, k):
        """What the lane copies first of the tile, and how many rows follow that one's."""
        here = L.i32(row + L.lane_id() // PIECES)
        w = one_of(which, args[0], args[1], args[2])
        piece = L.i32(16 * (L.lane_id() % PIECES))
        return L.offset(w, L.i64(min(here, count - 1)) * (k // SPAN) * BYTES + piece), L.i32(count - 1 - here)

    @L.device
    def copy(ring, at, source, unit, k):
        # whole blocks, three rows at a time: a part of 32 bytes would be of two sectors, and both would be read
        lane = L.lane_id()
        to = L.i32(at + ROW * (lane // PIECES) + 16 * (lane % PIECES))
        here, step = L.offset(source[0], L.i64(unit) * BYTES), L.i32(3 * BYTES * (k // SPAN))
        for j in L.unroll(6):
            if lane < (3 * PIECES if j < 5 else PIECES):
                # nothing is read of rows past the last: they are zero
                L.cp_async_16(ring, to + 3 * ROW * j, here, 0, 16 if 3 * j <= source[1] else 0)
            here = L.offset(here, step)

    @L.device
    def decode(ring, here, to, pick, upper):
        """From the header of a row, the scale and the least value of two groups: those whose bytes `pick` and pick + 1
        are of the first four groups, or of the `upper` four."""
        v = L.lds_v4_b32(ring, here)
        low, mid, high = v[1], v[2], v[3]
        sc, m = L.u32(low & 0x3F3F3F3F), L.u32(mid & 0x3F3F3F3F)
        if upper:
            sc = L.u32((high & 0x0F0F0F0F) | (low >> 2 & 0x30303030))
            m = L.u32((high >> 4 & 0x0F0F0F0F) | (mid >> 2 & 0x30303030))
        d, least = L.f16_lo(v[0]), L.f16_hi(v[0])
        d_zero, least_zero = L.mul_rn(d, L.f32(-INTEGER)), L.mul_rn(least, L.f32(-INTEGER))
        out = ()
        for i in L.unroll(2):
            s = L.fma_rn(d, L.bits_f32(L.prmt(sc, 0x4B000000, pick + i)), d_zero)
            low_of = L.fma_rn(least, L.bits_f32(L.prmt(m, 0x4B000000, pick + i)), least_zero)
            out = out + (s, L.fma_rn(s, L.f32(8), L.mul_rn(L.f32(-1), low_of)))
        L.sts_v4_f32(ring, to, out)

    @L.device
    def codes(nibbles):
        """Four codes, less 8, of the low half of each byte."""
        low, high = L.prmt(nibbles, MAGIC, 0x4140), L.prmt(nibbles, MAGIC, 0x4342)
        return L.badd2(low, EIGHT), L.badd2(high, EIGHT)

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        pick, upper = L.u32(0x7540 + 2 * (lane & 1)), (lane & 2) != 0
        for t in L.unroll(tiles):
            for h in L.unroll(2):
                here = L.i32(at + UNIT * t + ROW * (8 * h + (lane >> 2)))
                decode(ring, here, L.i32(here + BYTES + 16 * (lane & 3)), pick, upper)
        cuda.syncwarp()  # the four lanes of a row have its eight groups
        c, end = L.i32(0), L.i32(opaque(4, k))
        while c < end:  # not unrolled: fewer registers
            words, factors = (), ()
            for t in L.unroll(tiles):
                for h in L.unroll(2):
                    here = L.i32(at + UNIT * t + ROW * (8 * h + (lane >> 2)))
                    words = words + L.lds_v2_b32(ring, here + 16 + 32 * c + RUN * (lane & 3))
                    factors = factors + L.lds_v4_f32(ring, here + BYTES + 16 * c)
            for half in L.unroll(2):
                # groups 2c and 2c + 1 are the low and the high nibbles of the c-th 32 bytes
                v = fetch(x, rows, k, L.i32(unit * SPAN + 32 * (2 * c + half) + RUN * (lane & 3)), kind)
                total = sum_of(v)
                out = ()
                for t in L.unroll(tiles):
                    part = ()
                    for j in L.unroll(2):
                        a = codes(L.u32(words[4 * t + j] >> (4 * half)) & 0x0F0F0F0F)
                        b = codes(L.u32(words[4 * t + 2 + j] >> (4 * half)) & 0x0F0F0F0F)
                        if j == 0:
                            part = begin((a[0], b[0], a[1], b[1]), v, 0)
                        else:
                            part = add(part, 0, (a[0], b[0], a[1], b[1]), v, j)
                    f, g = 8 * t + 2 * half, 8 * t + 4 + 2 * half
                    now = scaled(mine(sums, t), part, factors[f], factors[g])
                    out = out + scaled(now, total, factors[f + 1], factors[g + 1])
                sums = out
            c = L.i32(c + 1)
        return sums

    return Reader(SPAN, UNIT, 2, locate, copy, use, no_alpha, crosses=True, place=place, ordered=True)


@L.family
def mma_q4_k(
    warps: int = 8,
    depth: int = 2,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    cluster: int = 1,
):
    """Blocks U8 `[n, k/256·144]`, x BF16 `[m, k]`, y BF16 `[m, n]`; m at most 8·columns. Of the arguments that kernels
    of several projections take, only the first weight is read; `cluster` as in `mma_nvfp4_lanes`.

    A weight is d·sc·(q - 8) + (8·d·sc - dmin·m): q - 8 is exact in BF16, so a group of 32 is one product of codes and
    one sum of x (a product with ones, which the row tiles share), each scaled in FP32.
    """
    reader = reader_of(tiles, columns)
    run = stream(reader, warps, depth, tiles, columns, cluster=cluster)

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
