"""The suite `rows`: one large weight in three formats at every kind of row count, from the last that decode arms serve
to long prompts, so that time can be seen against rows: no step where one more row costs much."""

from __future__ import annotations

from atlas_lab.experiments import peer_humming, peer_scaled
from atlas_lab.experiments.bench_case import BenchCase, Case
from atlas_lab.experiments.shapes import shapes

SUITE = "rows"
SHAPE = (17408, 5120)  # gate and up of a 27B model
ROWS = (
    *(16, 17, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384),
    *(512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
)
FEW = 16  # rows that decode arms serve
# By format: the arms of few rows and of more, and what one would use instead.
LINES = {
    "bf16": ("bf16_mma", "bf16_wgmma", "torch.mm"),
    "fp8": ("fp8_mma", "fp8_wgmma_w8a8", peer_scaled.NAME),
    "nvfp4": ("nvfp4_mma_repacked", "nvfp4_wgmma", peer_humming.NAME),
}
OF_MORE_ROWS = 0.95  # no row count takes more than 5 % longer than a larger one


def rows() -> tuple[Case, ...]:
    """The cases, those of one arm after each other."""
    used = shapes()[SHAPE]
    return tuple(
        BenchCase(
            *(few if m <= FEW else many, format, *SHAPE, m, peer),
            of_more_rows=OF_MORE_ROWS,
            used=used,
        )
        for format, (few, many, peer) in LINES.items()
        for m in ROWS
    )
