"""y = x·Wᵀ for one to three rows of activations, Q4_K blocks of ggml as files store them."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, dots, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

BLOCK, BYTES = 256, 144
CHUNK = 32  # weights a 16-byte load brings: 16 of one group of 32 in its low nibbles, 16 of the next in its high ones
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.device
def _affine(head, c):
    """What makes weights of the codes of groups 2c and 2c + 1: `(step, base, step, base)`, where a code q stands for
    step·(2 + q/8) + base. `head` is a block's first 16 bytes: d, dmin, twelve bytes of 6-bit scales and minima."""
    shift = 16 * (c & 1)
    a, b, e = head[1] >> shift, head[2] >> shift, head[3] >> shift
    if c < 2:
        sc, low = L.u32(a & 0x3F3F), L.u32(b & 0x3F3F)
    else:
        sc, low = L.u32(e & 0x0F0F | a >> 2 & 0x3030), L.u32(e >> 4 & 0x0F0F | b >> 2 & 0x3030)
    d, dmin = L.f16_lo(head[0]), L.f16_hi(head[0])
    out = ()
    for i in L.unroll(2):
        # a byte in the mantissa of 2^23
        scale = d * (L.bits_f32(L.prmt(sc, 0x4B000000, 0x7540 + i)) - L.f32(8388608))
        minus = L.f32(8388608) - L.bits_f32(L.prmt(low, 0x4B000000, 0x7540 + i))
        # products of 11 and 6 bits are exact: one rounding
        out = out + (L.f32(8) * scale, L.fma_rn(dmin, minus, L.f32(-16) * scale))
    return out


@L.device
def _weights(q, high, step, base):
    """The 16 f32 of the low or the high nibbles of four words."""
    w = ()
    for j in L.unroll(4):
        codes = (q[j] >> 1 if high else q[j] << 3) & 0x78787878
        for i in L.unroll(4):
            # a code on top of the mantissa: 2 + q/8
            w = w + (L.fma_rn(L.bits_f32(L.prmt(codes, 0x40000000, 0x7044 + (i << 8))), step, base),)
    return w


@L.family
def gemv_q4_k(warps: int = 4, rows: int = 4, m: int = 1, stream: bool = True):
    """Blocks U8 `[n, k/256 x 144]`, x BF16 `[m, k]`, y BF16 `[m, n]`; k a multiple of 256.

    A weight is rounded once to F32. A lane sums 16 products of a group of 32, then 16 of the next group, and adds;
    lanes are added pairwise, 16 apart first, then the 2**cuts ranges of K in order.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    begin, end = rows_of_warp(warps, rows, m)
    bounds, fetch, dot = range_of_warp(SPAN, CHUNK), activations(m, 16), dots(m, 16, 16)

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(w: L.In[L.u8], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, cuts: L.i32):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, (k >> 8) * BYTES, cuts)
        x = L.grid_wait_for(x)
        c, stop = bounds(k, cuts)
        quarter = L.i32(L.lane_id() >> 1 & 3)
        while c < stop:
            block = (c >> 8) * BYTES
            q = ()
            f = ()
            for r in L.unroll(rows):
                q = q + (load(w, at[r] + block + 16 * (1 + (L.lane_id() & 7))),)
                f = f + (_affine(L.ldg_v4_b32(w, at[r] + block), quarter),)
            # K of the lane's low nibbles; those of the high ones are 32 further
            start = (c >> 8) * BLOCK + 64 * quarter + 16 * (L.lane_id() & 1)
            for high in L.unroll(2):
                v = fetch(x, k, start + 32 * high)
                for r in L.unroll(rows):
                    s = dot(_weights(q[r], high, f[r][2 * high], f[r][2 * high + 1]), v, 0)
                    for i in L.unroll(m):
                        acc[r * m + i] += s[i]
            c += SPAN
        end(y, acc, first, n, cuts)

    return kernel
