"""NVFP4 weights rounded to E4M3 without their tensor scale: what kernels that multiply FP8 make of them."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats import e2m1, e4m3
from atlas_lab.formats.nvfp4 import GROUP

SHARE = 8.0
"""What a code times its block scale is divided by first: the largest, 6·448, is then 336, below 448."""


def encode(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Codes u8 `[N, K/2]` and block scales E4M3 `[N, K/16]` to E4M3 `[N, K]`: code x scale / 8, exact in float32, to
    nearest even. None is so large that it would be clamped."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    blocks = e2m1.decode(weight).reshape(n, k // GROUP, GROUP) * e4m3.decode(scale)[..., None]
    return e4m3.encode((blocks.reshape(n, k) / SHARE).astype(np.float32))


def values(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 `[N, K]` that stand for codes times block scales once they are rounded so."""
    return e4m3.decode(encode(weight, scale)) * SHARE
