"""The arm over NVFP4 weights on warpgroups, which reads the copy that `nvfp4_mma_repacked` does."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_lab.arms.copies import can_repack, repacked_nvfp4
from atlas_lab.arms.wgmma.base import ADDING, addends
from atlas_lab.arms.wgmma.repacked_tiles import Nvfp4Tile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile, splitting, tightness
from atlas_lab.arms.wgmma.transposed import FEW, Transposed
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS
from atlas_lab.kernels.gemm.wgmma_nvfp4 import LINES, wgmma_nvfp4
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW
from atlas_lab.kernels.gemv.mma_lanes import RUN
from atlas_lab.kernels.lang import Kernel

ORDERED = 512  # rows of x up to which they are put into the lanes' order first


class Nvfp4Wgmma(Transposed):
    """Weights repacked at load time as nvfp4_mma_repacked reads them, one copy for both, and made BF16 in registers,
    exactly (W4A16); few rows of x are put into the lanes' order first; tensor cores (wgmma) fed by TMA, FP32 sums, 16
    of K after 16, the tensor scale on the sums; K a multiple of 128."""

    name = "nvfp4_wgmma"
    source = "nvfp4"
    made = Nvfp4Tile
    run = RUN
    first_on: Sequence[str] = ("sm_90a",)
    narrow: Sequence[int] = (192, 128, 64)
    splits: Sequence[tuple[int, int]] = ((128, 2), (64, 2))
    several: Sequence[tuple[int, int, int]] = (  # rows of x and of W, blocks of a cluster
        *((256, 128, 1), (256, 128, 2), (192, 128, 1), (128, 192, 1), (128, 128, 1), (96, 192, 1), (96, 128, 1)),
    )
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    epilogues: Sequence[str] = ADDING
    reduction_class = ReductionClass("wgmma.m64k16.bf16", "each 64 of K by M, in parts by M, N, K, target")

    def __init__(self) -> None:
        whole, split = self.whole_and_split()
        ways = [(t, ordered) for t in whole for ordered in (True, False) if ordered or _serves_many(t)]
        apart = [(t, True) for t in split]
        self.kernels = (self.order, clear_flags, *dict.fromkeys(self.kernel(*way) for way in ways))
        tightest = sorted((*ways, *apart), key=lambda way: tightness(way[0]))
        adding = (self.kernel(*way, ADDENDS) for way in tightest if adds(way[0])) if self.epilogues else ()
        self.optional_kernels = (*(self.kernel(*way) for way in apart), *dict.fromkeys(adding))

    def _of_many(self, c: Call) -> list[Tile]:
        return [t for t in self.tiles()[1] if c.m <= ORDERED or _serves_many(t)]

    def finishes(self, c: Call, t: Tile) -> bool:
        return adds(t) or not c.epilogue.addends

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_repack(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_nvfp4(p)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | ({"x.ordered": Tensor("bf16", (c.m, c.k))} if c.m <= ORDERED else {})

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        ordered = c.scratch.get("x.ordered")
        first = self.cleared(c, t) if ordered is None else [self._order(c, t, ordered)]
        x = self.x_map(c, ordered or c.x.data, t)
        added, both = addends(c)
        args = (x, *self.operands(c, t), *added)
        tail = (divides(next(iter(c.weights))), *self.borders(c, t), *both)
        kernel = self.kernel(t, ordered is not None, ADDENDS if added else None)
        return [*first, self.launch(c, t, kernel, args, tail)]

    def weight(self, w: Fields, t: Tile) -> tuple[Argument, ...]:
        return units_map(w, t), w.global_scale

    def kernel(self, t: Tile, ordered: bool, epilogue: str | None = None) -> Kernel:
        form = (t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.across, ordered)
        return wgmma_nvfp4(*form, joined=self.joined, epilogue=epilogue, **splitting(t))


def units_map(w: Fields, t: Tile) -> TensorMap:
    """The map of repacked weights whose boxes are the rows of W of a tile, 128 of K of them."""
    units, across, _ = w.weight.shape
    lines = w.weight.view(0, (units, across * LINES, ROW))
    return TensorMap(lines, (t.bn // 16, LINES, ROW))


def divides(key: str) -> int:
    """1 where the tensor scale of the weight under this key divides, else 0."""
    return int(key.partition(" ")[0].endswith("_reciprocal"))


def adds(t: Tile) -> bool:
    """Whether there is a kernel of the tile with addends, for which three warpgroups leave too few registers, too."""
    return t.bm <= FEW[-1] or t.bn < 3 * GROUP_ROWS


def _serves_many(t: Tile) -> bool:
    """Whether there is a kernel of the tile for x that is not put into order: three warpgroups that multiply leave too
    few registers for it."""
    return t.bm > FEW[-1] and t.bn < 3 * GROUP_ROWS
