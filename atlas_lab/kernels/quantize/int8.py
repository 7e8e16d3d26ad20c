"""To int8 with a scale for 32 of a row: NVFP4 weights, and activations BF16."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.words import clear, plain

THREADS = 128
GROUP = 32
LANES, EACH = 16, 8  # lanes that share 128 of K of a row of x, and elements a lane has of them
ROWS = 16  # of x in a block


@L.device
def _packed(w, d):
    """Codes of four values under scale d, the first in the low bits; 0 where d is 0."""
    by = d if d > L.f32(0) else L.f32(1)
    packed = L.u32(0)
    for e in L.unroll(4):
        code = L.f32_i32(L.div_rn(w[e], by))
        code = min(max(code, L.i32(-127)), L.i32(127))
        packed = L.u32(packed | (L.u32(code) & 0xFF) << (8 * e))
    return packed if d > L.f32(0) else L.u32(0)


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
            for v in L.unroll(2):
                out = ()
                for c in L.unroll(4):
                    i0 = 16 * v + 4 * c
                    out = out + (_packed((w[i0], w[i0 + 1], w[i0 + 2], w[i0 + 3]), d),)
                L.stg_v4_b32(q, i * 32 + 16 * v, out)

    return kernel


@functools.cache
def int8_quantizer(words_of: L.DeviceFunction):
    """A device function `(source, codes, scales, flags, m, k, pitch, words)`: rows that `words_of` reads, as
    `words.plain` does, to codes I8 `[m, k]` and scales F32 `[k/32, m]`, rows of which lie `pitch` apart; k a multiple
    of 32. Block (i, j) makes 128 of K from 128·j of 16 rows from 16·i. The first `words` flags become 0, for the
    product whose blocks meet by them.

    A scale is max|x| / 127; a code x / scale to nearest even, clamped to ±127; 0 where the scale is 0. True divisions.
    """

    @L.device
    def run(source, codes, scales, flags, m, k, pitch, words):
        threads = ROWS * LANES
        first = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
        clear(flags, words, first * threads + cuda.threadIdx.x, cuda.gridDim.x * cuda.gridDim.y * threads)
        lane = L.i32(cuda.threadIdx.x) % LANES
        row = L.i32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES)
        column = L.i32(cuda.blockIdx.y * (LANES * EACH) + lane * EACH)
        here = row < m and column < k
        at = L.i64(row) * k + column
        given = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
        if here:
            given = words_of(source, L.i64(row), column)
        most = L.f32(0)
        values = ()
        for j in L.unroll(4):
            low, high = L.bf16_lo(given[j]), L.bf16_hi(given[j])
            most = L.max_f32(most, L.max_f32(L.abs_f32(low), L.abs_f32(high)))
            values = values + (low, high)
        for step in L.unroll(2):  # of four lanes
            most = L.max_f32(most, L.shfl_xor_f32(most, 2 >> step))
        d = L.div_rn(most, L.f32(127))
        if here:
            first = _packed((values[0], values[1], values[2], values[3]), d)
            second = _packed((values[4], values[5], values[6], values[7]), d)
            L.stg_v2_b32(codes, at, (first, second))
            if lane & 3 == 0:
                L.stg_f32(scales, L.i64(column // GROUP) * pitch + row, d)

    return run


_quantize = int8_quantizer(plain)


@L.kernel(launch_bounds=(ROWS * LANES, 4))
def quantize_int8_groups(
    x: L.In[L.bf16],
    codes: L.Out[L.i8],
    scales: L.Out[L.f32],
    flags: L.Out[L.u32],
    m: L.i32,
    k: L.i32,
    pitch: L.i32,
    words: L.i32,
):
    """x BF16 `[m, k]` to codes and scales as `int8_quantizer` says. A dependent launch may start at once."""
    L.grid_launch_dependents()
    _quantize((L.grid_wait_for(x), k), codes, scales, flags, m, k, pitch, words)
