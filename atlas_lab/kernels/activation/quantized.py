"""The gated product with the quantization that down's product begins with, in one launch."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.activation.gated import gated_of
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.quantize import fp8_groups, int8, lanes_order, nvfp4
from atlas_lab.kernels.quantize.nvfp4 import EACH, store_quantized
from atlas_lab.kernels.quantize.nvfp4_blocks import blocks_quantizer
from atlas_lab.kernels.quantize.nvfp4_lanes import lanes_quantizer, plain


@L.device
def begun(g, u, g_row, u_row, kind):
    """The source that a kernel below reads, once the launches before are over; the next one may start."""
    L.grid_launch_dependents()
    return L.grid_wait_for(g), L.grid_wait_for(u), g_row, u_row, kind


@functools.cache
def gated_pair(clamp: bool):
    """A device function as `nvfp4_lanes.plain`: two elements of activation(g)·u, rounded to BF16."""
    gated = gated_of(clamp)

    @L.device
    def run(source, row, column):
        g, u, g_row, u_row, kind = source
        a, b = plain((g, g_row), row, column), plain((u, u_row), row, column)
        low = gated(L.bf16_lo(a), L.bf16_lo(b), kind)
        return L.bf16x2(low, gated(L.bf16_hi(a), L.bf16_hi(b), kind))

    return run


@functools.cache
def gated_words(clamp: bool):
    """A device function as `words.plain`: 8 elements of activation(g)·u, rounded to BF16."""
    gated = gated_of(clamp)

    @L.device
    def run(source, row, column):
        g, u, g_row, u_row, kind = source
        a, b = L.ld_waited_v4_b32(g, row * g_row + column), L.ld_waited_v4_b32(u, row * u_row + column)
        out = ()
        for j in L.unroll(4):
            low = gated(L.bf16_lo(a[j]), L.bf16_lo(b[j]), kind)
            out = out + (L.bf16x2(low, gated(L.bf16_hi(a[j]), L.bf16_hi(b[j]), kind)),)
        return out

    return run


@L.family
def gated_nvfp4(clamp: bool = False, scaled: bool = False):
    """What `quantize_nvfp4(scaled)` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g and u, BF16
    `[m, k]`, rows of which lie `g_row` and `u_row` elements apart, both from 16 bytes on and multiples of 8; k a
    multiple of 16; `kind` is `gated.kind_of` an activation. `blocks_grid(m, k)` blocks.

    A dependent launch may start at once.
    """
    words_of = gated_words(clamp)

    @L.device
    def run(source, tensor_scale, codes, scales, k):
        row = L.i64(cuda.blockIdx.x)
        column = L.i32((cuda.blockIdx.y * nvfp4.THREADS + cuda.threadIdx.x) * EACH)
        words = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
        if column < k:
            words = words_of(source, row, column)
        store_quantized(words, tensor_scale, codes, scales, row * k + column, column < k)

    if scaled:

        @L.kernel(launch_bounds=(nvfp4.THREADS, 8))
        def under_a_scale(
            g: L.In[L.bf16],
            u: L.In[L.bf16],
            tensor_scale: L.In[L.f32],
            codes: L.Out[L.u8],
            scales: L.Out[L.e4m3],
            k: L.i32,
            g_row: L.i32,
            u_row: L.i32,
            kind: L.i32,
        ):
            run(
                begun(g, u, g_row, u_row, kind),
                L.ldg_f32(tensor_scale, 0),
                codes,
                scales,
                k,
            )

        return under_a_scale

    @L.kernel(launch_bounds=(nvfp4.THREADS, 8))
    def kernel(
        g: L.In[L.bf16],
        u: L.In[L.bf16],
        codes: L.Out[L.u8],
        scales: L.Out[L.e4m3],
        k: L.i32,
        g_row: L.i32,
        u_row: L.i32,
        kind: L.i32,
    ):
        run(begun(g, u, g_row, u_row, kind), L.f32(1), codes, scales, k)

    return kernel


@L.family
def gated_nvfp4_lanes(run: int, clamp: bool = False, scaled: bool = False):
    """What `quantize_nvfp4_lanes(run, scaled)` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g
    and u, as in `gated_nvfp4`, but rows may be any even number of elements apart; k a multiple of 4·run.
    `order_grid(m, k, run)` blocks.

    A dependent launch may start at once.
    """
    quantize = lanes_quantizer(run, gated_pair(clamp))

    if scaled:

        @L.kernel(launch_bounds=(lanes_order.THREADS, 8))
        def under_a_scale(
            g: L.In[L.bf16],
            u: L.In[L.bf16],
            tensor_scale: L.In[L.f32],
            out: L.Out[L.bf16],
            flags: L.Out[L.u32],
            k: L.i32,
            g_row: L.i32,
            u_row: L.i32,
            kind: L.i32,
            words: L.i32,
        ):
            quantize(
                begun(g, u, g_row, u_row, kind),
                L.ldg_f32(tensor_scale, 0),
                out,
                flags,
                k,
                words,
            )

        return under_a_scale

    @L.kernel(launch_bounds=(lanes_order.THREADS, 8))
    def kernel(
        g: L.In[L.bf16],
        u: L.In[L.bf16],
        out: L.Out[L.bf16],
        flags: L.Out[L.u32],
        k: L.i32,
        g_row: L.i32,
        u_row: L.i32,
        kind: L.i32,
        words: L.i32,
    ):
        quantize(begun(g, u, g_row, u_row, kind), L.f32(1), out, flags, k, words)

    return kernel


@L.family
def gated_nvfp4_blocks(clamp: bool = False):
    """What `quantize_nvfp4_blocks` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g and u, as in
    `gated_nvfp4`; k a multiple of 64. `blocks_grid(m, k)` blocks.

    A dependent launch may start at once.
    """
    quantize = blocks_quantizer(gated_words(clamp))

    @L.kernel(launch_bounds=(nvfp4.THREADS, 8))
    def kernel(
        g: L.In[L.bf16],
        u: L.In[L.bf16],
        out: L.Out[L.bf16],
        flags: L.Out[L.u32],
        k: L.i32,
        g_row: L.i32,
        u_row: L.i32,
        kind: L.i32,
        words: L.i32,
    ):
        quantize(begun(g, u, g_row, u_row, kind), out, flags, k, words)

    return kernel


@L.family
def gated_fp8_groups(clamp: bool = False):
    """What `quantize_fp8_groups` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g and u, as in
    `gated_nvfp4`; k a multiple of 8, blocks as there.

    A dependent launch may start at once.
    """
    quantize = fp8_groups.fp8_quantizer(gated_words(clamp))

    @L.kernel(launch_bounds=(fp8_groups.THREADS, 4))
    def kernel(
        g: L.In[L.bf16],
        u: L.In[L.bf16],
        codes: L.Out[L.e4m3],
        scales: L.Out[L.f32],
        flags: L.Out[L.u32],
        m: L.i32,
        k: L.i32,
        g_row: L.i32,
        u_row: L.i32,
        kind: L.i32,
        pitch: L.i32,
        words: L.i32,
    ):
        quantize(begun(g, u, g_row, u_row, kind), codes, scales, flags, m, k, pitch, words)

    return kernel


@L.family
def gated_int8_groups(clamp: bool = False):
    """What `quantize_int8_groups` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g and u, as in
    `gated_nvfp4`; k a multiple of 32, blocks as there.

    A dependent launch may start at once.
    """
    quantize = int8.int8_quantizer(gated_words(clamp))

    @L.kernel(launch_bounds=(int8.ROWS * int8.LANES, 4))
    def kernel(
        g: L.In[L.bf16],
        u: L.In[L.bf16],
        codes: L.Out[L.i8],
        scales: L.Out[L.f32],
        flags: L.Out[L.u32],
        m: L.i32,
        k: L.i32,
        g_row: L.i32,
        u_row: L.i32,
        kind: L.i32,
        pitch: L.i32,
        words: L.i32,
    ):
        quantize(begun(g, u, g_row, u_row, kind), codes, scales, flags, m, k, pitch, words)

    return kernel
