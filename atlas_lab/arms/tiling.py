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


LARGE = Tile(128, 128, 2, 4, 3, blocks=2)
MIDDLE = Tile(64, 128, 2, 2, 4)
MIDDLE_NARROW = Tile(64, 32, 2, 1, 4)
SMALL = Tile(16, 128, 1, 4, 4)
SMALL_NARROW = Tile(16, 32, 1, 2, 4)
TILES = (LARGE, MIDDLE, MIDDLE_NARROW, SMALL, SMALL_NARROW)
# Shapes whose rows are not multiples of a 16-byte load take one of these two.
RAGGED_TILES = (MIDDLE_NARROW, SMALL_NARROW)


def tile_for(m: int, n: int, sms: int, *, ragged: bool = False) -> Tile:
    """The tile for m rows and n columns on a card of `sms` multiprocessors."""
    if ragged:
        return SMALL_NARROW if m <= 16 else MIDDLE_NARROW
    if m <= 16:
        wide, narrow = SMALL, SMALL_NARROW
    elif m <= 64:
        wide, narrow = MIDDLE, MIDDLE_NARROW
    else:
        wide, narrow = LARGE, MIDDLE
        if narrow.count(m, n) < sms:
            narrow = MIDDLE_NARROW
    return wide if wide.count(m, n) >= sms else narrow
