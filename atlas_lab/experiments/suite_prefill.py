"""The suite `prefill`: 17 rows and more on warpgroups, one large shape at many row counts, its transpose at few."""

from __future__ import annotations

from atlas_lab.experiments import peer_humming, peer_scaled
from atlas_lab.experiments.bench_case import BenchCase, Case
from atlas_lab.experiments.shapes import shapes

WIDE, TALL = (17408, 5120), (5120, 17408)  # gate and up of a 27B model, and its down
ROWS = {WIDE: (17, 32, 64, 128, 192, 256, 512, 1024, 4096), TALL: (64, 512, 4096)}
# By arm: the format it starts from, and what one would use instead.
ARMS = {
    "bf16_wgmma": ("bf16", "torch.mm"),
    "fp8_wgmma": ("fp8", peer_humming.NAME),
    "fp8_wgmma_w8a8": ("fp8", peer_scaled.NAME),
    "nvfp4_wgmma": ("nvfp4", peer_humming.NAME),
    "int8_wgmma": ("nvfp4", peer_humming.NAME),
}
OF_PEER = {
    ("bf16_wgmma", 64): 1.0,
    ("bf16_wgmma", 4096): 0.98,
    ("fp8_wgmma_w8a8", 64): 1.4,
    ("fp8_wgmma_w8a8", 4096): 1.0,
    ("nvfp4_wgmma", 64): 1.2,
    ("nvfp4_wgmma", 128): 1.1,
    ("nvfp4_wgmma", 512): 1.0,
    ("nvfp4_wgmma", 4096): 1.07,
    ("int8_wgmma", 4096): 0.77,
}


# What is compared with cuBLAS over the unquantized weights too, and the least of its speed.
UNQUANTIZED = {
    ("nvfp4_wgmma", 64): 0.0,
    ("nvfp4_wgmma", 128): 0.0,
    ("nvfp4_wgmma", 512): 0.0,
    ("nvfp4_wgmma", 4096): 0.97,
}


def prefill() -> tuple[Case, ...]:
    """The cases, those of one weight after each other."""
    used = shapes()
    alone = [
        BenchCase(
            *(arm, format, *shape, m, peer),
            of_peer=OF_PEER.get((arm, m), 0.0) if shape == WIDE else 0.0,
            used=used[shape],
        )
        for arm, (format, peer) in ARMS.items()
        for shape, rows in ROWS.items()
        for m in rows
    ]
    unquantized = [
        BenchCase(arm, ARMS[arm][0], *WIDE, m, "torch.mm", of_peer=least, used=used[WIDE], again=True)
        for (arm, m), least in UNQUANTIZED.items()
    ]
    return (*alone, *unquantized)
