"""Activations BF16 as they are after NVFP4, in BF16 again, in the order in which the lanes that hold weights own K.

A code times the scale of its 16 has six significant bits and lies within 2^-10 and 2688: it is exact in BF16.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize.lanes_order import PIECE, THREADS
from atlas_lab.kernels.quantize.nvfp4 import larger, scale_code, scale_value, value
from atlas_lab.kernels.quantize.words import clear


@L.device
def plain(source, row, column):
    """Two elements of a row of x, after `grid_wait_for`."""
    x, pitch = source
    return L.ld_waited_b32(x, row * pitch + column)


@functools.cache
def lanes_quantizer(run: int, pair_of: L.DeviceFunction):
    """A device function `(source, tensor_scale, out, flags, k, words)`: quantizes each 16 of the rows that
    `pair_of(source, row, column)` reads, under the tensor scale, and writes code x scale, without it, in the order of
    `order_for_lanes(run)`, blocks and threads as there, k a multiple of 4·run; the first `words` flags become 0.

    A thread has the same pair of four runs; eight threads have the pairs of a group.
    """
    pieces = run // 2

    @L.device
    def quantize(source, tensor_scale, out, flags, k, words):
        if cuda.blockIdx.y == 0:
            clear(flags, words, cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.gridDim.x * THREADS)
        i = L.i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        first = L.i32(i // pieces * (4 * run) + 2 * (i % pieces))
        row = L.i64(cuda.blockIdx.x)
        here = first < k
        made = ()
        for t in L.unroll(4):
            pair = L.u32(0)
            if here:
                pair = pair_of(source, row, L.i32(first + run * t))
            most = larger(L.f32(0), pair)
            for step in L.unroll(3):
                most = L.max_nan_f32(most, L.shfl_xor_f32(most, 1 << step))
            scale = scale_value(scale_code(most, tensor_scale))
            by = L.mul_rn(scale, tensor_scale)
            low = L.mul_rn(value(L.div_rn(L.bf16_lo(pair), by)), scale)
            high = L.mul_rn(value(L.div_rn(L.bf16_hi(pair), by)), scale)
            made = made + (L.bf16x2(low, high),)
        if here:
            L.stg_v4_b32(out, row * k + PIECE * i, made)

    return quantize


@L.family
def quantize_nvfp4_lanes(run: int, scaled: bool = False):
    """x BF16 `[m, k]`, k a multiple of 4·run, to BF16 `[m, k]` as `lanes_quantizer` says; with `scaled` under an F32
    tensor scale, a multiplier, which the values lack, else under 1. `order_grid(m, k, run)` blocks.

    A dependent launch may start at once.
    """
    quantize = lanes_quantizer(run, plain)

    if scaled:

        @L.kernel(launch_bounds=(THREADS, 8))
        def under_a_scale(
            x: L.In[L.bf16],
            tensor_scale: L.In[L.f32],
            out: L.Out[L.bf16],
            flags: L.Out[L.u32],
            k: L.i32,
            words: L.i32,
        ):
            L.grid_launch_dependents()
            quantize((L.grid_wait_for(x), k), L.ldg_f32(tensor_scale, 0), out, flags, k, words)

        return under_a_scale

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(x: L.In[L.bf16], out: L.Out[L.bf16], flags: L.Out[L.u32], k: L.i32, words: L.i32):
        L.grid_launch_dependents()
        quantize((L.grid_wait_for(x), k), L.f32(1), out, flags, k, words)

    return kernel
