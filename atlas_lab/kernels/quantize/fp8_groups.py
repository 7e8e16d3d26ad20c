"""Activations BF16 to E4M3 with a scale for 128 of K of a row."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.words import clear, plain

GROUP = 128
LANES, EACH = 16, 8  # lanes that share a group, and elements a lane has of it
ROWS = 16  # of a block
THREADS = ROWS * LANES


@L.device
def scale_of(most):
    """The scale of a group whose largest magnitude is `most`: max|x| / 448, 1 where that is 0."""
    d = L.div_rn(most, L.f32(448))
    return d if d > L.f32(0) else L.f32(1)


@functools.cache
def fp8_quantizer(words_of: L.DeviceFunction):
    """A device function `(source, codes, scales, flags, m, k, pitch, words)`: rows that `words_of` reads, as
    `words.plain` does, to codes E4M3 `[m, k]` and scales F32 `[ceil(k/128), m]`, rows of which lie `pitch` apart; k a
    multiple of 8. Block (i, g) makes group g of 16 rows from 16·i. The first `words` flags become 0, for the product
    whose blocks meet by them.

    A scale is max|x| / 448, 1 where that is 0; a code x / scale to nearest even, clamped to ±448. True divisions.
    """

    @L.device
    def run(source, codes, scales, flags, m, k, pitch, words):
        first = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
        clear(flags, words, first * THREADS + cuda.threadIdx.x, cuda.gridDim.x * cuda.gridDim.y * THREADS)
        lane = L.i32(cuda.threadIdx.x) % LANES
        row = L.i32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES)
        group = L.i32(cuda.blockIdx.y)
        column = L.i32(group * GROUP + lane * EACH)
        here = row < m and column < k
        at = L.i64(row) * k + column
        given = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
        if here:
            given = words_of(source, L.i64(row), column)
        most = L.f32(0)
        for j in L.unroll(4):
            most = L.max_f32(most, L.max_f32(L.abs_f32(L.bf16_lo(given[j])), L.abs_f32(L.bf16_hi(given[j]))))
        for step in L.unroll(4):
            most = L.max_f32(most, L.shfl_xor_f32(most, 8 >> step))
        by = scale_of(most)
        if here:
            out = ()
            for j in L.unroll(2):
                low = L.e4m3x2(L.div_rn(L.bf16_lo(given[2 * j]), by), L.div_rn(L.bf16_hi(given[2 * j]), by))
                high = L.e4m3x2(L.div_rn(L.bf16_lo(given[2 * j + 1]), by), L.div_rn(L.bf16_hi(given[2 * j + 1]), by))
                out = out + (L.u32(low | high << 16),)
            L.stg_v2_b32(codes, at, out)
            if lane == 0:
                L.stg_f32(scales, L.i64(group) * pitch + row, by)

    return run


_quantize = fp8_quantizer(plain)


@L.kernel(launch_bounds=(THREADS, 4))
def quantize_fp8_groups(
    x: L.In[L.bf16],
    codes: L.Out[L.e4m3],
    scales: L.Out[L.f32],
    flags: L.Out[L.u32],
    m: L.i32,
    k: L.i32,
    pitch: L.i32,
    words: L.i32,
):
    """x BF16 `[m, k]` to codes and scales as `fp8_quantizer` says. A dependent launch may start at once."""
    L.grid_launch_dependents()
    _quantize((L.grid_wait_for(x), k), codes, scales, flags, m, k, pitch, words)
