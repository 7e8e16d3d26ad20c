"""Which tile of y the GEMMs over int8 under a scale for 32 use for a shape, by the same model as `tiles`."""

from __future__ import annotations

from dataclasses import dataclass

from atlas_lab.arms.wgmma.repacked_tiles import PRODUCT
from atlas_lab.arms.wgmma.tiles import L2_BYTES, SHARED_BYTES, STEP, Tile, element_rate, read_share
from atlas_lab.core.chip import PULL, QUARTERS
from atlas_lab.core.target import Target
from atlas_lab.kernels.gemm.wgmma_int8 import BESIDE, BK
from atlas_lab.kernels.gemm.wgmma_int8_f16 import stage_bytes
from atlas_lab.kernels.gemm.wgmma_int8_scale import GROUPS
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES
from atlas_lab.kernels.gemm.wgmma_transposed import turn_bytes

ISSUED = 60, 3.6  # instructions of a warp for a stage, and for each of its sums, of a thread
FLOATS = 16, 2  # scales that a thread loads for 64 columns, and for 64 rows
MAKING = 60, 121  # instructions of a warp for a stage, and for each 64 rows of W, beside those of sums in F16 products
LOADED = 4 * 128  # bytes of shared memory's time for a scale that each thread of a warpgroup loads


@dataclass(frozen=True)
class Int8Tile(Tile):
    """64 x bn outputs of a block, a warpgroup for every 64 columns; `sub`: sums of a stage of their own."""

    sub: bool = False

    @property
    def stage(self) -> int:
        return (self.bm + self.bn) * (ROW + BESIDE)

    @property
    def outside(self) -> int:
        return self.warps * WARP_BYTES

    @property
    def threads(self) -> int:
        return threads_of(self.bn)

    @property
    def warps(self) -> int:
        return warps_of(self.bn)

    def step_clocks(self, m: int, blocks: int, target: Target, pipe: str) -> float:
        groups, sums = self.bn // GROUP_ROWS, GROUPS * self.bm // 2
        scales = GROUPS * (FLOATS[0] + FLOATS[1] * self.bm // GROUP_ROWS) * 4 * 128 * groups
        operands = groups * self.bm // GROUP_ROWS * 2 * GROUP_ROWS * ROW
        bytes_in = (self.bm + self.bn) * (ROW + BESIDE)
        return STEP + max(
            self.bm * self.bn * BK / element_rate(target, pipe),
            4 * groups * (ISSUED[0] + ISSUED[1] * sums) / QUARTERS,
            (scales + operands + bytes_in) / SHARED_BYTES,
            bytes_in / L2_BYTES,
            self.bn * (ROW + BESIDE) / (PULL * read_share(target)) if m <= self.bm else 0.0,
        )

    def read_clocks(self, n: int, k_bytes: int, target: Target) -> float:
        return super().read_clocks(n, k_bytes, target) * (ROW + BESIDE) / ROW


@dataclass(frozen=True)
class FloatsTile(Int8Tile):
    """bm rows of x by bn of W, whose products are of integers in F16; a warpgroup has `each` times 64 rows of W."""

    each: int = 1

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)

    @property
    def outside(self) -> int:
        return turn_bytes(self.bn // self.each)

    @property
    def threads(self) -> int:
        return threads_of(self.bn // self.each)

    @property
    def warps(self) -> int:
        return warps_of(self.bn // self.each)

    @property
    def issued(self) -> int:
        """Instructions of a warp for a stage: two for each sum, a load for four of x's scales."""
        return MAKING[0] + self.each * (MAKING[1] + GROUPS * self.bm) + GROUPS * self.bm // 16

    def step_clocks(self, m: int, blocks: int, target: Target, pipe: str) -> float:
        blocks_of_w, w_in = self.bn // GROUP_ROWS, self.bn * (ROW + BESIDE)
        bytes_in = 2 * self.bm * ROW + self.bm * BESIDE + w_in
        scales = GROUPS * (self.bm // 4 + 2 * self.each) * LOADED * blocks_of_w // self.each
        return STEP + max(
            self.bm * self.bn * BK / element_rate(target, pipe) + BK // 16 * blocks_of_w * PRODUCT,
            self.warps * self.issued / QUARTERS,
            (blocks_of_w * 2 * self.bm * ROW + self.bn * ROW + scales + bytes_in) / SHARED_BYTES,
            bytes_in / L2_BYTES,
            w_in / (PULL * read_share(target)) if m <= self.bm else 0.0,
        )
