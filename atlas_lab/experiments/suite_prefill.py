"""The suite `prefill`: 17 rows and more on warpgroups, one large shape at many row counts, five more where they must
reach something."""

from __future__ import annotations

from atlas_lab.experiments import peer_humming, peer_scaled
from atlas_lab.experiments.bench_case import BenchCase, Case
from atlas_lab.experiments.shapes import shapes

WIDE = (17408, 5120)  # gate and up of a 27B model
OTHERS = ((5120, 17408), (16384, 5120), (5120, 6144), (14336, 4096), (8192, 8192))
ROWS = (17, 32, 64, 128, 192, 256, 512, 1024, 4096, 16384)
LEAST = 0.93  # of what all shapes must reach in the mean, that each must
# By arm: the format it starts from, and what one would use instead.
ARMS = {
    "bf16_wgmma": ("bf16", "torch.mm"),
    "fp8_wgmma": ("fp8", peer_humming.NAME),
    "fp8_wgmma_w8a8": ("fp8", peer_scaled.NAME),
    "nvfp4_wgmma": ("nvfp4", peer_humming.NAME),
    "nvfp4_wgmma_fp8": ("nvfp4", peer_humming.NAME),
    "q2_dequant": ("q2_0_g128", "torch.mm"),
    "q2_mmq": ("q2_0_g128", "torch.mm"),
    "q4k_mmq": ("q4_k", "torch.mm"),
    "nvfp4_w4a4_emulated": ("nvfp4", peer_humming.NAME),  # whose activations stay BF16
    "nvfp4_mmq": ("nvfp4", peer_humming.NAME),
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
            of_peer=round(LEAST * OF_PEER.get((arm, m), 0.0), 4),
            of_peers=OF_PEER.get((arm, m), 0.0) if shape == WIDE else 0.0,
            used=used.get(shape, ()),
        )
        for arm, (format, peer) in ARMS.items()
        for shape in (WIDE, *OTHERS)
        for m in ROWS
        if shape == WIDE or (arm, m) in OF_PEER
    ]
    unquantized = [
        BenchCase(
            *(arm, ARMS[arm][0], *shape, m, "torch.mm"),
            of_peer=round(LEAST * least, 4),
            of_peers=least if shape == WIDE else 0.0,
            used=used.get(shape, ()),
            again=True,
        )
        for (arm, m), least in UNQUANTIZED.items()
        for shape in (WIDE, *OTHERS)
        if shape == WIDE or least
    ]
    return (*alone, *unquantized)
