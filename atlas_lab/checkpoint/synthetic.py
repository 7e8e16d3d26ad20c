"""Values of synthetic checkpoints: a function of seed, layer and name alone, so that every format, every choice of
layers and roles, and every naming starts from the same BF16 weights."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

from atlas_lab.formats.scan import row_chunks

SIGMA = 0.02  # of the bulk of a trained model's weights
OUTLIER_EVERY = 4096
OUTLIER_FACTOR = (4.0, 16.0)


def _generator(seed: int, label: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


def weight(seed: int, label: str, n: int, k: int) -> np.ndarray:
    """BF16 `[N, K]`: normal values of deviation 0.02, one in 4096 of them 4 to 16 times as large."""
    rng = _generator(seed, label)
    out = np.empty((n, k), ml_dtypes.bfloat16)
    for rows in row_chunks(n, k):
        x = rng.standard_normal((rows.stop - rows.start, k), np.float32)
        out[rows] = np.multiply(x, np.float32(SIGMA), out=x)
    at = rng.integers(0, n * k, max(1, n * k // OUTLIER_EVERY))
    factors = rng.uniform(*OUTLIER_FACTOR, at.size).astype(np.float32)
    flat = out.reshape(-1)
    flat[at] = (flat[at].astype(np.float32) * factors).astype(ml_dtypes.bfloat16)
    return out


def auxiliary(seed: int, label: str, shape: tuple[int, ...], about_one: bool = False) -> np.ndarray:
    """BF16 values of a plausible size for a norm (of w, `about_one`, or of 1 + w), a convolution or a gate."""
    rng = _generator(seed, label)
    x = rng.standard_normal(shape, np.float32)
    if label.endswith("A_log"):
        values = np.log(rng.uniform(1, 16, shape))  # A in [1, 16], as the family is initialised
    elif about_one:
        values = 1 + 0.1 * x  # stored as it multiplies
    else:
        values = 0.1 * x
    return values.astype(ml_dtypes.bfloat16)
