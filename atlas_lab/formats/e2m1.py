"""E2M1, the 4-bit float of NVFP4: sign, 2 exponent bits, 1 mantissa bit; no infinity, no NaN, code 8 is −0."""

from __future__ import annotations

import numpy as np

MAX = 6.0

VALUES: np.ndarray = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
VALUES.setflags(write=False)

# [256, 2]: what the low and the high nibble of a byte stand for.
PAIRS: np.ndarray = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=1)
PAIRS.setflags(write=False)

# Midpoints between neighbouring magnitudes. A tie goes to the even code: the midpoint above an odd code moves up.
_BOUNDS = tuple((np.float32((VALUES[i] + VALUES[i + 1]) / 2), i % 2 == 1) for i in range(7))


def encode(x: np.ndarray) -> np.ndarray:
    """Float32 without NaN to u8 codes 0 to 15 of the same shape: to nearest, ties to even code, saturating at ±6."""
    magnitude = np.abs(x)
    codes: np.ndarray = np.zeros(x.shape, np.uint8)
    for bound, tie_up in _BOUNDS:
        above = magnitude >= bound if tie_up else magnitude > bound
        codes += above.view(np.uint8)
    codes |= np.signbit(x).view(np.uint8) << np.uint8(3)
    return codes


def pack(codes: np.ndarray) -> np.ndarray:
    """u8 codes `[..., K]`, K even, to bytes `[..., K/2]`: element 2j in the low nibble of byte j, 2j+1 in the high."""
    packed: np.ndarray = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., K/2]` to u8 codes `[..., K]`; the inverse of `pack`."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def decode(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., K/2]` to the float64 `[..., K]` that they stand for."""
    values: np.ndarray = PAIRS[packed]
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
