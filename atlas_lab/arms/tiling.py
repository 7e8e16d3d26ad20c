"""Which tile a GEMM arm uses for a shape: the smallest row tile that covers M, columns so that the card is filled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Outputs a block computes (bm x bn), how its warps divide them, stages of K in flight, blocks an SM."""

    bm: int
    bn: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def count(self, m: int, n: int) -> int:
        """Blocks of a launch."""
        return -(-m // self.bm) * -(-n // self.bn)

    @property
    def parameters(self) -> dict[str, int]:
        return {
            "bm": self.bm,
            "bn": self.bn,
            "warps_m": self.warps_m,
            "warps_n": self.warps_n,
            "stages": self.stages,
            "blocks": self.blocks,
        }


LARGE = Tile(128, 128, 2, 4, 4)
# Two blocks an SM of four warps: needs registers that only plain BF16 weights leave.
LARGE_PLAIN = Tile(128, 128, 2, 2, 3, blocks=2)
MIDDLE = Tile(64, 64, 2, 2, 4)
SMALL = Tile(16, 64, 1, 4, 5)
TILES = (LARGE, MIDDLE, SMALL)
TILES_PLAIN = (LARGE_PLAIN, MIDDLE, SMALL)
# For shapes whose rows are not multiples of a 16-byte load.
RAGGED = Tile(32, 32, 2, 1, 3)


def tile_for(m: int, n: int, sms: int, large: Tile = LARGE) -> Tile:
    """The tile for m rows and n columns on a card of `sms` multiprocessors: the smallest that covers m, or `large`
    where it still gives every multiprocessor a block."""
    if m <= SMALL.bm:
        return SMALL
    if m <= MIDDLE.bm or large.count(m, n) < sms:
        return MIDDLE
    return large
