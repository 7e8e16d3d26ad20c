"""What tensor cores multiply, on the interpreter: elements of packed registers as float64, sums rounded once.

`UNIT_ROUNDOFF` bounds what hardware does instead, relative to |c| + Σ|a·b|, an instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.kernels.lang.bits import E4M3
from atlas_lab.kernels.lang.types import Scalar, bf16, e4m3, f16, f32, i8

# Worst error of one m16n8k16 over |c| + Σ|a·b| on an H200 (tools/measure_roundoff.py, 18 million sums a type): bf16
# 2**-21.4, f16 2**-21.3, where c is large; on average toward zero.
U_MMA = 2.0**-21
# FP8 and FP4 products are aligned to the largest of an instruction's terms and cut 13 bits below it. Assumed of an
# instruction's whole sum, a bit in reserve; not measured.
U_MMA_NARROW = 2.0**-12
UNIT_ROUNDOFF: dict[Scalar, float] = {bf16: U_MMA, f16: U_MMA, e4m3: U_MMA_NARROW}


@dataclass(frozen=True)
class Element:
    """An operand's type in PTX, and the NumPy type of its codes."""

    ptx: str
    numpy: Any


ELEMENTS: dict[Scalar, Element] = {
    bf16: Element("bf16", ml_dtypes.bfloat16),
    f16: Element("f16", np.float16),
    e4m3: Element("e4m3", ml_dtypes.float8_e4m3fn),
    i8: Element("s8", np.int8),
}


_E4M3 = np.array(E4M3, np.float64)


def elements(packed: np.ndarray, dtype: Scalar) -> np.ndarray:
    """The last axis of any unsigned type becomes elements of `dtype`, the low bits first, as float64."""
    codes = np.ascontiguousarray(packed)
    if dtype is bf16:  # by bits: ml_dtypes' cast is several times slower
        return (codes.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype is e4m3:
        return np.asarray(_E4M3[codes.view(np.uint8)])
    return np.asarray(codes.view(ELEMENTS[dtype].numpy).astype(np.float64))


def accumulate(c: np.ndarray | None, product: np.ndarray, dtype: Scalar) -> np.ndarray:
    """c + product: rounded to float32, or wrapped to int32. `product` is float64, `c` of the result's type or None."""
    if dtype is f32:
        return (product if c is None else c + product).astype(np.float32)
    whole = product.astype(np.int64)
    return (whole if c is None else c + whole).astype(np.int32)
