"""Activations in int8 with a scale and a sum for 32 of K of a row: what kernels quantize x to on the fly (MMQ).

`block_q8_1` of ggml, type 9, as `quantize_row_q8_1_ref` makes it: codes are those of Q8_0, and the sum is one of codes
times the scale. ggml's matrix kernels on GPUs keep the sum of x as it was (DS4): minimums times that are not the
product with quantized x, whose errors partly cancel; on normal values it costs 7 dB. Scale and sum are no f16, whose
range activations can leave: the scale is float32, the sum two BF16 that add up to it but for 2^-17, which a matrix unit
multiplies by 6 bits exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from atlas_lab.formats.q8_0 import half_away, inverse

GROUP = 32
BF16 = ml_dtypes.bfloat16


class Q8_1(NamedTuple):  # noqa: N801
    """Codes i8 `[M, K]`; d float32, and the sums as BF16 `high` and `low`, `[M, K/32]`."""

    codes: np.ndarray
    d: np.ndarray
    high: np.ndarray
    low: np.ndarray

    @property
    def sums(self) -> np.ndarray:
        """float64 `[M, K/32]`."""
        made: np.ndarray = self.high.astype(np.float64) + self.low.astype(np.float64)
        return made


def quantize(x: np.ndarray) -> Q8_1:
    """Of float32 `[M, K]`, finite, K a multiple of 32. d = max|x| / 127; a code is x times 1 / d, rounded half away
    from zero, 0 where d is 0 or subnormal; a sum is d times that of the codes, rounded to float32 first. Raises
    ValueError for another K.
    """
    m, k = x.shape
    if k % GROUP:
        raise ValueError(f"q8_1: found K = {k}, expected a multiple of {GROUP}")
    groups = np.ascontiguousarray(x, np.float32).reshape(m, k // GROUP, GROUP)
    d = np.abs(groups).max(axis=2) / np.float32(127)
    codes = half_away(groups * inverse(d)[..., None])
    sums = codes.sum(axis=2, dtype=np.float32) * d
    high = sums.astype(BF16)
    return Q8_1(codes.astype(np.int8).reshape(m, k), d, high, (sums - high.astype(np.float32)).astype(BF16))


def dequantize(q: Q8_1) -> np.ndarray:
    """code x d as float64 `[M, K]`, exactly."""
    m, k = q.codes.shape
    wide: np.ndarray = q.codes.reshape(m, -1, GROUP) * q.d.astype(np.float64)[..., None]
    return wide.reshape(m, k)
