"""y = x·Wᵀ for one to three rows of activations, NVFP4 weights as checkpoints store them."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, dots, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 32  # weights a 16-byte load brings: two groups of 16
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.device
def _weights(low, high):
    """The 16 f32 of two words of eight codes."""
    w = ()
    for half in L.unroll(2):
        pairs = L.e2m1x8_f16x2(high if half else low)
        for j in L.unroll(4):
            w = w + (L.f16_lo(pairs[j]), L.f16_hi(pairs[j]))
    return w


@L.family
def gemv_nvfp4(warps: int = 4, rows: int = 4, unroll: int = 1, m: int = 1, stream: bool = True):
    """Codes U8 `[n, k/2]`, block scales E4M3 `[n, k/16]`, one F32 tensor scale, x BF16 `[m, k]`, y BF16 `[m, n]`.

    k is a multiple of 32; byte j of a row holds element 2j in its low nibble. A `reciprocal` other than 0 says that the
    tensor scale divides (compressed-tensors) and does not multiply (ModelOpt). A lane sums 16 products of a group,
    multiplies by its scale and adds; lanes are added pairwise, 16 apart first, then the 2**cuts ranges of K in order.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    load_scale = L.ldg_b16_stream if stream else L.ldg_b16
    begin, end = rows_of_warp(warps, rows, m)
    bounds, fetch, dot = range_of_warp(SPAN, CHUNK), activations(m, CHUNK), dots(m, 16, CHUNK)

    @L.device
    def add(acc, w, at, scales, x, k, c):
        v = fetch(x, k, c)
        for r in L.unroll(rows):
            q = load(w, (at[r] + c) >> 1)
            f = load_scale(scales, (at[r] + c) >> 4)
            for g in L.unroll(2):
                s = dot(_weights(q[2 * g], q[2 * g + 1]), v, 16 * g)
                for i in L.unroll(m):
                    acc[r * m + i] += s[i] * L.e4m3_f32(f >> (8 * g))

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(
        w: L.In[L.u8],
        scales: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
        cuts: L.i32,
        reciprocal: L.i32,
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
        f = L.ldg_f32(tensor_scale, 0)
        for i in L.unroll(rows * m):
            acc[i] = L.div_rn(acc[i], f) if reciprocal != 0 else L.mul_rn(acc[i], f)
        end(y, acc, first, n, cuts)

    return kernel
