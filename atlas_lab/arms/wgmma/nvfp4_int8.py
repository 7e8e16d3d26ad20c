"""The arm over NVFP4 weights on warpgroups that multiplies int8; it reads the copy that `nvfp4_mma_repacked` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies import can_repack, repacked_nvfp4
from atlas_lab.arms.wgmma.grouped_x import holding, quantizing, scales_map
from atlas_lab.arms.wgmma.int8 import THREADS
from atlas_lab.arms.wgmma.nvfp4 import divides, units_map
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import int8_groups
from atlas_lab.kernels.gemm.wgmma_int8_scale import GROUP
from atlas_lab.kernels.gemm.wgmma_nvfp4 import stage_bytes
from atlas_lab.kernels.gemm.wgmma_nvfp4_int8 import BLOCKS, GROUPS, wgmma_nvfp4_int8
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.int8 import ROWS, quantize_int8_groups

MAKING, A_SUM = 400, 3  # instructions of a warp for a stage, and for each sum of 16 of K


@dataclass(frozen=True)
class IntegersTile(RepackedTile):
    """bm rows of x, int8, by bn rows of W, whose sums of 16 of K are made floats, scaled and added."""

    x_row = ROW

    @property
    def issued(self) -> int:
        return MAKING + A_SUM * BLOCKS * self.bm // 2

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn, ROW) + 4 * GROUPS * self.bm


class Nvfp4WgmmaInt8(Transposed):
    """Weights repacked at load time as nvfp4_mma_repacked reads them, one copy for both; twice a code is an int8 in
    registers, exactly; x quantized to int8 with a scale for 32 of K of a row, a launch of its own; tensor cores (wgmma)
    fed by TMA, exact sums of 16 of K, times both scales, added in FP32, the tensor scale on the sums; K a multiple of
    128. It changes numbers: it quantizes activations."""

    name = "nvfp4_wgmma_int8"
    source = "nvfp4"
    element_bytes, pipe = 1, "mma_s8"
    made = IntegersTile
    narrow: Sequence[int] = (128,)
    several: Sequence[tuple[int, int, int]] = ((80, 128, 1), (64, 128, 1))
    # the product of both scales, a fused addition for each 16 of K, the tensor scale
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    accuracy = Accuracy(min_snr_db=19)  # NVFP4 itself is 20 dB from BF16
    reduction_class = ReductionClass("wgmma.m64k32.s8", "16 of K, in parts by M, N, K, target", promotion=16)

    def __init__(self) -> None:
        self.kernels = (self.order, *dict.fromkeys(self.kernel(t) for tiles in self.tiles() for t in tiles))

    @property
    def order(self) -> Kernel:
        kernel: Kernel = quantize_int8_groups
        return kernel

    def kernel(self, t: Tile) -> Kernel:
        return wgmma_nvfp4_int8(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_repack(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_nvfp4(p)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return holding(c, "i8", GROUP) | super().scratch(c)

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        ((key, w),) = c.weights.items()
        quantized = quantizing(c, self.order, ROWS, THREADS, self.to_clear(c, t), f"{self.name} x")
        x, of_x = self.x_map(c, c.scratch["x.codes"], t), scales_map(c, GROUPS, t.bm)
        args = (x, of_x, units_map(w, t), w.global_scale, c.y.data)
        return [quantized, self.launch(c, t, self.kernel(t), args, (divides(key),))]

    def quantized(self, x: np.ndarray, weights: Any) -> np.ndarray:
        return int8_groups.dequantize(*int8_groups.quantize(x.astype(np.float32)))
