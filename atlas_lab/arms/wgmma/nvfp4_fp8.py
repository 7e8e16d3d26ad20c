"""The arms over NVFP4 weights on warpgroups that multiply FP8; they read the copy that `nvfp4_mma_repacked` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies import can_repack, repacked_nvfp4
from atlas_lab.arms.copies.repacked import unpack
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
from atlas_lab.formats import FORMATS, get, nvfp4_rounded
from atlas_lab.kernels.gemm.wgmma_nvfp4 import stage_bytes
from atlas_lab.kernels.gemm.wgmma_nvfp4_fp8 import wgmma_nvfp4_fp8
from atlas_lab.kernels.gemm.wgmma_nvfp4_w4a8 import wgmma_nvfp4_w4a8
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.gemv.mma_lanes import SPAN
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.fp8_rows import THREADS, quantize_fp8_rows

# Instructions of a warp for a stage, beside those that add up its sums.
MAKING, MAKING_CODES = 230, 310


@dataclass(frozen=True)
class RoundedTile(RepackedTile):
    """bm rows of x, E4M3, by bn rows of W, whose sums of a stage are added."""

    x_row = ROW

    @property
    def issued(self) -> int:
        return MAKING + self.bm // 2

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn, ROW)


@dataclass(frozen=True)
class CodesTile(RoundedTile):
    """bm rows of x, E4M3, by bn rows of W, whose sums of 16 of K are scaled and added."""

    @property
    def issued(self) -> int:
        return MAKING_CODES + SPAN // 16 * self.bm // 2


class Nvfp4WgmmaFp8(Transposed):
    """Weights repacked at load time as nvfp4_mma_repacked reads them, one copy for both; an eighth of a code times its
    block scale is rounded to E4M3 in registers; x quantized to E4M3 with a scale a row, a launch of its own; tensor
    cores (wgmma) fed by TMA, sums over 128 of K added in FP32, x's scale and the tensor scale on the sums; K a multiple
    of 128. It changes numbers: it rounds weights and quantizes activations."""

    name = "nvfp4_wgmma_fp8"
    source = "nvfp4"
    element_bytes, pipe = 1, "mma_e4m3"
    made = RoundedTile
    narrow = (128, 64)
    several = ((176, 128, 2), (128, 128, 1))
    # the products of 128 of K, then an addition for each in FP32: 2**-24, counted twice
    tolerance = Rounded(accumulate="mma_e4m3", out="bf16", depth=lambda k: 4 + -(-k // (SPAN << 11)))
    accuracy = Accuracy(min_snr_db=18)
    reduction_class = ReductionClass(
        "wgmma.m64k32.e4m3", "each 64 of K by M, in parts by M, N, K, target", promotion=128
    )

    def __init__(self) -> None:
        self.kernels = (self.order, *dict.fromkeys(self.kernel(t) for tiles in self.tiles() for t in tiles))

    @property
    def order(self) -> Kernel:
        return quantize_fp8_rows(ordered=True)

    def kernel(self, t: Tile) -> Kernel:
        return wgmma_nvfp4_fp8(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.across)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_repack(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_nvfp4(p)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        operand = {"x.codes": Tensor("e4m3", (c.m, c.k)), "x.scales": Tensor("f32", (c.m,))}
        return operand | super().scratch(c)

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        ((key, w),) = c.weights.items()
        codes, scales = c.scratch["x.codes"], c.scratch["x.scales"]
        flags, words = self.to_clear(c, t)
        quantized = Launch(
            self.order,
            grid=c.m,
            block=THREADS,
            args=(c.x, codes, scales, flags, c.k, words),
            quantizes=True,
            label=f"{self.name} x",
        )
        args = (self.x_map(c, codes, t), scales, units_map(w, t), w.global_scale, c.y.data)
        return [quantized, self.launch(c, t, self.kernel(t), args, (divides(key),))]

    def reference(self, call: Call, x: np.ndarray, weights: Any) -> np.ndarray:
        """The float64 product of quantized x and the weights as they are multiplied."""
        ((key, made),) = weights.items()
        of_rows = FORMATS["fp8_row"]
        values = self.values(key, unpack(made, call.n))
        product: np.ndarray = of_rows.dequantize(of_rows.quantize(x.astype(np.float32))) @ values.T
        return product

    def values(self, key: str, stored: dict[str, np.ndarray]) -> np.ndarray:
        """float64 `[N, K]` of what is multiplied, of stored tensors bound under this key."""
        values = nvfp4_rounded.values(stored["weight"], stored["scale"])
        scale = np.float64(stored["global_scale"].reshape(()))
        return values / scale if divides(key) else values * scale


class Nvfp4WgmmaW4A8(Nvfp4WgmmaFp8):
    """The same copy; codes exact in E4M3; x quantized to E4M3 with a scale a row, a launch of its own; tensor cores
    (wgmma) fed by TMA, sums over 16 of K, times their block scale, added in FP32, x's scale and the tensor scale on the
    sums; K a multiple of 128. It changes numbers: it quantizes activations."""

    name = "nvfp4_wgmma_w4a8"
    made = CodesTile
    several = ((112, 128, 1), (64, 128, 1))
    # the product of 16 of K, then a fused addition for each in FP32: 2**-24, counted twice
    tolerance = Rounded(accumulate="mma_e4m3", out="bf16", depth=lambda k: 2 + -(-k // (16 << 11)))
    accuracy = Accuracy(min_snr_db=19)
    reduction_class = ReductionClass("wgmma.m64k32.e4m3", "ascending K, in parts by M, N, K, target", promotion=16)

    @property
    def order(self) -> Kernel:
        return quantize_fp8_rows(ordered=False)

    def kernel(self, t: Tile) -> Kernel:
        return wgmma_nvfp4_w4a8(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.across)

    def values(self, key: str, stored: dict[str, np.ndarray]) -> np.ndarray:
        return get("nvfp4_ct" if divides(key) else "nvfp4").dequantize(stored)
