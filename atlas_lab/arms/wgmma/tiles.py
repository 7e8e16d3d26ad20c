"""Which tile of y a GEMM on warpgroups uses for a shape, by a small model of the card; sums do not depend on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atlas_lab.core.chip import PULL, clock
from atlas_lab.core.target import Target
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, stages_of, threads_of
from atlas_lab.kernels.gemm.wgmma_store import OUT_COLUMNS, WARP_BYTES

NARROW, WIDE = GROUP_ROWS, 2 * GROUP_ROWS  # rows of a tile, for M up to 64 and above
L2_BYTES = 40  # a clock that an SM gets from L2 while all ask
GROUP = 16  # SMs of a GPC that clusters of four can use
FIXED = 2000  # clocks of a tile's first load and of its stores
STEP = 80  # clocks of a stage in which its products wait, for mbarriers and for each other
SHARED_BYTES = 128  # a clock that the matrix units get from shared memory


@dataclass(frozen=True)
class Tile:
    """bm x bn outputs of a block, whose loads of x `cluster` blocks share, with `beside` bytes of a stage for each row
    of x beside x and W. `mapped`: stored by the copy engine, which needs N in multiples of 8."""

    bm: int
    bn: int
    cluster: int = 1
    beside: int = 0

    @property
    def mapped(self) -> bool:
        return self.bn % OUT_COLUMNS == 0

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return (self.bm + self.bn) * ROW + self.bm * self.beside

    @property
    def outside(self) -> int:
        """Bytes of shared memory that stores go through."""
        return self.bm // 16 * WARP_BYTES if self.mapped else 0

    @property
    def stages(self) -> int:
        return stages_of(self.stage, self.outside)

    @property
    def threads(self) -> int:
        return threads_of(self.bm, self.cluster)

    def blocks(self, m: int, n: int) -> int:
        """Tiles of y, those of clusters that have blocks to spare too."""
        return -(-m // self.bm) * -(-n // (self.bn * self.cluster)) * self.cluster

    def grid(self, m: int, n: int, sms: int) -> int:
        """Blocks of a launch: no more than run at once."""
        return min(self.blocks(m, n), self.at_once(sms))

    def at_once(self, sms: int) -> int:
        """Blocks that a card runs at once; 0 where not one cluster fits. SMs come in groups of 16 or 18, in which
        clusters of four leave two idle."""
        whole = sms // GROUP * GROUP if self.cluster > 2 and sms >= GROUP else sms
        return whole // self.cluster * self.cluster

    def clocks(self, m: int, n: int, k_bytes: int, target: Target, pipe: str) -> tuple[float, float]:
        """Predicted clocks of a launch over rows of `k_bytes` of x and W, not below those of reading W; and those of
        the busiest SM alone."""
        hertz = clock(target)
        share = target.read_rate.value / (target.sms * hertz)
        element_rate = target.math[pipe].value / (2 * target.sms * hertz)
        per_row = ROW if pipe == "mma_e4m3" else ROW // 2
        step = STEP + max(
            self.bm * self.bn * per_row / element_rate,
            self.bm // GROUP_ROWS * (GROUP_ROWS + self.bn) * ROW / SHARED_BYTES,
            (self.bm / self.cluster + self.bn) * ROW / L2_BYTES,
            self.bn * ROW / (PULL * share) if m <= self.bm else 0.0,
        )
        busy = -(-self.blocks(m, n) // self.at_once(target.sms)) * (-(-k_bytes // ROW) * step + FIXED)
        return max(busy, n * k_bytes / (target.sms * share)), busy


def ordered(tiles: Iterable[Tile], m: int, n: int, k_bytes: int, target: Target, pipe: str) -> list[Tile]:
    """Tiles that may store y of n columns and whose clusters fit, the fastest by the model first; equal ones as they
    came; none where the target has no such pipe."""
    if pipe not in target.math:
        return []
    fit = [t for t in tiles if (not t.mapped or n % 8 == 0) and t.at_once(target.sms)]
    return sorted(fit, key=lambda t: t.clocks(m, n, k_bytes, target, pipe))
