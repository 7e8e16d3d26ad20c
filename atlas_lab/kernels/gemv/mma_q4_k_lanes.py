"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, Q4_K blocks repacked into the lanes' own order."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import (
    activations,
    first_product,
    of_unit,
    opaque,
    part_of,
    product,
    scaled_rows,
    tile_of,
)
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream
from atlas_lab.kernels.lang import cuda

SPAN, UNIT = 256, 2304  # K and bytes of a unit of 16 rows
HELD = 2560  # bytes of it in the ring
SCALES, REST = 2048, 2176  # where the codes of a unit end, and its scales
RUN = 8  # K of a lane in a group of 32
CODE, MAGIC = 0x00780078, 0x41804180  # the upper four mantissa bits of bf16 pairs; 16, which a code there is added to
# A scale in the second byte of a float whose others are of MAGIC, 0x41..8080, is 8.03… + sc/16.
SIX, OFFSET = 0x3F3F3F3F, 8 + 0x8080 / 2**20
LIFT = 16.0
PIECES = 3  # registers of the sums of x, for each 8 rows of it
WHOLE = 0x43004300  # bf16 128, whose low mantissa bits a scale or a minimum fills
# 128 + sc to -sc/2 and 128 + m to -m/32, by exact multiply-adds: they multiply twice the sums of x.
OF_SCALE, OF_SCALE_SHIFT = 0xBF00BF00, 0x42804280
OF_LEAST, OF_LEAST_SHIFT = 0xBD00BD00, 0x40804080


@L.device
def codes(word, magic):
    """Eight codes, each plus 16: four bf16 pairs."""
    return (
        L.u32(word & CODE | magic),
        L.u32(L.u32(word >> 4) & CODE | magic),
        L.u32(L.u32(word >> 8) & CODE | magic),
        L.u32(L.shf_l(word, word, 4) & CODE | magic),
    )


@L.device
def without_top(value):
    """A float less its upper half as a bf16: exact."""
    return L.fma_rn(L.bits_f32(L.u32(L.f32_bits(value) & 0xFFFF0000)), L.f32(-1), value)


@L.device
def pieces(low, high):
    """Two floats as three bf16 pairs that add up to them, exactly."""
    a, b = without_top(low), without_top(high)
    c, d = without_top(a), without_top(b)
    top = L.prmt(L.f32_bits(low), L.f32_bits(high), 0x7632)
    return top, L.prmt(L.f32_bits(a), L.f32_bits(b), 0x7632), L.prmt(L.f32_bits(c), L.f32_bits(d), 0x7632)


@L.device
def scale(word, byte, magic):
    """A sixteenth of a byte of a word, below 64."""
    return L.add_rn(L.bits_f32(L.prmt(word, magic, 0x7044 + 0x100 * byte)), L.f32(-OFFSET))


