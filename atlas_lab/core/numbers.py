"""Declared numbers: how far a kernel may be from its own arithmetic, and a format from unquantized weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atlas_lab.kernels import lang


def _measured(op: lang.Op) -> float:
    if op.unit_roundoff is None:
        raise ValueError(f"{op.name} has no unit roundoff")
    return op.unit_roundoff


# Unit roundoff of one accumulation step, per instruction. FP32 FMA rounds to nearest; tensor cores keep fewer bits
# and truncate, so their figures are measured on the device and recorded beside the instruction.
ACCUMULATORS: dict[str, float] = {
    "f32": 2.0**-24,
    "mma_bf16": _measured(lang.mma_m16n8k16_bf16),
    "mma_f16": _measured(lang.mma_m16n8k16_f16),
    "mma_e4m3": _measured(lang.mma_m16n8k32_e4m3),
    "mma_nvfp4": _measured(lang.mma_m16n8k64_nvfp4),
}
OUTPUTS: dict[str, float] = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


@dataclass(frozen=True)
class Exact:
    """Bit for bit equal to `to`: `reference`, or the name of another arm."""

    to: str = "reference"


@dataclass(frozen=True)
class Rounded:
    """|out − ref| ≤ u_acc·(depth + extra)·(|W|·|x|) + u_out·|ref|, for every output, ref in float64.

    `accumulate` names the accumulating instruction (a key of ACCUMULATORS), `out` the output dtype, `depth` the
    longest chain of additions for a given K (default K itself), `extra_roundings` further roundings of a product
    or partial sum. The bound on the accumulation is itself rounded to `out`, hence the factor 1 + u_out.
    """

    accumulate: str
    out: str
    depth: Callable[[int], int] | None = None
    extra_roundings: int = 0

    def __post_init__(self) -> None:
        for found, known in ((self.accumulate, ACCUMULATORS), (self.out, OUTPUTS)):
            if found not in known:
                raise ValueError(f"tolerance: found {found!r}, expected one of {', '.join(known)}")

    def bound(self, reference: np.ndarray, magnitude: np.ndarray, k: int) -> np.ndarray:
        """Largest allowed error, elementwise. `reference` and `magnitude` = |x|·|W|ᵀ are float64 `[M, N]`."""
        chain = (self.depth(k) if self.depth else k) + self.extra_roundings
        u_out = OUTPUTS[self.out]
        accumulated = ACCUMULATORS[self.accumulate] * chain * magnitude
        bound: np.ndarray = accumulated * (1 + u_out) + u_out * np.abs(reference) + np.finfo(np.float32).tiny
        return bound


@dataclass(frozen=True)
class Accuracy:
    """For arms that change numbers: least signal-to-noise ratio, in dB, against the unquantized product."""

    min_snr_db: float


@dataclass(frozen=True)
class ReductionClass:
    """What fixes the bits of a sum: instruction family, order of K, splits, promotion interval, rounding points.

    Arms of equal class promise equal bits for equal weights and inputs, whatever M unless `order` names it.
    """

    instruction: str
    order: str
    splits: int = 1
    promotion: int = 0
    rounding: str = "output"

    @property
    def id(self) -> str:
        return f"{self.instruction}/{self.order}/s{self.splits}/p{self.promotion}/{self.rounding}"


def snr_db(out: np.ndarray, exact: np.ndarray) -> float:
    """10·log10(‖exact‖² / ‖out − exact‖²); infinite for equal arrays."""
    noise, signal = float(np.sum((out - exact) ** 2)), float(np.sum(exact**2))
    if noise == 0 or signal == 0:
        return float("inf") if noise == 0 else float("-inf")
    return 10 * float(np.log10(signal / noise))
