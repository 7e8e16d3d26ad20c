"""The arms over NVFP4 in GGML's blocks on warpgroups, whose activations are block FP4 too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies import block_nvfp4
from atlas_lab.arms.copies.shapes import multiples, two_level
from atlas_lab.arms.w4a4 import SNR_DB, rounded_x
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows_from
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import get
from atlas_lab.kernels.gemm.wgmma_block_nvfp4 import APART, BK, RUN, W_ROW, stage_bytes, wgmma_block_nvfp4
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.lanes_order import THREADS, order_grid
from atlas_lab.kernels.quantize.nvfp4_lanes import quantize_nvfp4_lanes

BLOCKS, GLOBAL = "blocks", "global_scale"


@dataclass(frozen=True)
class BlockTile(RepackedTile):
    """bm rows of x by bn rows of blocks."""

    @property
    def span(self) -> int:
        return BK

    @property
    def w_bytes(self) -> int:
        return self.bn * W_ROW

    @property
    def issued(self) -> int:
        return 400

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)


class Nvfp4Mmq(Transposed):
    """Blocks of 64 weights, stored so or shuffled at load time; x quantized to FP4 with a scale for 16 of K alone,
    written as code times scale, exact in BF16, in the blocks' order; weights made BF16 in registers, exactly; tensor
    cores (wgmma) fed by TMA in tiles of 16, 32, 64 or 128 rows of x, the smallest that covers M; FP32 sums, the tensor
    scale on them; K a multiple of 256. It changes numbers: it quantizes activations."""

    rows = rows_from(1)
    made, run = BlockTile, RUN
    few = (16, 32, 64)
    narrow = (128,)
    several = ((128, 128, 1),)
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    accuracy = Accuracy(min_snr_db=SNR_DB)
    reduction_class = ReductionClass(
        "wgmma.m64k16.bf16", "four blocks of 64 by M, in parts by M, N, K, target", rounding="x to FP4, output"
    )

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        self.kernels = (_QUANTIZE, *(_kernel(t) for tiles in self.tiles() for t in tiles))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        of = two_level if self.source == "nvfp4" else multiples
        return of(p, k_multiple=BK)

    def finalize(self, p: Projection, ctx: Context) -> list[Declaration]:
        return [block_nvfp4(p) if self.source == "nvfp4" else Bind(p.weight, key=BLOCKS)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {"x.ordered": Tensor("bf16", (c.m, c.k))}

    def lower(self, c: Call) -> list[Launch]:
        t, made = self.tile(c), c.scratch["x.ordered"]
        ((key, w),) = c.weights.items()
        flags, words = self.to_clear(c, t)
        quantized = Launch(
            _QUANTIZE,
            grid=order_grid(c.m, c.k, RUN),
            block=THREADS,
            args=(c.x, made, flags, c.k, words),
            quantizes=True,
            label=f"{self.name} x",
        )
        # where there is no tensor scale another tensor stands for it, which is not read
        scale, how = (w[GLOBAL], int(key.endswith("_reciprocal"))) if GLOBAL in w else (c.scratch["parts"], 2)
        blocks = TensorMap(w.blocks, (t.bn, W_ROW), promotion=256)
        args = (self.rows_map(made, t.bm), blocks, scale, c.y.data)
        return [quantized, self.launch(c, t, _kernel(t), args, (how,), pdl=True)]

    def reference(self, call: Call, x: np.ndarray, weights: Any) -> np.ndarray:
        """The float64 product of quantized x and stored weights."""
        ((key, stored),) = weights.items()
        values = get("block_nvfp4").dequantize({BLOCKS: stored[BLOCKS]})
        scale = np.float64(stored[GLOBAL].reshape(())) if GLOBAL in stored else 1.0
        made: np.ndarray = rounded_x(x, {}) @ (values / scale if key.endswith("_reciprocal") else values * scale).T
        return made


_QUANTIZE = quantize_nvfp4_lanes(RUN, apart=APART)


def _kernel(t: Tile) -> Kernel:
    return wgmma_block_nvfp4(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn))
