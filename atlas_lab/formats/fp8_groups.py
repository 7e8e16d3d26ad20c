"""E4M3 activations with one float32 scale for 128 of K of a row: what kernels quantize x to on the fly (W8A8)."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats import e4m3

GROUP = 128


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 `[M, K]`, finite, to codes E4M3 `[M, K]` and scales float32 `[ceil(K/128), M]`, the group first.

    A scale is max|x| / 448, 1 where that is 0; a code x / scale to nearest even, clamped to ±448. True divisions.
    """
    groups = np.arange(0, x.shape[1], GROUP)
    scales = np.maximum.reduceat(np.abs(x), groups, axis=1) / np.float32(e4m3.MAX)
    scales = np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
    return e4m3.encode(x / _spread(scales, x.shape[1])), np.ascontiguousarray(scales.T)


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """code x scale as float64 `[M, K]`, exactly."""
    wide: np.ndarray = e4m3.decode(codes) * _spread(scales.T.astype(np.float64), codes.shape[1])
    return wide


def rounded(x: np.ndarray) -> np.ndarray:
    """What x `[M, K]`, BF16 or float32, stands for once it is quantized: float64 `[M, K]`."""
    return dequantize(*quantize(x.astype(np.float32)))


def _spread(scales: np.ndarray, k: int) -> np.ndarray:
    """`[M, ceil(K/128)]` to each element's, `[M, K]`."""
    return np.repeat(scales, GROUP, axis=1)[:, :k]
