"""The gated product with the quantization to NVFP4 that down's product begins with, in one launch."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.activation.gated import gated_of
from atlas_lab.kernels.quantize.lanes_order import THREADS
from atlas_lab.kernels.quantize.nvfp4_lanes import lanes_quantizer, plain


@functools.cache
def gated_pair(clamp: bool):
    """A device function as `nvfp4_lanes.plain`: two elements of activation(g)·u, rounded to BF16."""
    gated = gated_of(clamp)

    @L.device
    def run(source, row, column, apart):
        g, u, g_row, u_row, kind = source
        a, b = plain((g, g_row), row, column, apart), plain((u, u_row), row, column, apart)
        low = gated(L.bf16_lo(a), L.bf16_lo(b), kind)
        return L.bf16x2(low, gated(L.bf16_hi(a), L.bf16_hi(b), kind))

    return run


@L.family
def gated_nvfp4_lanes(run: int, apart: int = 1, clamp: bool = False):
    """What `quantize_nvfp4_lanes(run, apart)` writes, bit for bit, of what `gated_product(clamp=clamp)` writes of g and
    u, BF16 `[m, k]`, rows of which lie `g_row` and `u_row` elements apart, even ones; k a multiple of 4·run; `kind` is
    `gated.kind_of` an activation. `order_grid(m, k, run)` blocks.

    A dependent launch may start at once.
    """
    quantize = lanes_quantizer(run, apart, gated_pair(clamp))

    @L.kernel(launch_bounds=(THREADS, 8))
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
        L.grid_launch_dependents()
        quantize((g, u, g_row, u_row, kind), L.f32(1), out, flags, k, words)

    return kernel
