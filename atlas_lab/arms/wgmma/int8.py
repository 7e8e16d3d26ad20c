"""The arms over the int8 copy of a weight on warpgroups, whose activations are int8 too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atlas_lab.arms.copies.int8 import can_int8, int8_32
from atlas_lab.arms.copies.shapes import multiples
from atlas_lab.arms.gated import PROLOGUES
from atlas_lab.arms.wgmma.base import OnWarpgroups
from atlas_lab.arms.wgmma.grouped_x import holding, quantizing, scales_map
from atlas_lab.arms.wgmma.int8_tiles import FloatsTile, Int8Tile
from atlas_lab.arms.wgmma.tiles import NARROW, Tile
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import int8_groups
from atlas_lab.kernels.activation.quantized import gated_int8_groups, gated_int8_lanes
from atlas_lab.kernels.gemm.wgmma_int8 import BESIDE, BK, wgmma_int8
from atlas_lab.kernels.gemm.wgmma_int8_f16 import wgmma_int8_f16
from atlas_lab.kernels.gemm.wgmma_int8_scale import GROUP, GROUPS
from atlas_lab.kernels.gemm.wgmma_transposed import SIDE
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.int8 import LANES, ROWS, quantize_int8_groups
from atlas_lab.kernels.quantize.int8_lanes import quantize_int8_lanes

THREADS = ROWS * LANES


class Int8Wgmma(OnWarpgroups):
    """int8 with a scale for 32 weights of a row, made of the weight's values at load time; x quantized alike (W8A8), a
    launch of its own; tensor cores (wgmma) fed by TMA, exact sums of 32 of K scaled and added in FP32: of s8 products
    for M up to 64, above of the same integers in F16, whose sums take no conversion; K a multiple of 128. It changes
    numbers: it quantizes activations and re-quantizes weights."""

    name = "int8_wgmma"
    element_bytes, pipe = 1, "mma_f16"
    beside = BESIDE
    narrow = (128, 64)
    several: Sequence[tuple[int, int, int]] = ((64, 256, 2), (64, 128, 1))
    """Rows of x and of W of the tiles for more than 64 rows, and how many times 64 of W a warpgroup has."""
    sub = False
    # the product of both scales, then a fused addition for each 32 of K
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: -(-k // GROUP), extra_roundings=1)
    accuracy = Accuracy(min_snr_db=38)
    reduction_class = ReductionClass("wgmma.m64k32.s8", "ascending K, in parts by M, N, K, target", promotion=GROUP)
    prologues = PROLOGUES

    def __init__(self) -> None:
        products = [_kernel(t) for tiles in self.tiles() for t in tiles]
        orders = (quantize_int8_groups, quantize_int8_lanes) if self._floats() else (quantize_int8_groups,)
        self.kernels = (*orders, *dict.fromkeys(products))
        gated = (gated_int8_groups, gated_int8_lanes)[: len(orders)]
        self.optional_kernels = tuple(kernel(clamp=clamp) for kernel in gated for clamp in (False, True))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_int8(p) and multiples(p, k_multiple=BK)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [int8_32(p)]

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        return [self._tile(NARROW, bn) for bn in self.narrow], self._floats()

    def _floats(self) -> list[Tile]:
        """Tiles whose products are of integers in F16."""
        return [FloatsTile(bm, bn, each=each) for bm, bn, each in self.several]

    def _tile(self, bm: int, bn: int, across: int = 1, down: int = 1, split: int = 1) -> Tile:
        return Int8Tile(bm, bn, across, down, self.beside, split=split, sub=self.sub)

    def scratch(self, c: Call) -> dict[str, Tensor]:
        x = holding(c, "f16", GROUP, SIDE) if isinstance(self.tile(c), FloatsTile) else holding(c, "i8", GROUP)
        return x | super().scratch(c)

    def lower(self, c: Call) -> list[Launch]:
        w, t = c.weights["int8_32"], self.tile(c)
        codes, scales, clamp = c.scratch["x.codes"], c.scratch["x.scales"], c.prologue_limit > 0
        if floats := isinstance(t, FloatsTile):
            order = gated_int8_lanes(clamp=clamp) if c.prologue else quantize_int8_lanes
            of_x = TensorMap(scales, (GROUPS, t.bm))
        else:
            order = gated_int8_groups(clamp=clamp) if c.prologue else quantize_int8_groups
            of_x = scales_map(c, GROUPS, t.bm)
        quantized = quantizing(c, order, ROWS, THREADS, self.to_clear(c, t), f"{self.name} x")
        args = (self.x_map(c, codes, t), self.rows_map(w.q, t.bn), of_x, TensorMap(w.scale, (t.bn, GROUPS)), c.y.data)
        launch = self.launch(c, t, _kernel(t), args)
        return [quantized, launch if floats else replace(launch, pipe="mma_s8")]

    def quantized(self, x: np.ndarray, weights: Any) -> np.ndarray:
        return int8_groups.dequantize(*int8_groups.quantize(x.astype(np.float32)))


class Int8WgmmaSub(Int8Wgmma):
    """The same of NVFP4, but the sums of a stage, 128 of K, are added up first and then join the sum of all."""

    name = "int8_wgmma_sub"
    source = "nvfp4"
    pipe = "mma_s8"
    several = ()
    sub = True
    accuracy = Accuracy(min_snr_db=19)  # NVFP4 itself is 20 dB from BF16
    # the product of both scales and the first of a stage's four; their additions, and one for each stage
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 3 + -(-k // BK), extra_roundings=2)
    reduction_class = ReductionClass("wgmma.m64k32.s8", "128 of K first, in parts by M, N, K, target", promotion=GROUP)

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        return super().tiles()[0], [self._tile(NARROW, self.narrow[0])]


def _kernel(t: Tile) -> Kernel:
    if isinstance(t, FloatsTile):
        return wgmma_int8_f16(t.bm, t.bn, t.stages, t.each)
    assert isinstance(t, Int8Tile)
    return wgmma_int8(t.bn, t.stages, t.sub)
