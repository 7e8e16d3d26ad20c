"""What the arms on warpgroups share: their tiles, the setting that says which of them serves few rows, their launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlas_lab.arms.wgmma.tiles import NARROW, WIDE, Tile, ordered
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.rows import rows_from
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuning import Setting, chosen, setting
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels.gemm.wgmma_ring import ROW, shared_of
from atlas_lab.kernels.gemm.wgmma_store import OUT_COLUMNS, OUT_ROWS
from atlas_lab.kernels.lang import Kernel

FIRST_ROWS = 17  # fewer are served by arms that read W once
CHUNK = 16  # bytes that rows of what TMA loads are a multiple of


class OnWarpgroups(Arm):
    """Any M from 17 and any N. The setting is the tile that serves M up to 64, its `columns` and the blocks of its
    `cluster`; above that the model chooses by M. Tiles add in the same order."""

    roles = ("*",)
    rows = rows_from(FIRST_ROWS)
    element_bytes: int
    """Of x and W in shared memory."""
    beside: int = 0
    """Bytes of a stage for each row of x, beside x and W."""
    pipe: str
    narrow: Sequence[tuple[int, int]]
    """Columns and blocks of a cluster of the tiles for M up to 64."""
    wide: Sequence[tuple[int, int]]
    """The same of those for more."""

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        """Those for M up to 64, and those for more."""
        by_rows = ((NARROW, self.narrow), (WIDE, self.wide))
        narrow, wide = ([Tile(bm, *form, self.beside) for form in forms] for bm, forms in by_rows)
        return narrow, wide

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        return [setting(columns=t.bn, cluster=t.cluster) for t in self._ordered(self.tiles()[0], NARROW, n, k, target)]

    def tile(self, c: Call) -> Tile:
        """The one that serves a call."""
        form = dict(chosen(self, c.n, c.k, c.context))  # for every M: one that is stale is refused
        if c.m <= NARROW:
            return Tile(NARROW, form["columns"], form["cluster"], self.beside)
        return self._ordered(self.tiles()[1], c.m, c.n, c.k, c.context.target)[0]

    def _ordered(self, tiles: Sequence[Tile], m: int, n: int, k: int, target: Target) -> list[Tile]:
        return ordered(tiles, m, n, k * self.element_bytes, target, self.pipe)

    def product(
        self, c: Call, t: Tile, kernel: Kernel, x: Tensor, w: Tensor, *more: Argument, tail: Any = (), pdl: bool = False
    ) -> Launch:
        """The launch of y = x·Wᵀ: maps of x and W, `more`, y, the sizes, `tail`; with `pdl` W comes while the launch
        before still makes x."""
        per_row = ROW // self.element_bytes
        parts = ((x, t.bm // t.cluster), (w, t.bn))
        maps = [TensorMap(of, (rows, per_row), swizzle=ROW, promotion=256) for of, rows in parts]
        y = TensorMap(c.y.data, (OUT_ROWS, OUT_COLUMNS), swizzle=ROW) if t.mapped else c.y.data
        return self.launch(c, t, kernel, (*maps, *more, y, c.m, c.n, c.k, *tail), pdl)

    def launch(self, c: Call, t: Tile, kernel: Kernel, args: tuple[Argument, ...], pdl: bool = False) -> Launch:
        """The launch of a kernel for tiles t."""
        return Launch(
            kernel,
            grid=t.grid(c.m, c.n, c.context.target.sms),
            cluster=t.cluster,
            block=t.threads,
            shared=shared_of(t.stages, t.stage, t.outside),
            args=args,
            flops=2 * c.m * c.n * c.k,
            pipe=self.pipe,
            pdl=pdl,
            label=self.name,
        )


def rows_for_tma(k: int, of: str) -> Verdict:
    """Whether rows of k elements are as far apart as the copy engine takes them."""
    step = CHUNK // dtype(of).bytes
    if k % step:
        allowed = f"{step}, {2 * step}, {3 * step}, ..."
        return no("k-multiple", f"K must be a multiple of {step} for rows that TMA loads", found=k, allowed=allowed)
    return yes()
