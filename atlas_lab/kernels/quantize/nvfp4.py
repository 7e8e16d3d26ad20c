"""Activations BF16 to E2M1 with an E4M3 scale for 16 of K of a row, as `formats.nvfp4_groups` defines it.

A group in which there is a NaN gets the scale NaN; an infinity is as the largest value.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

GROUP = 16
EACH = 8  # elements of a thread
THREADS = 128
MAGIC = 12582912.0  # 1.5 x 2^23: a sum with it is rounded to an integer, which its low bits are
LEAST = 2.0**-9  # of a scale


@L.device
def larger(most, pair):
    """The larger of `most` and the magnitudes of two BF16; NaN where one is."""
    return L.max_nan_f32(most, L.max_nan_f32(L.abs_f32(L.bf16_lo(pair)), L.abs_f32(L.bf16_hi(pair))))


@L.device
def scale_code(most, tensor_scale):
    """The E4M3 code of a group's scale."""
    scale = L.div_rn(most, L.mul_rn(L.f32(6), tensor_scale))
    scale = L.f32(1) if scale == L.f32(0) else L.max_nan_f32(scale, L.f32(LEAST))
    return L.e4m3x2(scale, scale) & 0xFF


@L.device
def scale_value(code):
    """What it stands for."""
    return L.e4m3_f32(code) if code < 0x7F else L.bits_f32(L.u32(0x7FFFFFFF))


@L.device
def rounded(v):
    """|v| to E2M1: with MAGIC added, in steps of the range that it lies in; the range."""
    size = L.min_f32(L.abs_f32(v), L.f32(6))
    span = (L.i32(2) if size >= L.f32(4) else L.i32(1)) if size >= L.f32(2) else L.i32(0)
    return L.add_rn(L.mul_rn(size, L.bits_f32(L.u32(0x40000000 - (span << 23)))), L.f32(MAGIC)), span


@L.device
def code(v):
    """The E2M1 code of v, to nearest even, clamped to ±6; a sign for what is below 0 alone."""
    sum_, span = rounded(v)
    return L.u32((L.f32_bits(sum_) & 7) + L.u32(2 * span)) | (L.u32(8) if v < L.f32(0) else L.u32(0))


@L.device
def value(v):
    """What that code stands for."""
    sum_, span = rounded(v)
    size = L.mul_rn(L.add_rn(sum_, L.f32(-MAGIC)), L.bits_f32(L.u32(0x3F000000 + (span << 23))))
    return -size if v < L.f32(0) else size


@L.device
def largest(words):
    """The largest magnitude of a group, half of which this lane has in 8 BF16 and the next one; NaN where one is."""
    most = L.f32(0)
    for j in L.unroll(4):
        most = larger(most, words[j])
    return L.max_nan_f32(most, L.shfl_xor_f32(most, 1))


@L.device
def store_quantized(words, tensor_scale, codes, scales, at, exists):
    """Codes of 8 BF16, half a group that this lane and the next one have, from element `at` of all on, and the code of
    the group's scale, where they exist."""
    scale = scale_code(largest(words), tensor_scale)
    step = L.mul_rn(scale_value(scale), tensor_scale)
    out = L.u32(0)
    for j in L.unroll(4):
        low, high = code(L.div_rn(L.bf16_lo(words[j]), step)), code(L.div_rn(L.bf16_hi(words[j]), step))
        out = L.u32(out | (low | high << 4) << (8 * j))
    if exists:
        L.stg_b32(codes, at >> 1, out)
        if at & EACH == 0:
            L.stg_b8(scales, at >> 4, scale)


@L.family
def quantize_nvfp4(scaled: bool = False):
    """x BF16 `[m, k]`, k a multiple of 16, to codes U8 `[m, k/2]`, low nibble first, and scales E4M3 `[m, k/16]`; with
    `scaled` under an F32 tensor scale, a multiplier, else under 1. `count` is m·k/8; a thread makes 8 codes, two a
    scale.

    A dependent launch may start at once.
    """

    @L.device
    def run(x, tensor_scale, codes, scales, count):
        L.grid_launch_dependents()
        x = L.grid_wait_for(x)
        i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        words = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
        if i < count:
            words = L.ld_waited_v4_b32(x, i * EACH)
        store_quantized(words, tensor_scale, codes, scales, i * EACH, i < count)

    if scaled:

        @L.kernel(launch_bounds=(THREADS, 8))
        def under_a_scale(
            x: L.In[L.bf16], tensor_scale: L.In[L.f32], codes: L.Out[L.u8], scales: L.Out[L.e4m3], count: L.i64
        ):
            run(x, L.ldg_f32(tensor_scale, 0), codes, scales, count)

        return under_a_scale

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(x: L.In[L.bf16], codes: L.Out[L.u8], scales: L.Out[L.e4m3], count: L.i64):
        run(x, L.f32(1), codes, scales, count)

    return kernel
