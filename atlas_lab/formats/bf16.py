"""BF16, the unquantized weight: the upper half of a float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from atlas_lab.formats import checks
from atlas_lab.formats.base import NO_SCALE, Format, Spec, Tensors

# Halfway between the largest bf16 and 2^128: from here on, rounding to nearest even gives infinity.
OVERFLOW = np.float32(2.0**128 - 2.0**119)


class Bf16(Format):
    """`weight`: bf16 `[N, K]`, no scale."""

    name = "bf16"
    family = "bf16"
    geometry = NO_SCALE

    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """Any N and K of 1 or more; FormatError otherwise."""
        checks.dims(self.name, n, k)
        return {"weight": Spec("bf16", (n, k))}

    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 `[N, K]` to bf16, to nearest, ties to even (IEEE 754 conversion).

        Raises FormatError, with row and column, for NaN, infinity and values that would round to infinity.
        """
        checks.source(w, self.name)
        checks.value(w, checks.source_label(self.name), lambda x: np.abs(x) >= OVERFLOW, "at most 3.3895e+38")
        return {"weight": w.astype(ml_dtypes.bfloat16)}

    def dequantize(self, t: Tensors) -> np.ndarray:
        """The stored values as float64 `[N, K]`; raises FormatError for a missing field, wrong dtype or shape."""
        checks.weight(t, self.name, "bf16")
        return t["weight"].astype(np.float64)

    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError for a missing field, wrong dtype or shape, NaN or infinity."""
        checks.weight(t, label, "bf16")
        checks.value(t["weight"], f"{label}.weight", lambda x: ~np.isfinite(x), "finite values")


FORMATS: tuple[Format, ...] = (Bf16(),)
