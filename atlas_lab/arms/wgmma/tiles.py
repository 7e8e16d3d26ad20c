"""Which tile of y a GEMM on warpgroups uses for a shape, by a small model of the card; sums do not depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from atlas_lab.core.chip import PULL, clock
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import round_up
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, stages_of, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_split import mail_bytes
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES

NARROW, WIDE, TALL = GROUP_ROWS, 2 * GROUP_ROWS, 3 * GROUP_ROWS  # rows of a tile: for M up to 64, and above
L2_BYTES = 56  # a clock that an SM gets from L2 while all ask
GROUP = 16  # SMs of a GPC that clusters of four can use
FIXED = 2000  # clocks of a tile's first load and of its stores
MEETING = 3500  # clocks of clearing flags in a launch before, or of waiting for a part that a block adds
MAILING = 1500  # clocks in which sums come from another block of a cluster
LEAST = 8  # stages of a share of tiles that are cut
ALIKE = 0.9  # of the blocks of a launch, if each tile has as many of them: no block then has shares of two tiles
STEP = 80  # clocks of a stage in which its products wait, for mbarriers and for each other
SHARED_BYTES = 128  # a clock that the matrix units get from shared memory


@dataclass(frozen=True)
class Tile:
    """bm x bn outputs of a block. A cluster takes neighbours, `across` in a row, which share their loads of x, and
    `down` in a column, which share those of W; or its blocks `split` the K of one tile. `beside` bytes of a stage for
    each row of x beside x and W, and `exposed` clocks of a stage that overlap with no products."""

    bm: int
    bn: int
    across: int = 1
    down: int = 1
    beside: int = 0
    exposed: int = 0
    split: int = 1

    @property
    def meeting(self) -> tuple[int, int]:
        """Clocks of clearing flags in a launch before, and of waiting for each part that a block adds."""
        return MEETING, MEETING

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.across * self.down * self.split

    @property
    def sums(self) -> int:
        """Accumulators of a thread that multiplies."""
        return self.bm * self.bn // (32 * self.warps)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return (self.bm + self.bn) * ROW + self.bm * self.beside

    @property
    def outside(self) -> int:
        """Bytes of shared memory that stores and sums of other blocks go through."""
        return self.bm // 16 * WARP_BYTES + self.mail

    @property
    def mail(self) -> int:
        """Those of other blocks' sums."""
        return mail_bytes(self.warps, self.sums, self.split)

    @property
    def stages(self) -> int:
        return stages_of(self.stage, self.outside)

    @property
    def dealt(self) -> int:
        """Rows, or columns, of the tile of which each warpgroup has GROUP_ROWS."""
        return self.bm

    @property
    def threads(self) -> int:
        return threads_of(self.dealt)

    @property
    def warps(self) -> int:
        """Those that multiply."""
        return warps_of(self.dealt)

    def steps(self, k_bytes: int) -> int:
        """Stages of a tile, for rows of `k_bytes` of x."""
        return -(-k_bytes // ROW)

    def begins(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Where projections of so many columns begin and the last ends, if each begins at a tile of its own."""
        wide = self.bn * self.across
        return tuple(accumulate((*(round_up(n, wide) for n in counts[:-1]), counts[-1]), initial=0))

    def blocks(self, m: int, n: int) -> int:
        """Tiles of y, those of clusters that have blocks to spare too."""
        return self.rows(m) * -(-n // (self.bn * self.across)) * self.cluster

    def rows(self, m: int) -> int:
        """Rows of tiles, or of clusters that have several."""
        return -(-m // (self.bm * self.down))

    def grid(self, m: int, n: int, k_bytes: int, sms: int, cut: bool) -> int:
        """Blocks of a launch: no more than run at once; where tiles are cut, whole groups of one for each row of tiles,
        which have LEAST stages each, and as many of them to every tile where that leaves few SMs idle."""
        if not cut:
            return min(self.blocks(m, n), self.at_once(sms))
        group = self.rows(m) * self.cluster
        tiles = self.blocks(m, n) // group
        groups = min(max(tiles * self.steps(k_bytes) // LEAST, 1), self.at_once(sms) // group)
        alike = groups // tiles * tiles
        return (alike if alike >= ALIKE * groups else groups) * group

    def at_once(self, sms: int) -> int:
        """Blocks that a card runs at once; 0 where not one cluster fits. SMs come in groups of 16 or 18, in which
        clusters of four leave two idle."""
        if self.cluster > 2 and sms >= GROUP:
            return sms // GROUP * (GROUP // self.cluster * self.cluster)
        return sms // self.cluster * self.cluster

    def fits(self, m: int, n: int, k_bytes: int, sms: int) -> bool:
        """Whether a card runs it: a cluster at all, or where one splits K all of them at once, a step a block."""
        if self.split == 1:
            return self.at_once(sms) > 0
        return self.blocks(m, n) <= self.at_once(sms) and self.steps(k_bytes) >= self.split

    def step_clocks(self, m: int, blocks: int, target: Target, pipe: str) -> float:
        """Predicted clocks of a stage, with so many blocks."""
        per_row = ROW if pipe == "mma_e4m3" else ROW // 2
        return (
            STEP
            + self.exposed
            + max(
                self.bm * self.bn * per_row / element_rate(target, pipe),
                self.bm // GROUP_ROWS * (GROUP_ROWS + self.bn) * ROW / SHARED_BYTES,
                (self.bm / self.across + self.bn / self.down) * ROW / L2_BYTES,
                self.bn * ROW / (PULL * read_share(target)) if m <= self.bm else 0.0,
            )
        )

    def read_clocks(self, n: int, k_bytes: int, target: Target) -> float:
        """Clocks of reading W."""
        return n * k_bytes / (target.sms * read_share(target))

    def busiest(self, m: int, n: int, k_bytes: int, target: Target, pipe: str, cut: bool) -> float:
        """Predicted clocks of the busiest SM, whose tiles are whole or cut into equal shares."""
        tiles, steps, grid = self.blocks(m, n), self.steps(k_bytes), self.grid(m, n, k_bytes, target.sms, cut)
        step, turns = self.step_clocks(m, grid, target, pipe), -(-tiles // self.at_once(target.sms))
        if not cut:
            mailing = MAILING + (self.split - 1) * 4 * self.bm * self.bn / L2_BYTES if self.split > 1 else 0
            return turns * (-(-steps // self.split) * step + FIXED + mailing)
        cleared, each = self.meeting
        meeting = cleared + each * -(-grid // tiles) + 8 * self.bm * self.bn / L2_BYTES
        return -(-tiles * steps // grid) * step + turns * FIXED + meeting

    def cut(self, m: int, n: int, k_bytes: int, target: Target, pipe: str) -> bool:
        """Whether tiles that would leave SMs idle are better cut, of which a row of tiles takes at most every other."""
        if self.split > 1 or 2 * self.rows(m) * self.cluster > self.at_once(target.sms):
            return False
        whole, shared = (self.busiest(m, n, k_bytes, target, pipe, cut) for cut in (False, True))
        return shared < whole

    def clocks(self, m: int, n: int, k_bytes: int, target: Target, pipe: str) -> tuple[float, float]:
        """Predicted clocks of a launch over rows of `k_bytes` of x and W, not below those of reading W; and those of
        the busiest SM alone."""
        busy = self.busiest(m, n, k_bytes, target, pipe, self.cut(m, n, k_bytes, target, pipe))
        return max(busy, self.read_clocks(n, k_bytes, target)), busy


def tightness(t: Tile) -> tuple[int, int]:
    """Sorts tiles by the registers that their threads have left, the fewest first."""
    return -t.sums, -t.bm


def splitting(t: Tile) -> dict[str, int]:
    """The compile-time parameter of kernels whose blocks split K; none of others."""
    return {"split": t.split} if t.split > 1 else {}


def read_share(target: Target) -> float:
    """Bytes of device memory a clock that an SM gets while all read."""
    return target.read_rate.value / (target.sms * clock(target))


def element_rate(target: Target, pipe: str) -> float:
    """Multiply-adds a clock of an SM."""
    return target.math[pipe].value / (2 * target.sms * clock(target))


def ordered(
    tiles: Iterable[Tile], m: int, counts: Sequence[int], k_bytes: int, target: Target, pipe: str
) -> list[Tile]:
    """Tiles whose clusters fit, for projections of `counts` columns, the fastest by the model first; equal ones as they
    came; none where the target has no such pipe."""
    if pipe not in target.math:
        return []
    fit = [t for t in tiles if t.fits(m, t.begins(counts)[-1], k_bytes, target.sms)]
    return sorted(fit, key=lambda t: t.clocks(m, t.begins(counts)[-1], k_bytes, target, pipe))
