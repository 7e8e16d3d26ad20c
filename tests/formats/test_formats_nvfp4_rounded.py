"""NVFP4 weights rounded to E4M3: every code under every block scale, against rounding written out."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from atlas_lab.formats import e2m1, e4m3, nvfp4_rounded


def every() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[127, 16]` of every value under every block scale, as stored, and their products."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, e2m1.VALUES[codes] * scale.astype(np.float64)


def test_an_eighth_of_the_product_is_rounded_to_the_nearest_even_and_never_clamped() -> None:
    weight, scale, product = every()
    values = np.sort(np.array([v for c, v in enumerate(e4m3.VALUES) if c not in (0x7F, 0xFF, 0x80)]))
    eighth = product / 8
    above = np.searchsorted(values, eighth)
    below = np.maximum(above - 1, 0)
    low, high = values[below], values[above]
    even = np.array([int(e4m3.encode(np.float32([v])).view(np.uint8)[0]) % 2 == 0 for v in values])
    nearest = np.where(eighth - low < high - eighth, low, high)
    tie = eighth - low == high - eighth
    nearest = np.where(tie, np.where(even[below], low, high), nearest)
    assert tie.sum() > 100
    assert np.array_equal(nvfp4_rounded.values(weight, scale), nearest * 8)
    assert np.abs(eighth).max() == 336


def test_above_an_eighth_only_the_clamp_differs_from_rounding_the_product_itself() -> None:
    """E4M3 of the product: the same where that is at most 448 and neither is subnormal."""
    weight, scale, product = every()
    itself = e4m3.decode(e4m3.encode(product.astype(np.float32)))
    ordinary = (np.abs(product) >= 2.0**-3) & (np.abs(product) <= 448)
    assert ordinary.sum() > 1000
    assert np.array_equal(nvfp4_rounded.values(weight, scale)[ordinary], itself[ordinary])
    assert np.abs(itself).max() == 448 < np.abs(product).max()
