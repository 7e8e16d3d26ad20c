"""NVFP4 to int8 with a scale for 32 weights."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
GROUP = 32


@L.family
def nvfp4_to_int8(reciprocal: bool = False):
    """Codes U8 `[N, K/2]`, scales E4M3 `[N, K/16]` and one F32 tensor scale to q I8 `[N, K]` and scale F32
    `[N, K/32]`; `count` is N·K/32, a thread makes one group.

    w is code x scale (exact) times, or with `reciprocal` over, the tensor scale, rounded once; the group's scale is
    max|w| / 127, and q = w / scale to nearest even, clamped to ±127; 0 where the scale is 0. True divisions.
    """
    rescale = L.div_rn if reciprocal else L.mul_rn

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(
        codes: L.In[L.u8],
        scales: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        q: L.Out[L.i8],
        scale: L.Out[L.f32],
        count: L.i64,
    ):
        i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < count:
            words = L.ldg_v4_b32(codes, i * 16)
            pair = L.ldg_b16(scales, i * 2)
            g = L.ldg_f32(tensor_scale, 0)
            most = L.f32(0)
            w = ()
            for h in L.unroll(4):
                s = L.e4m3_f32(pair >> (8 * (h >> 1)) & 0xFF)
                f = L.e2m1x8_f16x2(words[h])
                for p in L.unroll(4):
                    low = rescale(L.mul_rn(L.f16_lo(f[p]), s), g)
                    high = rescale(L.mul_rn(L.f16_hi(f[p]), s), g)
                    most = L.max_f32(most, L.max_f32(L.abs_f32(low), L.abs_f32(high)))
                    w = w + (low, high)
            d = L.div_rn(most, L.f32(127))
            L.stg_f32(scale, i, d)
            by = d if d > L.f32(0) else L.f32(1)
            keep = d > L.f32(0)
            for v in L.unroll(2):
                out = ()
                for c in L.unroll(4):
                    packed = L.u32(0)
                    for e in L.unroll(4):
                        code = L.f32_i32(L.div_rn(w[16 * v + 4 * c + e], by))
                        code = min(max(code, L.i32(-127)), L.i32(127))
                        packed = L.u32(packed | (L.u32(code) & 0xFF) << (8 * e))
                    out = out + ((packed if keep else L.u32(0)),)
                L.stg_v4_b32(q, i * 32 + 16 * v, out)

    return kernel
