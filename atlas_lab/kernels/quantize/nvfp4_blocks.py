"""Activations BF16 as they are after NVFP4, in BF16 again, in the order in which lanes own K of GGML's NVFP4 blocks.

A code times the scale of its 16 has six significant bits and lies within 2^-10 and 2688: it is exact in BF16.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.nvfp4 import EACH, THREADS, largest, scale_code, scale_value, value
from atlas_lab.kernels.quantize.words import clear, plain


def blocks_grid(m: int, k: int) -> tuple[int, int]:
    """Blocks of the launch."""
    return m, -(-k // (EACH * THREADS))


@functools.cache
def blocks_quantizer(words_of: L.DeviceFunction):
    """A device function `(source, out, flags, k, words)`: quantizes each 16 of the rows that `words_of` reads, as
    `words.plain` does, and writes code x scale, as `formats.nvfp4_groups` makes them under a tensor
    scale of 1; k a multiple of 64, `blocks_grid(m, k)` blocks. The first `words` flags become 0, for the product whose
    blocks meet by them.

    Of each 64, pair 4p + t of out is of lane t: of group 2·(p / 4) + t / 2, from element 4·(t % 2) on, pair p % 4 of
    (0, 2), (1, 3), (8, 10), (9, 11).
    """

    @L.device
    def run(source, out, flags, k, words):
        first = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
        clear(flags, words, first * THREADS + cuda.threadIdx.x, cuda.gridDim.x * cuda.gridDim.y * THREADS)
        row = L.i64(cuda.blockIdx.x)
        column = L.i32((cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * EACH)
        given = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
        if column < k:
            given = words_of(source, row, column)
        scale = scale_value(scale_code(largest(given), L.f32(1)))
        made = ()
        for j in L.unroll(4):
            made = made + (L.mul_rn(value(L.div_rn(L.bf16_lo(given[j]), scale)), scale),)
            made = made + (L.mul_rn(value(L.div_rn(L.bf16_hi(given[j]), scale)), scale),)
        if column < k:
            half, group = (column >> 3) & 1, (column >> 4) & 3
            to = row * k + (column - (column & 63)) + 8 * (4 * (group >> 1) + 2 * half) + 4 * (group & 1)
            for r in L.unroll(2):
                L.stg_v2_b32(out, to + 8 * r, (L.bf16x2(made[r], made[r + 2]), L.bf16x2(made[4 + r], made[6 + r])))

    return run


_quantize = blocks_quantizer(plain)


@L.kernel(launch_bounds=(THREADS, 8))
def quantize_nvfp4_blocks(x: L.In[L.bf16], out: L.Out[L.bf16], flags: L.Out[L.u32], k: L.i32, words: L.i32):
    """x BF16 `[m, k]` to BF16 `[m, k]` as `blocks_quantizer` says. A dependent launch may start at once."""
    L.grid_launch_dependents()
    _quantize((L.grid_wait_for(x), k), out, flags, k, words)
