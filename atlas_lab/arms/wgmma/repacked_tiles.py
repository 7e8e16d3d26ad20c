"""Which tile of y the GEMM over repacked NVFP4 weights uses for a shape, by the same model of the card as `tiles`."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.arms.wgmma.tiles import FIXED, L2_BYTES, SHARED_BYTES, STEP, Tile
from atlas_lab.core.chip import PULL, QUARTERS, SHARED_RESERVED, clock
from atlas_lab.core.target import Target
from atlas_lab.kernels.gemm.wgmma_nvfp4 import stage_bytes, turn_bytes
from atlas_lab.kernels.gemm.wgmma_ring import BARS, GROUP_ROWS, MOST_STAGES, SHARED_LIMIT, threads_of
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT

SHARED_OF_SM = SHARED_LIMIT + SHARED_RESERVED  # bytes
ISSUED = 250  # instructions that a warp makes a stage's weights of and multiplies them by
PRODUCT = 8  # clocks of a product that do not grow with the rows of x: reading operand A
ALONE = 450  # clocks of a stage whose warps find nothing else to wait beside


def per_sm(bm: int, bn: int) -> int:
    """Blocks that share an SM: those of one warpgroup that multiplies do."""
    return 1 if bn > GROUP_ROWS else 3 if bm <= 32 else 2


@dataclass(frozen=True)
class RepackedTile(Tile):
    """bm rows of x by bn rows of W."""

    @property
    def mapped(self) -> bool:
        return False

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)

    @property
    def outside(self) -> int:
        return turn_bytes(self.bn)

    @property
    def stages(self) -> int:
        room = min(SHARED_LIMIT, SHARED_OF_SM // per_sm(self.bm, self.bn) - SHARED_RESERVED)
        return min(MOST_STAGES, (room - self.outside) // (self.stage + BARS))

    @property
    def threads(self) -> int:
        return threads_of(self.bn, self.cluster)

    def at_once(self, sms: int) -> int:
        return super().at_once(sms) * per_sm(self.bm, self.bn)

    def clocks(self, m: int, n: int, k_bytes: int, target: Target, pipe: str) -> tuple[float, float]:
        """As of `Tile`, over rows of `k_bytes` of x."""
        hertz = clock(target)
        share = target.read_rate.value / (target.sms * hertz)
        element_rate = target.math[pipe].value / (2 * target.sms * hertz)
        x, w, groups = self.bm * SPAN * 2, self.bn // 16 * UNIT, self.bn // GROUP_ROWS
        blocks = self.blocks(m, n)
        # blocks that share an SM take turns
        beside = min(per_sm(self.bm, self.bn), -(-blocks // super().at_once(target.sms)))
        step = max(
            ALONE,
            beside * (STEP + SPAN // 16 * groups * PRODUCT + self.bm * self.bn * SPAN / element_rate),
            beside * groups * 4 * ISSUED / QUARTERS,
            beside * groups * (x + 2 * w) / SHARED_BYTES,
            beside * (x / self.cluster + w) / L2_BYTES,
            beside * w / (PULL * share) if m <= self.bm else 0.0,
        )
        busy = -(-blocks // self.at_once(target.sms)) * (k_bytes // (2 * SPAN) * step + FIXED)
        return max(busy, n * (k_bytes // 2) * UNIT / (16 * SPAN) / (target.sms * share)), busy
