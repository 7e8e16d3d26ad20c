"""The arms that compute two or three projections of one x in one launch, each from its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from atlas_lab.arms.copies import repacked_nvfp4
from atlas_lab.arms.mma.base import JOINED, one_kind, under
from atlas_lab.arms.wgmma.base import OnWarpgroups, parts_of_y
from atlas_lab.arms.wgmma.bf16 import Bf16Wgmma
from atlas_lab.arms.wgmma.nvfp4 import Nvfp4Wgmma
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.arm import projections_of
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.launch import Argument
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import round_up
from atlas_lab.core.verdict import Verdict

MOST = 3  # projections of a kernel


class Joined(OnWarpgroups):
    """Those of a site that share x, of any N each and stored alike; y has their columns side by side, in their order.
    Tiles end where projections do: a tile has columns of one."""

    roles = JOINED  # type: ignore[assignment]
    joined = True
    epilogues: Sequence[str] = ()

    def declare(self, p: Projection) -> Declaration:
        """A projection's weight, under a key that ends in a space and its role."""
        raise NotImplementedError

    def eligible(self, p: Any, ctx: Context) -> Verdict:
        members = projections_of(p)
        for member in members:
            verdict = super().eligible(member, ctx)
            if not verdict:
                return verdict
        return one_kind(members)

    def finalize(self, p: Any, ctx: Context) -> list[Any]:
        return [self.declare(member) for member in projections_of(p)]

    def counts(self, c: Call) -> Sequence[int]:
        return c.counts

    def operands(self, c: Call, t: Tile) -> tuple[Argument, ...]:
        """What the kernel takes of each weight, field by field, then of each part of y; the last projection stands for
        those that there are not."""
        weights = [self.weight(w, t) for w in c.weights.values()]
        fields = [*zip(*weights, strict=True), tuple(parts_of_y(c, c.counts))]
        return tuple(a for field in fields for a in (*field, *field[-1:] * (MOST - len(field))))

    def borders(self, c: Call, t: Tile) -> tuple[int, ...]:
        """Where the second and the third projection begin among the columns that the kernel counts, past all of them
        where there is none; the columns of y; where they begin there."""
        one, two, *_ = (round_up(at, t.bn * t.across) for at in t.begins(c.counts)[1:])
        first, second, *_ = accumulate(c.counts)
        return one, two, c.n, first, second


class Bf16WgmmaJoined(Joined, Bf16Wgmma):
    """Weights BF16 `[N, K]` as stored, of two or three projections in one launch; else as `bf16_wgmma`."""

    name = "bf16_wgmma_joined"
    narrow, splits = (256, 136, 128), ()
    wide = ((256, 1, 2), (256, 1, 1), (136, 1, 1))
    tall = ()

    def declare(self, p: Projection) -> Declaration:
        return Bind(p.weight, key=f"weight {p.role}")


class Nvfp4WgmmaJoined(Joined, Nvfp4Wgmma):
    """Weights repacked at load time as nvfp4_mma_repacked reads them, of two or three projections in one launch, each
    with its own tensor scale; else as `nvfp4_wgmma`."""

    name = "nvfp4_wgmma_joined"
    first_on = ()
    narrow, splits = (128,), ()
    several = ((256, 128, 1), (128, 128, 1))

    def declare(self, p: Projection) -> Declaration:
        return under(repacked_nvfp4(p), f" {p.role}")
