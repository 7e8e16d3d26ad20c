"""What the arms share that compute the transposed product: W in registers, x in the order in which lanes own K."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_lab.arms.wgmma.base import OnWarpgroups
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.call import Call
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tuning import Setting, chosen
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.lanes_order import THREADS, order_for_lanes, order_grid

FEW = (32, 64)  # rows of x of the tiles for so many, whose bn the setting is


class Transposed(OnWarpgroups):
    """Tiles of rows of x by rows of W, of which a warpgroup has 64."""

    element_bytes, pipe = 2, "mma_bf16"
    several: Sequence[tuple[int, int, int]]
    """Rows of x and of W of the tiles for more than 64 rows, and the blocks of their clusters."""
    made: type[RepackedTile] = RepackedTile
    run: int
    """Consecutive K that a lane owns."""

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        few: list[Tile] = [self.made(bm, bn, split=split) for bm in FEW for bn, split in self.few]
        return few, [self.made(*form) for form in self.several]

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        return self._settings([t for t in self.tiles()[0] if t.bm == FEW[-1]], n, k, target)

    def tile(self, c: Call) -> Tile:
        form = dict(chosen(self, c.n, c.k, c.context))
        if c.m <= FEW[-1]:
            few = [self.made(bm, form["columns"], split=form.get("split", 1)) for bm in FEW if c.m <= bm]
            # of smaller ones an SM holds more, and cut into as many shares they took 5 % longer
            return min(few, key=lambda t: self._grid(c, t))
        able = [t for t in self._of_many(c) if self.finishes(c, t)]
        return self._ordered(able, c.m, self.counts(c), c.k, c.context.target)[0]

    def _of_many(self, c: Call) -> list[Tile]:
        """The tiles that may serve a call of more than 64 rows."""
        return self.tiles()[1]

    @property
    def order(self) -> Kernel:
        return order_for_lanes(self.run)

    def _order(self, c: Call, t: Tile, ordered: Tensor) -> Launch:
        """The launch before the product, which puts x into the lanes' order and clears the flags."""
        flags, words = self.to_clear(c, t)
        args = (c.x, ordered, flags, c.k, words)
        grid = order_grid(c.m, c.k, self.run)
        return Launch(self.order, grid=grid, block=THREADS, args=args, label=f"{self.name} x")
