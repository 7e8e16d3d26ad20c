"""What the arms on warpgroups share: their tiles, the setting that says which of them serves few rows, their launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from atlas_lab.arms.wgmma.tiles import NARROW, TALL, WIDE, Tile, ordered, splitting
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.rows import rows_from
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuning import Setting, chosen, setting
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels.gemm.wgmma_parts import CLEARED, clear_flags
from atlas_lab.kernels.gemm.wgmma_ring import ROW, boxed, shared_of
from atlas_lab.kernels.lang import Kernel

FIRST_ROWS = 17  # fewer are served by arms that read W once
ADDING = ("lora", "residual")  # parts of an epilogue that kernels with addends fuse
CHUNK = 16  # bytes that rows of what TMA loads are a multiple of


class OnWarpgroups(Arm):
    """Any M from 17 and any N. The setting is the `columns` of the tile that serves M up to 64 and, where they are
    several, the blocks of a cluster that `split` its K; above that the model chooses by M. All tiles add in ascending
    K; where they are cut, by shape and card, in as many parts."""

    roles = ("*",)
    rows = rows_from(FIRST_ROWS)
    joined: bool = False
    """Whether it computes the projections of a site that share x (`joined.Joined`), or one."""
    element_bytes: int
    """Of x and W in shared memory."""
    beside: int = 0
    """Bytes of a stage for each row of x, beside x and W."""
    pipe: str
    narrow: Sequence[int]
    """Columns of the tiles for M up to 64."""
    splits: Sequence[tuple[int, int]] = ()
    """The same of tiles whose K the blocks of a cluster split, and how many they are."""
    wide: Sequence[tuple[int, int, int]]
    """Columns of those for more, and the blocks of their clusters, across and down."""
    tall: Sequence[tuple[int, int, int]] = ()
    """The same of tiles that three warpgroups multiply."""

    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        """Those for M up to 64, and those for more."""
        few = [self._tile(NARROW, bn, split=split) for bn, split in self.few]
        forms = (*((WIDE, *form) for form in self.wide), *((TALL, *form) for form in self.tall))
        return few, [self._tile(*form) for form in forms]

    def whole_and_split(self) -> tuple[list[Tile], list[Tile]]:
        """All tiles: those whose K no cluster splits, and those whose K one does."""
        few, more = self.tiles()
        return [t for t in (*few, *more) if t.split == 1], [t for t in few if t.split > 1]

    @property
    def few(self) -> list[tuple[int, int]]:
        """Columns of the tiles for M up to 64, and the blocks that split their K: those of one block first."""
        return [*((bn, 1) for bn in self.narrow), *self.splits]

    def _tile(self, bm: int, bn: int, across: int = 1, down: int = 1, split: int = 1) -> Tile:
        return Tile(bm, bn, across, down, self.beside, self.exposed(bm, bn, down), split)

    def exposed(self, bm: int, bn: int, down: int) -> int:
        """Clocks of a stage of such a tile that overlap with no products."""
        return 0

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        """In the model's order."""
        return self._settings(self.tiles()[0], n, k, target)

    def _settings(self, tiles: Sequence[Tile], n: int, k: int, target: Target) -> list[Setting]:
        """Those of tiles for 64 rows of x."""
        return [setting(columns=t.bn, **splitting(t)) for t in self._ordered(tiles, NARROW, (n,), k, target)]

    def tile(self, c: Call) -> Tile:
        """The one that serves a call."""
        form = dict(chosen(self, c.n, c.k, c.context))  # for every M: one that is stale is refused
        if c.m <= NARROW:
            t = self._tile(NARROW, form["columns"], split=form.get("split", 1))
            if self.finishes(c, t):
                return t
        few, more = self.tiles()
        able = [t for t in (few if c.m <= NARROW else more) if self.finishes(c, t) and t.split == 1]
        return self._ordered(able, c.m, self.counts(c), c.k, c.context.target)[0]

    def finishes(self, c: Call, t: Tile) -> bool:
        """Whether a tile can do what a call's epilogue asks for."""
        return True

    def counts(self, c: Call) -> Sequence[int]:
        """Columns of y of each projection that the product is of."""
        return (c.n,)

    def operands(self, c: Call, t: Tile) -> tuple[Argument, ...]:
        """Kernel arguments between x and where blocks meet: of the weight, then y."""
        return (*self.weight(next(iter(c.weights.values())), t), c.y.data)

    def weight(self, w: Fields, t: Tile) -> tuple[Argument, ...]:
        """Those of one weight."""
        raise NotImplementedError

    def borders(self, c: Call, t: Tile) -> tuple[int, ...]:
        """The last kernel arguments: where projections border on each other, if there are several."""
        return ()

    def _ordered(self, tiles: Sequence[Tile], m: int, counts: Sequence[int], k: int, target: Target) -> list[Tile]:
        return ordered(tiles, m, counts, k * self.element_bytes, target, self.pipe)

    def x_map(self, c: Call, x: Tensor, t: Tile) -> TensorMap:
        """The map of x, as given or as a launch makes it, whose boxes are the rows of a tile that there are."""
        return self.rows_map(x, boxed(t.bm, t.across, c.m))

    def rows_map(self, of: Tensor, rows: int) -> TensorMap:
        """The map of x or W whose boxes are so many rows of a stage."""
        return TensorMap(of, (rows, ROW // dtype(of.dtype).bytes), swizzle=ROW)

    def _counted(self, c: Call, t: Tile) -> int:
        """Columns of y as the kernel counts them."""
        return t.begins(self.counts(c))[-1]

    def _cut(self, c: Call, t: Tile) -> bool:
        return t.cut(c.m, self._counted(c, t), c.k * self.element_bytes, c.context.target, self.pipe)

    def _grid(self, c: Call, t: Tile) -> int:
        return t.grid(c.m, self._counted(c, t), c.k * self.element_bytes, c.context.target.sms, self._cut(c, t))

    def scratch(self, c: Call) -> dict[str, Tensor]:
        """Where blocks that share a tile meet: their sums, and a flag for each warp."""
        t = self.tile(c)
        blocks = self._grid(c, t) if self._cut(c, t) else 0
        return {
            "parts": Tensor("f32", (max(blocks * t.bm * t.bn, 4),)),
            "flags": Tensor("u32", (max(blocks * t.warps, 1),)),
        }

    def to_clear(self, c: Call, t: Tile) -> tuple[Tensor, int]:
        """The flags, and how many of them a launch before the product clears: none where no tile is cut."""
        flags = c.scratch["flags"]
        return flags, flags.elements if self._cut(c, t) else 0

    def cleared(self, c: Call, t: Tile) -> list[Launch]:
        """That launch, where it does nothing else; none where there is nothing to clear."""
        flags, words = self.to_clear(c, t)
        if not words:
            return []
        grid = -(-words // CLEARED)
        return [Launch(clear_flags, grid=grid, block=CLEARED, args=(flags, words), label=f"{self.name} flags")]

    def launch(self, c: Call, t: Tile, kernel: Kernel, args: tuple[Argument, ...], tail: Any = ()) -> Launch:
        """The launch of a kernel for tiles t: `args`, where blocks meet, the sizes, `tail`."""
        cut = self._cut(c, t)
        return Launch(
            kernel,
            grid=self._grid(c, t),
            cluster=t.cluster,
            block=t.threads,
            shared=shared_of(t.stages, t.stage, t.outside),
            args=(*args, c.scratch["parts"], c.scratch["flags"], c.m, self._counted(c, t), c.k, int(cut), *tail),
            flops=2 * c.m * c.n * c.k,
            pipe=self.pipe,
            label=self.name,
        )


def addends(c: Call) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What the kernel takes of the addends of a call's epilogue: after y one, or two, of which one alone stands for
    both; last, whether there are both. Nothing where there is none."""
    given = c.epilogue.addends
    return ((given[0], given[-1]), (len(given) - 1,)) if given else ((), ())


def parts_of_y(c: Call, counts: Sequence[int]) -> list[Tensor]:
    """The columns of y of each projection, which lie side by side."""
    starts = accumulate(counts, initial=0)
    return [c.y.data.view(at, (c.m, n), (c.n, 1)) for at, n in zip(starts, counts, strict=False)]


def rows_for_tma(k: int, of: str) -> Verdict:
    """Whether rows of k elements are as far apart as the copy engine takes them."""
    step = CHUNK // dtype(of).bytes
    if k % step:
        allowed = f"{step}, {2 * step}, {3 * step}, ..."
        return no("k-multiple", f"K must be a multiple of {step} for rows that TMA loads", found=k, allowed=allowed)
    return yes()
