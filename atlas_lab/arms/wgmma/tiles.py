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
FIXED = 2000  # clocks of a tile's first load and of its stores


@dataclass(frozen=True)
class Tile:
    """bm x bn outputs of a block, with `beside` bytes of a stage for each row of x beside x and W. `mapped`: stored by
    the copy engine, which needs N in multiples of 8."""

    bm: int
    bn: int
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
        return threads_of(self.bm)

    def count(self, m: int, n: int) -> int:
        return -(-m // self.bm) * -(-n // self.bn)

    def clocks(self, m: int, n: int, k_bytes: int, target: Target, pipe: str) -> tuple[float, float]:
        """Predicted clocks of a launch over rows of `k_bytes` of x and W, not below those of reading W; and those of
        the busiest SM alone."""
        hertz = clock(target)
        share = target.read_rate.value / (target.sms * hertz)
        element_rate = target.math[pipe].value / (2 * target.sms * hertz)
        per_row = ROW if pipe == "mma_e4m3" else ROW // 2
        step = max(
            self.bm * self.bn * per_row / element_rate,
            (self.bm + self.bn) * ROW / L2_BYTES,
            self.bn * ROW / (PULL * share) if m <= self.bm else 0.0,
        )
        busy = -(-self.count(m, n) // target.sms) * (-(-k_bytes // ROW) * step + FIXED)
        return max(busy, n * k_bytes / (target.sms * share)), busy


def ordered(tiles: Iterable[Tile], m: int, n: int, k_bytes: int, target: Target, pipe: str) -> list[Tile]:
    """Tiles that may store y of n columns, the fastest by the model first; equal ones as they came."""
    fit = [t for t in tiles if not t.mapped or n % 8 == 0]
    return sorted(fit, key=lambda t: t.clocks(m, n, k_bytes, target, pipe))