@functools.cache
def reader_of(tiles: int, columns: int, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x, (_, fetch) = of_unit(columns, RUN, SPAN, kept=kept), activations(1, RUN, ordered=True)
    group_of_x, all_of_x = of_x.part, of_x.take
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled, mine, quad = scaled_rows(columns), part_of(4 * columns), part_of(4)
    sums_kept = part_of(PIECES * columns, of_x.registers * columns)
    multiply, multiply_first = L.mma_m16n8k16_bf16, L.mma_m16n8k16_bf16_first

    @L.device
    def locate(args, which, row, count, k):
        tile = tile_of(row, count)
        return (L.offset(one_of(which, args[0], args[1], args[2]), L.i64(tile) * (k // SPAN) * UNIT),)

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        here, to = L.offset(source[0], L.i32(unit * UNIT + 16 * lane)), L.i32(at + 16 * lane)
        for i in L.unroll(4):
            L.cp_async_16(ring, to + 512 * i, here, 512 * i, 16)
        # by half of the lanes: the others write zeros after it, which is cheaper than not to
        L.cp_async_16(ring, to + SCALES, here, SCALES, 16 if lane < 16 else 0)

    @L.device
    def sums_of_x(total, v, group, hot):
        """Twice the sums of a group of x, in its column: lane 4g + t has those of groups 2t and 2t + 1, row g of each
        8 rows of x, in two parts."""
        two = L.prmt(hot[group >> 2], 0, 0x0404 + 0x1010 * (group & 3))
        out = ()
        for c in L.unroll(columns):
            # the four registers as they were loaded: two of them count as other rows, whose sums are added later
            if group == 0:
                out = out + multiply_first(quad(v, c), (two, two))
            else:
                out = out + multiply(quad(total, c), quad(v, c), (two, two))
        return out

    @L.device
    def hot_of(lane):
        """A byte of two in the lane's row of each group's column, groups 0 to 3 and 4 to 7."""
        one = L.u32(0x40 << L.u32(8 * (lane >> 2 & 3)))
        return one if lane < 16 else L.u32(0), L.u32(0) if lane < 16 else one

    @L.device
    def in_pieces(total):
        """Twice the sums of x, three bf16 pairs for each 8 rows of x."""
        parts = ()
        for c in L.unroll(columns):
            low, high = L.add_rn(total[4 * c], total[4 * c + 2]), L.add_rn(total[4 * c + 1], total[4 * c + 3])
            parts = parts + pieces(low, high)
        return parts

    @L.device
    def take(x, rows, k, unit, kind):
        v, hot, total = all_of_x(x, rows, k, unit, kind), hot_of(L.lane_id()), L.zeros(4 * columns)
        for g in L.unroll(8):
            total = sums_of_x(total, group_of_x(v, rows, k, unit, kind, g), g, hot)
        return v + in_pieces(total)

    @L.device
    def second_part(by_scale, parts, upper, lower, nibbles):
        """Of two rows: by_scale less sc times the sums of x, and 0 less m/16 times them. `upper` and `lower` have sc in
        the low 6 bits of each half and the upper bits of m above them, `nibbles` the others."""
        a = L.bfma2(L.u32(upper & 0x003F003F | WHOLE), OF_SCALE, OF_SCALE_SHIFT)
        b = L.bfma2(L.u32(lower & 0x003F003F | WHOLE), OF_SCALE, OF_SCALE_SHIFT)
        upper = L.u32(L.u32(upper >> 2) & 0x00300030 | nibbles & 0x000F000F)
        lower = L.u32(L.u32(lower >> 2) & 0x00300030 | L.u32(nibbles >> 4) & 0x000F000F)
        e = L.bfma2(L.u32(upper | WHOLE), OF_LEAST, OF_LEAST_SHIFT)
        f = L.bfma2(L.u32(lower | WHOLE), OF_LEAST, OF_LEAST_SHIFT)
        of_scale, of_least = (), ()
        for c in L.unroll(columns):
            first, last = (parts[3 * c], parts[3 * c + 1]), (parts[3 * c + 2], L.u32(0))
            of_scale = of_scale + multiply(multiply(quad(by_scale, c), (a, b, a, b), first), (a, b, a, b), last)
            of_least = of_least + multiply(multiply_first((e, f, e, f), first), (e, f, e, f), last)
        return of_scale, of_least

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        magic = opaque(MAGIC, k)
        head = L.i32(at + 16 * (lane >> 2))
        hot, here = hot_of(lane), ()
        if not kept:
            for c in L.unroll(columns):
                here = here + (L.offset(x, rows[c] + unit * SPAN + RUN * (lane & 3)),)
        pick = L.u32(0x0400 + 0x0101 * (lane & 3))  # the lane's byte of two words, each to the low byte of a half
        scales, ends = (), ()
        for t in L.unroll(tiles):
            s = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
            if t < live:
                s = L.lds_v4_b32(ring, head + HELD * t + SCALES)
            ends = ends + (L.prmt(s[0], s[1], pick), L.prmt(s[2], s[3], pick))
            for i in L.unroll(4):
                scales = scales + (L.u32(s[i] & SIX),)
        total, by_scale = L.zeros(4 * columns), L.zeros(4 * columns * tiles)
        for g in L.unroll(8):
            v = ()
            if kept:
                v = group_of_x(x, rows, k, unit, kind, g)
            else:
                if g % 2 == 0 and g > 0:
                    cuda.syncwarp()  # x is loaded here and not earlier: fewer registers
                for j in L.unroll(columns):
                    v = v + fetch(here[j], (0,), k, 32 * g, kind)
                total = sums_of_x(total, v, g, hot)
            out = ()
            for t in L.unroll(tiles):
                now = mine(by_scale, t)
                if t < live:
                    q = L.lds_v2_b32(ring, at + HELD * t + 256 * g + 8 * lane)
                    a, b = codes(q[0], magic), codes(q[1], magic)
                    part = begin((a[0], b[0], a[1], b[1]), v, 0)
                    part = add(part, 0, (a[2], b[2], a[3], b[3]), v, 1)
                    upper = scale(scales[4 * t + g % 2], g // 2, magic)
                    lower = scale(scales[4 * t + 2 + g % 2], g // 2, magic)
                    now = scaled(now, part, upper, lower)
                out = out + now
            by_scale = out
        parts = sums_kept(x, 0) if kept else in_pieces(total)
        out = ()
        for t in L.unroll(tiles):
            now = mine(sums, t)
            if t < live:
                r = L.lds_v4_b32(ring, head + HELD * t + REST)
                nibbles = L.prmt(r[2], r[3], pick)
                of_scale, of_least = second_part(mine(by_scale, t), parts, ends[2 * t], ends[2 * t + 1], nibbles)
                now = scaled(now, of_scale, L.f16_lo(r[0]), L.f16_hi(r[0]))
                now = scaled(now, of_least, L.f16_lo(r[1]), L.f16_hi(r[1]))
            out = out + now
        return out

    return Reader(
        *(SPAN, HELD, 1, locate, copy, use, no_alpha),
        crosses=True,
        ragged=True,
        lift=LIFT,
        take=take,
        registers=of_x.registers + PIECES,
        place=of_x.place,
    )


@L.family
def mma_q4_k_lanes(
    warps: int = 4,
    depth: int = 2,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 9,
    cluster: int = 1,
    kept: int = 0,
):
    """Weights as `repacked_q4_k` makes them, U8 `[ceil(n/16), k/256, 2304]`, x BF16 `[m, k]`, y BF16 `[m, n]`; m at
    most 8·columns; of several weights the first.

    A weight is d·sc·(16 + q) - (16·d·sc + dmin·m), and 16 + q is a BF16 as soon as it is unpacked. The second part is
    a product over the eight groups of a block: sc and m, exact in BF16, times the sums of x over each group. Those are
    products of x as operand A, so that each lane has them where operand B wants them; three BF16 hold each exactly.
    `kept` as in `mma_nvfp4_lanes`, of units of 256; warps keep the sums too.
    """
    reader = reader_of(tiles, columns, kept > 0)
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
