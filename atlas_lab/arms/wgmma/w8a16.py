"""The arm over FP8 weights on warpgroups, whose activations stay BF16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atlas_lab.arms.fp8 import KEYS
from atlas_lab.arms.wgmma.base import rows_for_tma
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats.base import PER_ROW
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.gemm.wgmma_w8a16 import BK, RUN, stage_bytes, wgmma_w8a16
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.lanes_order import ordered_k

# How the scales lie, by the key that the weight is bound under.
BOUND = {**KEYS, PER_ROW: "rows"}
MAKING = 222  # instructions of a warp for a stage, beside those that add up its sums


@dataclass(frozen=True)
class StoredTile(RepackedTile):
    """bm rows of x by bn rows of W, whose sums of a stage are scaled and added."""

    @property
    def w_bytes(self) -> int:
        return self.bn * BK

    @property
    def issued(self) -> int:
        return MAKING + self.bm // 2

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)


class Fp8Wgmma(Transposed):
    """Weights E4M3 `[N, K]` and their scales as stored (128x128, one, or one a row), made BF16 in registers, exactly
    (W8A16); x is put into the lanes' order first; tensor cores (wgmma) fed by TMA; sums over 128 of K are scaled and
    added in FP32, scales of rows multiply the whole sums; K a multiple of 16."""

    name = "fp8_wgmma"
    source = "fp8"
    made, run = StoredTile, RUN
    narrow = (128, 64)
    several = ((160, 128, 1), (128, 128, 1), (128, 128, 2))
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: 8 + -(-k // BK), extra_roundings=1)
    reduction_class = ReductionClass("wgmma.m64k16.bf16", "each 128 of K, in parts by M, N, K, target", promotion=BK)

    def __init__(self) -> None:
        self.kernels = (self.order, *(_kernel(t) for tiles in self.tiles() for t in tiles))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        if p.weight.geometry not in BOUND:
            allowed = " or ".join(map(str, BOUND))
            return no("scale-geometry", "reads scales of E4M3", found=p.weight.geometry, allowed=allowed)
        return rows_for_tma(p.k, "e4m3")

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight, key=BOUND[p.weight.geometry])]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {"x.ordered": Tensor("bf16", (c.m, ordered_k(c.k, self.run)))}

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        ((key, w),) = c.weights.items()
        ordered = c.scratch["x.ordered"]
        x = self.x_map(c, ordered, t)
        w_map = TensorMap(w.weight, (t.bn, BK), swizzle=ROW, promotion=256)
        scales = replace(w.scale, dtype="u8", shape=(w.scale.bytes,))
        grid = (-(-c.k // BK), 1) if key == "blocks" else (0, 0)
        tail = (*grid, int(key == "rows"), int(w.scale.dtype == "bf16"))
        args = (x, w_map, scales, c.y.data)
        return [self._order(c, t, ordered), self.launch(c, t, _kernel(t), args, tail)]


def _kernel(t: Tile) -> Kernel:
    return wgmma_w8a16(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.across)
