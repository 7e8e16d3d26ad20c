"""y = x·Wᵀ for one to three rows of activations, Q2_0 blocks of ggml as files store them, aligned to 2."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, dots, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 16  # weights of a word of codes
SPAN = 32 * CHUNK  # weights of a row that a warp takes at a time


@L.device
def _masks(cuts):
    """Two bits at 0, 2, .. 10. They are made of a run-time value, which is 3: constants are not kept in registers but
    moved there for every use."""
    three = L.u32(3 + (cuts >> 8))
    masks = ()
    for i in L.unroll(6):
        masks = masks + (L.u32(three << 2 * i),)
    return masks


@L.device
def _weights(q, masks):
    """The 16 f32, code - 1, of a word of codes."""
    w = ()
    for j in L.unroll(16):
        at = 2 * (j % 5) if j < 15 else 10
        # two bits whose place in the mantissa of 2^(23 - at) is that of 1
        code = L.bits_f32(L.u32(q >> (10 * min(j // 5, 2)) & masks[at // 2] | 150 - at << 23))
        w = w + (code - L.f32((8388608 >> at) + 1),)
    return w


@L.family
def gemv_q2_0(warps: int = 4, rows: int = 4, unroll: int = 2, group: int = 64, m: int = 1):
    """Blocks U8 `[n, k/group x (2 + group/4)]`, x BF16 `[m, k]`, y BF16 `[m, n]`; k a multiple of `group`, 64 or 128.

    A lane reads its word of codes as two halves, which alone are aligned, and the block's scale: what lanes share of a
    sector stays in L1. It sums 16 products, multiplies by the scale and adds; lanes are added pairwise, 16 apart first,
    then the 2**cuts ranges of K in order.
    """
    size = 2 + group // 4
    step = SPAN // group * size
    begin, end = rows_of_warp(warps, rows, m)
    bounds, fetch, dot = range_of_warp(SPAN, CHUNK), activations(m, CHUNK), dots(m, CHUNK, CHUNK)

    @L.device
    def add(acc, w, at, masks, x, k, c, block, word):
        v = fetch(x, k, c)
        q = ()
        f = ()
        for r in L.unroll(rows):
            q = q + (L.ldg_b16(w, at[r] + word) | L.ldg_b16(w, at[r] + word + 2) << 16,)
            f = f + (L.f16_lo(L.ldg_b16(w, at[r] + block)),)
        for r in L.unroll(rows):
            s = dot(_weights(L.u32(q[r]), masks), v, 0)
            for i in L.unroll(m):
                acc[r * m + i] += s[i] * f[r]

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(w: L.In[L.u8], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, cuts: L.i32):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, k // group * size, cuts)
        x = L.grid_wait_for(x)
        c, stop = bounds(k, cuts)
        masks = _masks(cuts)
        block = L.i64(c // group * size)
        word = block + 2 + (c % group >> 2)
        while c + SPAN * (unroll - 1) < stop:
            for u in L.unroll(unroll):
                add(acc, w, at, masks, x, k, c + SPAN * u, block + step * u, word + step * u)
            c += SPAN * unroll
            block += step * unroll
            word += step * unroll
        while c < stop:
            add(acc, w, at, masks, x, k, c, block, word)
            c += SPAN
            block += step
            word += step
        end(y, acc, first, n, cuts)

    return kernel
