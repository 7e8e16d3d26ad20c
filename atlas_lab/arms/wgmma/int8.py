"""The arms over the int8 copy of a weight on warpgroups, whose activations are int8 too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies.int8 import can_int8, int8_32
from atlas_lab.arms.copies.shapes import multiples
from atlas_lab.arms.gated import PROLOGUES
from atlas_lab.arms.wgmma.base import OnWarpgroups
from atlas_lab.arms.wgmma.grouped_x import holding, quantizing, scales_map
from atlas_lab.arms.wgmma.tiles import L2_BYTES, NARROW, SHARED_BYTES, STEP, Tile, element_rate, read_share
from atlas_lab.core.call import Call
from atlas_lab.core.chip import PULL, QUARTERS
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import int8_groups
from atlas_lab.kernels.activation.quantized import gated_int8_groups
from atlas_lab.kernels.gemm.wgmma_int8 import BESIDE, BK, wgmma_int8
from atlas_lab.kernels.gemm.wgmma_int8_scale import GROUP, GROUPS
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.int8 import LANES, ROWS, quantize_int8_groups

THREADS = ROWS * LANES
ISSUED = 60, 3.3  # instructions of a warp for a stage, and for each of its sums, of a thread
FLOATS = 16, 2  # scales that a thread loads for 64 columns, and for 64 rows


@dataclass(frozen=True)
class Int8Tile(Tile):
    """bm x bn outputs of a block, a warpgroup for every 64 columns; `sub`: sums of a stage of their own."""

    sub: bool = False

    @property
    def stage(self) -> int:
        return (self.bm + self.bn) * (ROW + BESIDE)

    @property
    def outside(self) -> int:
        return self.warps * WARP_BYTES

    @property
    def dealt(self) -> int:
        return self.bn

    def step_clocks(self, m: int, blocks: int, target: Target, pipe: str) -> float:
        groups, sums = self.bn // GROUP_ROWS, GROUPS * self.bm // 2
        scales = GROUPS * (FLOATS[0] + FLOATS[1] * self.bm // GROUP_ROWS) * 4 * 128 * groups
        operands = groups * self.bm // GROUP_ROWS * 2 * GROUP_ROWS * ROW
        bytes_in = (self.bm + self.bn) * (ROW + BESIDE)
        return STEP + max(
            self.bm * self.bn * BK / element_rate(target, pipe),
            4 * groups * (ISSUED[0] + ISSUED[1] * sums) / QUARTERS,
            (scales + operands + bytes_in) / SHARED_BYTES,
            bytes_in / L2_BYTES,
            self.bn * (ROW + BESIDE) / (PULL * read_share(target)) if m <= self.bm else 0.0,
        )

    def read_clocks(self, n: int, k_bytes: int, target: Target) -> float:
        return super().read_clocks(n, k_bytes, target) * (ROW + BESIDE) / ROW


class Int8Wgmma(OnWarpgroups):
    """int8 with a scale for 32 weights of a row, made of the weight's values at load time; x quantized alike (W8A8), a
    launch of its own; tensor cores (wgmma) fed by TMA, exact sums of 32 of K scaled and added in FP32; K a multiple of
    128. It changes numbers: it quantizes activations and re-quantizes weights."""

    name = "int8_wgmma"
    element_bytes, pipe = 1, "mma_s8"
    beside = BESIDE
    narrow = (128, 64)
    several: Sequence[tuple[int, int]] = ((128, 128), (64, 128))
    """Rows and columns of the tiles for more than 64 rows."""
    sub = False
    # the product of both scales, then a fused addition for each 32 of K
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: -(-k // GROUP), extra_roundings=1)
    accuracy = Accuracy(min_snr_db=38)
    reduction_class = ReductionClass("wgmma.m64k32.s8", "ascending K, in parts by M, N, K, target", promotion=GROUP)
    prologues = PROLOGUES

    def __init__(self) -> None:
        self.kernels = (quantize_int8_groups, *dict.fromkeys(_kernel(t) for tiles in self.tiles() for t in tiles))
        self.optional_kernels = (gated_int8_groups(clamp=False), gated_int8_groups(clamp=True))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_int8(p) and multiples(p, k_multiple=BK)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [int8_32(p)]

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        return [self._tile(NARROW, bn) for bn in self.narrow], [self._tile(*form) for form in self.several]

    def _tile(self, bm: int, bn: int, across: int = 1, down: int = 1, split: int = 1) -> Tile:
        return Int8Tile(bm, bn, across, down, self.beside, split=split, sub=self.sub)

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return holding(c, "i8", GROUP) | super().scratch(c)

    def lower(self, c: Call) -> list[Launch]:
        w = c.weights["int8_32"]
        t = self.tile(c)
        order = gated_int8_groups(clamp=c.prologue_limit > 0) if c.prologue else quantize_int8_groups
        quantized = quantizing(c, order, ROWS, THREADS, self.to_clear(c, t), f"{self.name} x")
        x, of_x = self.x_map(c, c.scratch["x.codes"], t), scales_map(c, GROUPS, t.bm)
        args = (x, self.rows_map(w.q, t.bn), of_x, TensorMap(w.scale, (t.bn, GROUPS)), c.y.data)
        return [quantized, self.launch(c, t, _kernel(t), args)]

    def quantized(self, x: np.ndarray, weights: Any) -> np.ndarray:
        return int8_groups.dequantize(*int8_groups.quantize(x.astype(np.float32)))


class Int8WgmmaSub(Int8Wgmma):
    """The same of NVFP4, but the sums of a stage, 128 of K, are added up first and then join the sum of all."""

    name = "int8_wgmma_sub"
    source = "nvfp4"
    several = ((64, 128),)
    sub = True
    accuracy = Accuracy(min_snr_db=19)  # NVFP4 itself is 20 dB from BF16
    # the product of both scales and the first of a stage's four; their additions, and one for each stage
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 3 + -(-k // BK), extra_roundings=2)
    reduction_class = ReductionClass("wgmma.m64k32.s8", "128 of K first, in parts by M, N, K, target", promotion=GROUP)


def _kernel(t: Tile) -> Kernel:
    assert isinstance(t, Int8Tile)
    return wgmma_int8(t.bm, t.bn, t.stages, t.sub)
