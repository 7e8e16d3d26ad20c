"""NVFP4 activations (W4A4): E2M1 codes, an E4M3 scale for 16 of K of a row; what kernels quantize x to on the fly."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats import e2m1, e4m3
from atlas_lab.formats.nvfp4 import GROUP, Nvfp4

ONE = np.float32(1)


def quantize(x: np.ndarray, tensor_scale: np.float32 = ONE) -> tuple[np.ndarray, np.ndarray]:
    """Finite float32 `[M, K]`, K a multiple of 16, to codes u8 `[M, K/2]`, low nibble first, and scales e4m3
    `[M, K/16]`, as `nvfp4` makes them under this tensor scale, a multiplier (a checkpoint's `input_scale`).

    A scale is max|x| / (6 x tensor scale) as E4M3, 1 where that is 0, at least 2^-9; a code x / (scale x tensor scale)
    to nearest even, clamped to ±6. True divisions.
    """
    return Nvfp4().encode(x, tensor_scale)


def dequantize(codes: np.ndarray, scales: np.ndarray, tensor_scale: np.float32 = ONE) -> np.ndarray:
    """e2m1 x scale x tensor scale as float64 `[M, K]`, exactly."""
    blocks = e2m1.decode(codes).reshape(len(codes), -1, GROUP)
    blocks *= e4m3.decode(scales)[..., None] * np.float64(tensor_scale)
    return blocks.reshape(len(codes), -1)
