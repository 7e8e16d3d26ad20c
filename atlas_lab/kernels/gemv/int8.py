"""y = x·Wᵀ for one to three rows of activations, int8 weights with a scale for 32 of them."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, dots, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 16  # weights a 16-byte load brings: half a group
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.device
def _weights(q):
    """The 16 f32 of four words of four signed bytes."""
    w = ()
    for j in L.unroll(4):
        codes = L.u32(q[j] ^ 0x80808080)
        for i in L.unroll(4):
            # a byte plus 128 in the mantissa of 2^23
            w = w + (L.bits_f32(L.prmt(codes, 0x4B000000, 0x7540 + i)) - L.f32(8388736),)
    return w


@L.family
def gemv_int8(warps: int = 4, rows: int = 2, unroll: int = 2, m: int = 1, stream: bool = True):
    """W I8 `[n, k]` row-major, scales F32 `[n, k/32]`, x BF16 `[m, k]`, y BF16 `[m, n]`; k a multiple of 32.

    A lane sums 16 products of a group, multiplies by its scale and adds; lanes are added pairwise, 16 apart first, then
    the 2**cuts ranges of K in order.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    begin, end = rows_of_warp(warps, rows, m)
    bounds, fetch, dot = range_of_warp(SPAN, CHUNK), activations(m, CHUNK), dots(m, CHUNK, CHUNK)

    @L.device
    def add(acc, w, at, scales, x, k, c):
        v = fetch(x, k, c)
        for r in L.unroll(rows):
            q = load(w, at[r] + c)
            f = L.ldg_f32(scales, (at[r] + c) >> 5)
            s = dot(_weights(q), v, 0)
            for i in L.unroll(m):
                acc[r * m + i] += s[i] * f

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(
        w: L.In[L.i8],
        scales: L.In[L.f32],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
        cuts: L.i32,
    ):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, k, cuts)
        x = L.grid_wait_for(x)
        c, stop = bounds(k, cuts)
        while c + SPAN * (unroll - 1) < stop:
            for u in L.unroll(unroll):
                add(acc, w, at, scales, x, k, c + SPAN * u)
            c += SPAN * unroll
        while c < stop:
            add(acc, w, at, scales, x, k, c)
            c += SPAN
        end(y, acc, first, n, cuts)

    return kernel
