"""The arm over BF16 weights on warpgroups."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_lab.arms.wgmma.base import ADDING, OnWarpgroups, addends, rows_for_tma
from atlas_lab.arms.wgmma.tiles import TALL, Tile, splitting, tightness
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS
from atlas_lab.kernels.gemm.wgmma_bf16 import wgmma_bf16
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.lang import Kernel

THREE = 160  # clocks of a stage that three warpgroups take more than their products: measured with 160 and 320 rows
ALONE = 60  # that tiles of 256 columns take whose W no other block shares: measured with 256 to 384 rows


class Bf16Wgmma(OnWarpgroups):
    """Weights BF16 `[N, K]` as stored; tensor cores (wgmma) fed by TMA, FP32 sums in ascending K; K a multiple of 8."""

    name = "bf16_wgmma"
    source = "bf16"
    element_bytes, pipe = 2, "mma_bf16"
    narrow: Sequence[int] = (256, 192, 136, 128, 112, 64)
    splits: Sequence[tuple[int, int]] = ((128, 2), (80, 2))
    wide: Sequence[tuple[int, int, int]] = (
        *((256, 1, 2), (192, 1, 2), (176, 1, 2), (256, 1, 1), (136, 1, 1), (64, 1, 1)),
    )
    tall: Sequence[tuple[int, int, int]] = ((136, 1, 1),)
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16))
    epilogues: Sequence[str] = ADDING
    reduction_class = ReductionClass("wgmma.m64k16.bf16", "ascending K, in parts by M, N, K, target")

    def __init__(self) -> None:
        whole, split = self.whole_and_split()
        self.kernels = (clear_flags, *map(self.kernel, whole))
        tiles = sorted((*whole, *split), key=tightness)
        adding = (self.kernel(t, ADDENDS) for t in tiles if t.bm != TALL) if self.epilogues else ()
        self.optional_kernels = (*map(self.kernel, split), *adding)

    def exposed(self, bm: int, bn: int, down: int) -> int:
        return THREE if bm == TALL else ALONE if bn == 256 and down == 1 else 0

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return rows_for_tma(p.k, "bf16")

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def finishes(self, c: Call, t: Tile) -> bool:
        return t.bm != TALL or not c.epilogue.addends  # three warpgroups have no registers for them

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        added, both = addends(c)
        args = (self.x_map(c, c.x.data, t), *self.operands(c, t), *added)
        kernel = self.kernel(t, ADDENDS if added else None)
        return [*self.cleared(c, t), self.launch(c, t, kernel, args, (*self.borders(c, t), *both))]

    def weight(self, w: Fields, t: Tile) -> tuple[Argument, ...]:
        return (self.rows_map(w.weight, t.bn // t.down),)

    def kernel(self, t: Tile, epilogue: str | None = None) -> Kernel:
        form = splitting(t)
        return wgmma_bf16(t.bm, t.bn, t.stages, t.across, t.down, joined=self.joined, epilogue=epilogue, **form)
