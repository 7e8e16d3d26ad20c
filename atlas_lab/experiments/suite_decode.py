"""The suite `decode`: 1 to 16 rows, every format at one large shape, three formats at every shape of some models, and a
whole feed-forward block."""

from __future__ import annotations

from atlas_lab.core.levers import CHOICES
from atlas_lab.experiments.bench_case import BenchCase, Case, FfnCase
from atlas_lab.experiments.bench_results import FLOORS
from atlas_lab.experiments.shapes import shapes

SHAPE = (17408, 5120)  # gate and up of a 27B model
HUMMING = "humming"
NVFP4, JOINED = "nvfp4_mma_repacked", "nvfp4_mma_repacked_joined"
Q4_K = "q4k_mma_repacked"
OF_ONE_ROW = 0.8  # at M=16: 1.25 times as long at most

# By format: its arms on tensor cores at one shape, by rows; and on CUDA cores.
TENSOR_CORES: dict[str, dict[str, tuple[int, ...]]] = {
    "bf16": {"bf16_mma": (1, 8, 16)},
    "fp8": {"fp8_mma": (1, 8, 16)},
    "nvfp4": {NVFP4: (1, 2, 3, 4, 5, 8, 16), "nvfp4_mma": (1, 16), "int8_mma": (1, 16)},
    "q4_k": {Q4_K: (1, 2, 4, 8, 16), "q4k_mma": (1, 16)},
    "q2_0_g128": {"q2_mma": (1, 16)},
}
CUDA_CORES: dict[str, dict[str, tuple[int, ...]]] = {
    "bf16": {"bf16_gemv": (1, 3)},
    "fp8": {"fp8_gemv": (1,)},
    "fp8_row": {"fp8_row_gemv": (1,)},
    "nvfp4": {"nvfp4_gemv": (1, 3), "int8_gemv": (1,)},
    "q4_k": {"q4k_gemv": (1,)},
    "q2_0_g128": {"q2_gemv": (1,)},
}
# What the arms must reach that serve so many rows: one row of BF16 and FP8 is the CUDA cores'.
OF_PEER = {
    ("bf16_gemv", 1): 1.0,
    ("fp8_gemv", 1): 1.25,
    ("fp8_mma", 16): 1.2,
    (NVFP4, 1): 1.6,
    **{(NVFP4, m): 1.55 for m in (2, 3, 4, 5, 8)},
    (NVFP4, 16): 1.4,
}
OF_FLOOR = {(Q4_K, 1): 0.7, ("q2_mma", 1): 0.5}
EVERY_SHAPE = {"bf16": "bf16_mma", "fp8": "fp8_mma", "nvfp4": NVFP4}


def peer_of(format: str, m: int) -> str:
    """What one would use instead for `m` rows of a weight in `format`: nothing that runs there for GGML's blocks."""
    if format in ("nvfp4", "fp8"):
        return HUMMING
    return "" if format.startswith("q") else "torch.mv" if m == 1 else "torch.mm"


def blocks() -> tuple[FfnCase, ...]:
    """The FFN of a 27B model in NVFP4: every place of the gated product, dependent launches and plain ones at M=1."""
    wide, hidden = SHAPE
    forms = [(1, g, pdl) for g in CHOICES["gated"] for pdl in (True, False)]
    forms += [(m, g, True) for m in (4, 16) for g in CHOICES["gated"]]
    best = (1, "epilogue", True)
    return tuple(
        FfnCase(JOINED, NVFP4, "nvfp4", hidden, wide, *form, of_floor=1 / FLOORS if form == best else 0.0)
        for form in forms
    )


def decode() -> tuple[Case, ...]:
    """The cases, those of one weight after each other."""
    used = shapes()
    out: list[Case] = [
        BenchCase(
            *(arm, format, *SHAPE, m, peer_of(format, m)),
            of_peer=OF_PEER.get((arm, m), 0.0),
            of_floor=OF_FLOOR.get((arm, m), 0.0),
            of_one_row=OF_ONE_ROW if m == 16 and arm in EVERY_SHAPE.values() else 0.0,
            used=used[SHAPE],
        )
        for format in CUDA_CORES
        for arms in (CUDA_CORES[format], TENSOR_CORES.get(format, {}))
        for arm, rows in arms.items()
        for m in rows
    ]
    out += [
        BenchCase(arm, format, *shape, 1, peer_of(format, 1), used=what)
        for shape, what in used.items()
        if shape != SHAPE
        for format, arm in EVERY_SHAPE.items()
    ]
    return (*out, *blocks())
