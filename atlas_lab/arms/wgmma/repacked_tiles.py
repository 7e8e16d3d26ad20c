"""Which tile of y the GEMM over repacked NVFP4 weights uses for a shape, by the same model of the card as `tiles`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atlas_lab.arms.wgmma.tiles import L2_BYTES, SHARED_BYTES, STEP, Tile, element_rate, read_share
from atlas_lab.core.chip import PULL, QUARTERS, SHARED_RESERVED
from atlas_lab.core.target import Target
from atlas_lab.kernels.gemm.wgmma_nvfp4 import stage_bytes
from atlas_lab.kernels.gemm.wgmma_ring import BARS, GROUP_ROWS, MOST_STAGES, SHARED_LIMIT
from atlas_lab.kernels.gemm.wgmma_transposed import turn_bytes
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT

SHARED_OF_SM = SHARED_LIMIT + SHARED_RESERVED  # bytes
ISSUED = 170  # instructions of a warp for a stage
PRODUCT = 14  # clocks of a product that do not grow with the rows of x: reading operand A
POWER = 0.1  # of the clocks of what comes from L2 beside products: both draw power
FEW_ROWS = 64  # of x, for which a tile may have fewer stages in flight than fit
FEW_MEETING = 4000, 1250  # `meeting` of so few
ALONE = 700  # clocks of a stage of SPAN whose warps find nothing else to wait beside


def per_sm(bm: int, bn: int) -> int:
    """Blocks that share an SM: those of one warpgroup that multiplies do."""
    return 1 if bn > GROUP_ROWS else 3 if bm <= 32 else 2


@dataclass(frozen=True)
class RepackedTile(Tile):
    """bm rows of x by bn rows of W."""

    span: ClassVar[int] = SPAN
    """K of a stage."""
    x_row: ClassVar[int] = 2 * SPAN
    """Bytes of a stage of a row of x; 32 of them are a product's."""
    of_few: ClassVar[int] = MOST_STAGES
    """Stages in flight at most, for few rows of x."""

    @property
    def w_bytes(self) -> int:
        """Of a stage."""
        return self.bn // 16 * UNIT

    @property
    def issued(self) -> int:
        """Instructions that a warp makes a stage's weights of and multiplies them by."""
        return ISSUED

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)

    @property
    def outside(self) -> int:
        return turn_bytes(self.bn) + self.mail

    @property
    def stages(self) -> int:
        room = min(SHARED_LIMIT, SHARED_OF_SM // per_sm(self.bm, self.bn) - SHARED_RESERVED)
        most = MOST_STAGES if self.bm > FEW_ROWS else self.of_few
        return min(most, (room - self.outside) // (self.stage + BARS))

    @property
    def meeting(self) -> tuple[int, int]:
        return FEW_MEETING if self.bm <= FEW_ROWS else super().meeting

    @property
    def dealt(self) -> int:
        return self.bn

    def steps(self, k_bytes: int) -> int:
        return -(-k_bytes // self.x_row)

    def at_once(self, sms: int) -> int:
        return super().at_once(sms) * per_sm(self.bm, self.bn)

    def step_clocks(self, m: int, blocks: int, target: Target, pipe: str) -> float:
        x, w, groups = self.bm * self.x_row, self.w_bytes, self.bn // GROUP_ROWS
        # blocks that share an SM take turns
        beside = min(per_sm(self.bm, self.bn), -(-blocks // super().at_once(target.sms)))
        products = self.bm * self.bn * self.span / element_rate(target, pipe)
        return max(
            ALONE * self.span / SPAN,
            beside * (STEP + self.x_row // 32 * groups * PRODUCT + products + POWER * (x / self.across + w) / L2_BYTES),
            beside * groups * 4 * self.issued / QUARTERS,
            beside * groups * (x + 2 * w) / SHARED_BYTES,
            beside * (x / self.across + w) / L2_BYTES,
            beside * w / (PULL * read_share(target)) if m <= self.bm else 0.0,
        )

    def read_clocks(self, n: int, k_bytes: int, target: Target) -> float:
        return n * self.steps(k_bytes) * self.w_bytes / self.bn / (target.sms * read_share(target))


@dataclass(frozen=True)
class Nvfp4Tile(RepackedTile):
    """That of weights made BF16, which few rows of x are multiplied fastest by with few stages in flight."""

    of_few: ClassVar[int] = 4
