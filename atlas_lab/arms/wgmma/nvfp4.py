"""The arm over NVFP4 weights on warpgroups, which reads the copy that `nvfp4_mma_repacked` does."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_lab.arms.copies import can_repack, repacked_nvfp4
from atlas_lab.arms.wgmma.base import OnWarpgroups
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.target import Target
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuning import Setting, chosen, setting
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemm.wgmma_nvfp4 import LINES, wgmma_nvfp4
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.gemv.mma_lanes import SPAN
from atlas_lab.kernels.lang import Kernel

FEW = (32, 64)  # rows of x of the tiles for so many, whose bn and cluster the setting is


class Nvfp4Wgmma(OnWarpgroups):
    """Weights repacked at load time as nvfp4_mma_repacked reads them, one copy for both, and made BF16 in registers,
    exactly (W4A16); tensor cores (wgmma) fed by TMA, FP32 sums in ascending K, the tensor scale on the sums; K a
    multiple of 128."""

    name = "nvfp4_wgmma"
    source = "nvfp4"
    element_bytes, pipe = 2, "mma_bf16"
    narrow = ((192, 1), (128, 1), (128, 2), (64, 1), (64, 2), (64, 4))
    several = (  # rows of x and of W, blocks of a cluster
        *((256, 128, 1), (192, 128, 1), (176, 192, 1), (160, 192, 1), (128, 192, 1), (128, 128, 1), (128, 64, 1)),
        *((96, 192, 1), (96, 128, 1), (64, 64, 1)),
    )
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    reduction_class = ReductionClass("wgmma.m64k16.bf16", "ascending K")

    def __init__(self) -> None:
        self.kernels = tuple(dict.fromkeys(_kernel(t) for tiles in self.tiles() for t in tiles))

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        few: list[Tile] = [RepackedTile(bm, *form) for bm in FEW for form in self.narrow]
        return few, [RepackedTile(*form) for form in self.several]

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        of_most = [t for t in self.tiles()[0] if t.bm == FEW[-1]]
        return [setting(columns=t.bn, cluster=t.cluster) for t in self._ordered(of_most, FEW[-1], n, k, target)]

    def tile(self, c: Call) -> Tile:
        form = dict(chosen(self, c.n, c.k, c.context))
        if c.m <= FEW[-1]:
            return RepackedTile(next(bm for bm in FEW if c.m <= bm), form["columns"], form["cluster"])
        return self._ordered(self.tiles()[1], c.m, c.n, c.k, c.context.target)[0]

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_repack(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_nvfp4(p)]

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        ((key, w),) = c.weights.items()
        units, across, _ = w.weight.shape
        x = TensorMap(c.x.data, (t.bm // t.cluster, SPAN // 2), swizzle=ROW, promotion=256)
        lines = w.weight.view(0, (units, across * LINES, ROW))
        w_map = TensorMap(lines, (t.bn // 16, LINES, ROW), promotion=256)
        divides = int(key.endswith("_reciprocal"))
        return [self.launch(c, t, _kernel(t), (x, w_map, w.global_scale, c.y.data, c.m, c.n, c.k, divides))]


def _kernel(t: Tile) -> Kernel:
    return wgmma_nvfp4(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.cluster)
