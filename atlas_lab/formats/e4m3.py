"""E4M3 ("fn"): sign, 4 exponent bits of bias 7, 3 mantissa bits; largest 448, no infinity, 0x7F and 0xFF are NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np

MAX = 448.0
MIN = 2.0**-9  # the smallest above zero, a subnormal
NAN = 0x7F  # below the sign bit

VALUES: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
VALUES.setflags(write=False)


def encode(x: np.ndarray) -> np.ndarray:
    """Float32 to E4M3 of the same shape: to nearest, ties to even, saturating at ±448; NaN stays NaN.

    The clamp comes first because libraries disagree above 448: ml_dtypes rounds 464.1 to NaN, torch to 448.
    """
    codes: np.ndarray = np.clip(x, np.float32(-MAX), np.float32(MAX)).astype(ml_dtypes.float8_e4m3fn)
    return codes


def decode(codes: np.ndarray) -> np.ndarray:
    """E4M3 to the float64 of the same shape that it stands for."""
    values: np.ndarray = VALUES[codes.view(np.uint8)]
    return values


def is_nan(codes: np.ndarray) -> np.ndarray:
    """Where E4M3 codes are NaN, 0x7F or 0xFF."""
    nan: np.ndarray = (codes.view(np.uint8) & NAN) == NAN
    return nan


def is_no_magnitude(codes: np.ndarray) -> np.ndarray:
    """Where E4M3 codes are NaN or carry a sign bit (−0 too): what an unsigned scale may not be."""
    return codes.view(np.uint8) >= NAN
