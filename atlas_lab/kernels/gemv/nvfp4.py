"""y = W·x for one row of activations, NVFP4 weights as checkpoints store them."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 32  # weights a 16-byte load brings: two groups of 16
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.device
def _dot(low, high, a, b):
    """Sum of 16 products: weights in low and high (eight codes each), activations in a and b (eight BF16 each)."""
    s = L.f32(0)
    p = L.e2m1x8_f16x2(low)
    q = L.e2m1x8_f16x2(high)
    for j in L.unroll(4):
        s += L.f16_lo(p[j]) * L.bf16_lo(a[j])
        s += L.f16_hi(p[j]) * L.bf16_hi(a[j])
    for j in L.unroll(4):
        s += L.f16_lo(q[j]) * L.bf16_lo(b[j])
        s += L.f16_hi(q[j]) * L.bf16_hi(b[j])
    return s


@L.family
def gemv_nvfp4(warps: int = 4, rows: int = 4, unroll: int = 1, reciprocal: bool = False, stream: bool = True):
    """Codes U8 `[n, k/2]`, block scales E4M3 `[n, k/16]`, one F32 tensor scale, x BF16 `[k]`, y BF16 `[n]`.

    k is a multiple of 32; byte j of a row holds element 2j in its low nibble. `reciprocal` says that the tensor scale
    divides (compressed-tensors) and does not multiply (ModelOpt). A lane sums 16 products of a group, multiplies by
    its scale and adds; lanes are added pairwise, 16 apart first.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    load_scale = L.ldg_b16_stream if stream else L.ldg_b16
    begin, end = rows_of_warp(warps, rows)

    @L.device
    def add(acc, w, at, scales, x, c):
        a = L.ldg_v4_b32(x, c)
        b = L.ldg_v4_b32(x, c + 8)
        d = L.ldg_v4_b32(x, c + 16)
        e = L.ldg_v4_b32(x, c + 24)
        for r in L.unroll(rows):
            q = load(w, (at[r] + c) >> 1)
            s = load_scale(scales, (at[r] + c) >> 4)
            acc[r] += _dot(q[0], q[1], a, b) * L.e4m3_f32(s & 0xFF)
            acc[r] += _dot(q[2], q[3], d, e) * L.e4m3_f32(s >> 8)

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(
        w: L.In[L.u8],
        scales: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
    ):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows, L.f32)
        first = begin(at, acc, n, k)
        if first >= n:
            return
        c = L.lane_id() * CHUNK
        while c + SPAN * (unroll - 1) < k:
            for u in L.unroll(unroll):
                add(acc, w, at, scales, x, c + SPAN * u)
            c += SPAN * unroll
        while c < k:
            add(acc, w, at, scales, x, c)
            c += SPAN
        g = L.ldg_f32(tensor_scale, 0)
        for r in L.unroll(rows):
            acc[r] = L.div_rn(acc[r], g) if reciprocal else L.mul_rn(acc[r], g)
        end(y, acc, first, n)

    return kernel
