"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, Q4_K blocks as GGUF stores them."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import (
    activations,
    first_product,
    ones,
    opaque,
    part_of,
    product,
    rows_of_tile,
    scaled_rows,
)
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN, BYTES = 256, 144  # weights and bytes of a block: a unit is 16 of them
RUN = 8  # K of a lane in a group of 32
ROW, UNIT = 1536, 3072  # bytes of a unit: the header of a lane's upper row and its codes, then of its lower row
MAGIC, EIGHT = 0x43004300, 0xC308C308  # bf16 pairs: 128, whose low mantissa bits a code fills, and -(128 + 8)
INTEGER = 8388608.0  # 2^23: a byte below its bits 0x4B000000 is the float 2^23 + byte


@L.family
def mma_q4_k(
    warps: int = 8,
    depth: int = 2,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    joined: bool = False,
    pair: bool = False,
):
    """Blocks U8 `[n_i, k/256·144]` of up to three projections, x BF16 `[m, k]`, y BF16 `[m, n]`; m at most
    8·columns. `first`, `second` and `pair` as in `mma_nvfp4_lanes`.

    A weight is d·sc·(q - 8) + (8·d·sc - dmin·m): q - 8 is exact in BF16, so a group of 32 is one product of codes and
    one sum of x (a product with ones, which the row tiles share), each scaled in FP32.
    """
    place, fetch = activations(columns, RUN, crossed=True, ordered=True)
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled = scaled_rows(columns)
    mine, sum_of = part_of(4 * columns), ones(columns, RUN)

    @L.device
    def locate(args, which, row, count, k):
        upper, lower = rows_of_tile(row, count)
        w = one_of(which, args[0], args[1], args[2])
        return L.offset(w, L.i64(upper) * (k // SPAN) * BYTES), L.offset(w, L.i64(lower) * (k // SPAN) * BYTES)

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        base = L.i64(unit) * BYTES
        for h in L.unroll(2):
            here = L.i32(at + ROW * h)
            L.cp_async_16(ring, here + 16 * lane, source[h], base, 16)
            for c in L.unroll(4):
                L.cp_async_8(ring, here + 512 + 256 * c + 8 * lane, source[h], base + 16 + 32 * c + RUN * (lane & 3), 8)

    @L.device
    def header(v, upper):
        """d and dmin; a byte each of sc, then of m: of groups 0 to 3, or of the `upper` four."""
        low, mid, high = v[1], v[2], v[3]
        if upper:
            return (
                v[0],
                L.u32((high & 0x0F0F0F0F) | (low >> 2 & 0x30303030)),
                L.u32((high >> 4 & 0x0F0F0F0F) | (mid >> 2 & 0x30303030)),
            )
        return v[0], L.u32(low & 0x3F3F3F3F), L.u32(mid & 0x3F3F3F3F)

    @L.device
    def times(f, word, pick):
        """f times a byte of the word, exactly."""
        return L.fma_rn(f, L.bits_f32(L.prmt(word, 0x4B000000, pick)), L.mul_rn(f, L.f32(-INTEGER)))

    @L.device
    def codes(word, shift, magic):
        """Four codes, less 8: bytes 0 and 2 of the word, then 1 and 3."""
        even = L.u32(L.u32(word >> shift) & 0x000F000F | magic)
        odd = L.u32(L.u32(word >> (shift + 8)) & 0x000F000F | magic)
        return L.badd2(even, EIGHT), L.badd2(odd, EIGHT)

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live):
        lane = L.lane_id()
        magic = opaque(MAGIC, k)
        for c in L.unroll(4):
            table = ()
            for r in L.unroll(2 * tiles):
                table = table + header(L.lds_v4_b32(ring, at + ROW * r + 16 * lane), c // 2)
            words = ()
            for r in L.unroll(2 * tiles):
                words = words + L.lds_v2_b32(ring, at + ROW * r + 512 + 256 * c + 8 * lane)
            for half in L.unroll(2):
                # groups 2c and 2c + 1 are the low and the high nibbles of the c-th 32 bytes
                g = 2 * c + half
                v = fetch(x, rows, k, L.i32(unit * SPAN + 32 * g + RUN * (lane & 3)), kind)
                total = sum_of(v)
                out = ()
                for t in L.unroll(tiles):
                    a, b = codes(words[4 * t], 4 * half, magic), codes(words[4 * t + 2], 4 * half, magic)
                    part = begin((a[0], b[0], a[1], b[1]), v, 0)
                    a, b = codes(words[4 * t + 1], 4 * half, magic), codes(words[4 * t + 3], 4 * half, magic)
                    part = add(part, 0, (a[0], b[0], a[1], b[1]), v, 1)
                    f = ()
                    for h in L.unroll(2):
                        q = 3 * (2 * t + h)
                        d, least = L.f16_lo(table[q]), L.f16_hi(table[q])
                        s = times(d, table[q + 1], 0x7540 + g % 4)
                        low = times(least, table[q + 2], 0x7540 + g % 4)
                        f = f + (s, L.fma_rn(s, L.f32(8), L.mul_rn(L.f32(-1), low)))
                    now = scaled(mine(sums, t), part, f[0], f[2])
                    out = out + scaled(now, total, f[1], f[3])
                sums = out
        return sums

    run = stream(Reader(SPAN, UNIT, 2, locate, copy, use, no_alpha), place, warps, depth, tiles, columns, joined, pair)

    @L.kernel(launch_bounds=(32 * warps, blocks))
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
