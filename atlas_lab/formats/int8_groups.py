"""int8 with one float32 scale for 32 of K of a row: what integer tensor cores multiply, of weights when they are
loaded, of activations on the fly (W8A8)."""

from __future__ import annotations

import numpy as np

GROUP = 32
MOST = np.float32(127)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 `[M, K]`, finite, K a multiple of 32, to codes int8 `[M, K]` and scales float32 `[M, K/32]`.

    A scale is max|x| / 127; a code x / scale to nearest even, clamped to ±127; 0 where the scale is 0. True divisions.
    """
    groups = x.reshape(len(x), -1, GROUP)
    scales = np.abs(groups).max(axis=2) / MOST
    codes = np.clip(np.rint(groups / np.where(scales > 0, scales, np.float32(1))[..., None]), -MOST, MOST)
    codes[scales == 0] = 0
    return codes.astype(np.int8).reshape(x.shape), scales


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """code x scale as float64 `[M, K]`, exactly."""
    groups = codes.astype(np.float64).reshape(*scales.shape, GROUP)
    groups *= scales.astype(np.float64)[..., None]
    return groups.reshape(codes.shape)
