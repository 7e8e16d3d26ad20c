"""The settings of arms of class T, and what of one serves a call."""

from __future__ import annotations

from typing import NamedTuple

from atlas_lab.core.tuning import Setting, setting

NARROW = 8  # rows of x that one product has columns for


class Form(NamedTuple):
    """A setting: warps a tile, units in flight, and units in flight and row tiles where x has more than 8 rows; over
    how many blocks of a cluster the warps are spread, for up to 8 rows and for more; of how many units a warp keeps x
    in registers, likewise. Where it does, K is so many units for each warp. `abreast`: how many row tiles a block has
    at once, each of so many warps, whose units go straight into registers; 0: they go through a ring.

    Bits depend on the warps alone. As a `Setting`, whatever is as usual in the last five is left out.
    """

    warps: int
    depth: int
    wide_depth: int
    wide_tiles: int
    cluster: int = 1
    wide_cluster: int = 1
    kept: int = 0
    wide_kept: int = 0
    abreast: int = 0

    @property
    def clustered(self) -> bool:
        return max(self.cluster, self.wide_cluster) > 1

    @property
    def units(self) -> int:
        """Of K, where warps keep x; 0: any number."""
        return self.warps * max(self.kept, self.wide_kept)

    @property
    def alone(self) -> bool:
        """Whether an SM has one block of it or of its cluster: the model does not know what that costs."""
        return self.clustered or self.units > 0 or self.abreast > 0

    @property
    def setting(self) -> Setting:
        usual = self._field_defaults
        return setting(**{name: value for name, value in self._asdict().items() if usual.get(name) != value})


class Launched(NamedTuple):
    """What of a form serves a call: `warps` over the blocks of a `cluster`. `turns`: whether blocks take more row tiles
    than they have abreast, one after the other."""

    warps: int
    depth: int
    tiles: int
    columns: int
    cluster: int
    kept: int = 0
    abreast: int = 0
    turns: bool = True

    @property
    def own(self) -> int:
        """Warps of a block."""
        return self.warps * max(self.abreast, 1) // self.cluster

    @property
    def fills(self) -> bool:
        """Whether an SM has one block, which takes row tiles in turn."""
        return self.kept > 0 or self.abreast > 0
