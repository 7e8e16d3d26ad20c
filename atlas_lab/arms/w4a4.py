"""The arm that multiplies NVFP4 weights by NVFP4 activations (W4A4) on cards with FP4 products."""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas_lab.arms.copies.input_scale import INPUT_SCALE, can_scale_input, input_scale
from atlas_lab.arms.copies.shapes import two_level
from atlas_lab.arms.gated import PROLOGUES, form, source
from atlas_lab.arms.nvfp4 import CONVENTIONS
from atlas_lab.arms.tiling import Tile
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows_from
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import nvfp4_groups
from atlas_lab.kernels.activation.quantized import gated_nvfp4
from atlas_lab.kernels.gemm.nvfp4_w4a4 import gemm_nvfp4_w4a4, stage_bytes
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.nvfp4 import EACH, GROUP, THREADS, quantize_nvfp4
from atlas_lab.kernels.quantize.nvfp4_blocks import blocks_grid

FIRST_ROWS = 17
SNR_DB = 15.0  # of W4A4 against the unquantized product
MULTIPLE = 64  # of K: rows of scales are copied four at a time
LARGE, SMALL = Tile(128, 128, 2, 4, 4), Tile(64, 128, 2, 4, 4)


def rounded_x(x: np.ndarray, weights: Any) -> np.ndarray:
    """float64 `[M, K]` that x stands for once it is quantized, under the tensor scale among a call's weights."""
    scale = weights[INPUT_SCALE]["x"].reshape(()) if INPUT_SCALE in weights else nvfp4_groups.ONE
    return nvfp4_groups.dequantize(*nvfp4_groups.quantize(x.astype(np.float32), scale), scale)


class Nvfp4W4A4(Arm):
    """Codes and scales as stored; x quantized to NVFP4, a launch of its own, under the tensor scale of activations that
    the checkpoint may have, else under 1; block-scaled tensor cores (mma.sync), exact products, FP32 sums in ascending
    K, the tensor scales on the sums; K a multiple of 64. It changes numbers: it quantizes activations."""

    name = "nvfp4_w4a4"
    roles = ("*",)
    rows = rows_from(FIRST_ROWS)
    source = "nvfp4"
    instead = "nvfp4_w4a4_emulated"
    tolerance = Rounded(accumulate="mma_nvfp4", out="bf16", depth=lambda k: -(-k // 64), extra_roundings=1)
    accuracy = Accuracy(min_snr_db=SNR_DB)
    reduction_class = ReductionClass("mma.m16n8k64.nvfp4", "ascending K", rounding="x to NVFP4, output")
    prologues = PROLOGUES
    quantized = staticmethod(rounded_x)

    def __init__(self) -> None:
        products = (_kernel(LARGE, True), _kernel(SMALL, True), _kernel(SMALL, False))
        self.kernels = (quantize_nvfp4(), *products)
        gated = (gated_nvfp4(clamp=clamp, scaled=scaled) for scaled in (False, True) for clamp in (False, True))
        self.optional_kernels = (quantize_nvfp4(scaled=True), *gated)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        verdict = two_level(p, k_multiple=MULTIPLE)
        return verdict if not verdict else can_scale_input(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Declaration]:
        scale, bound = input_scale(p), Bind(p.weight, key=CONVENTIONS[p.weight.geometry])
        return [bound] if scale is None else [bound, scale]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return {"x.codes": Tensor("u8", (c.m, c.k // 2)), "x.scales": Tensor("e4m3", (c.m, c.k // GROUP))}

    def lower(self, c: Call) -> list[Launch]:
        key, w = next(iter(c.weights.items()))
        codes, scales = c.scratch["x.codes"], c.scratch["x.scales"]
        given: tuple[Tensor, ...] = ()
        tensor_scale, divides = w.global_scale, int(key == "reciprocal")
        if INPUT_SCALE in c.weights:
            both = c.weights[INPUT_SCALE]
            given, tensor_scale, divides = (both.x,), both.alpha, 0
        kernel, grid, args = _quantizer(c, *given, codes, scales)
        quantized = Launch(kernel, grid, THREADS, args, quantizes=True, label=f"{self.name} x")
        large = c.n % 2 == 0 and c.m > SMALL.bm and LARGE.count(c.m, c.n) >= c.context.target.sms
        tile = LARGE if large else SMALL
        product = Launch(
            _kernel(tile, c.n % 2 == 0),
            grid=tile.count(c.m, c.n),
            block=tile.threads,
            shared=tile.stages * stage_bytes(tile.bm, tile.bn),
            args=(codes, scales, w.weight, w.scale, tensor_scale, c.y, c.m, c.n, c.k, divides),
            flops=2 * c.m * c.n * c.k,
            pipe="mma_nvfp4",
            label=self.name,
        )
        return [quantized, product]


def _quantizer(c: Call, *tensors: Tensor) -> tuple[Kernel, int | tuple[int, int], tuple[Argument, ...]]:
    """The kernel that makes codes and scales of x, the last two tensors, under a tensor scale where there is a first;
    its blocks and arguments."""
    scaled, count = len(tensors) > 2, c.m * c.k // EACH
    if not c.prologue:
        return quantize_nvfp4(scaled=scaled), -(-count // THREADS), (*source(c), *tensors, count)
    kernel = gated_nvfp4(clamp=c.prologue_limit > 0, scaled=scaled)
    return kernel, blocks_grid(c.m, c.k), (*source(c), *tensors, c.k, *form(c))


def _kernel(t: Tile, pairs: bool) -> Kernel:
    return gemm_nvfp4_w4a4(**t.parameters, pairs=pairs)
