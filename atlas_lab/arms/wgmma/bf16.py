"""The arm over BF16 weights on warpgroups."""

from __future__ import annotations

from atlas_lab.arms.wgmma.base import OnWarpgroups, rows_for_tma
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemm.wgmma_bf16 import wgmma_bf16
from atlas_lab.kernels.lang import Kernel


class Bf16Wgmma(OnWarpgroups):
    """Weights BF16 `[N, K]` as stored; tensor cores (wgmma) fed by TMA, FP32 sums in ascending K; K a multiple of 8."""

    name = "bf16_wgmma"
    source = "bf16"
    element_bytes, pipe = 2, "mma_bf16"
    narrow = ((256, 1), (176, 2), (136, 1), (136, 2), (128, 2), (96, 2), (64, 2), (40, 1), (40, 4))
    wide = ((256, 1), (192, 1), (176, 1), (136, 1), (128, 1), (96, 1), (64, 1), (40, 1), (40, 4))
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16))
    reduction_class = ReductionClass("wgmma.m64k16.bf16", "ascending K")

    def __init__(self) -> None:
        self.kernels = tuple(_kernel(t) for tiles in self.tiles() for t in tiles)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return rows_for_tma(p.k, "bf16")

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        return [self.product(c, t, _kernel(t), c.x.data, c.weights["weight"].weight)]


def _kernel(t: Tile) -> Kernel:
    return wgmma_bf16(t.bm, t.bn, t.stages, t.mapped, t.cluster)
