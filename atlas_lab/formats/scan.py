"""Passes over a weight in chunks of rows, so that temporaries stay small beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

CHUNK = 1 << 20  # elements; a float32 chunk and its temporaries fit in a last-level cache


def row_chunks(n: int, k: int, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover `n` rows of `k` elements in order; each starts at a multiple of `multiple` rows."""
    step = max(1, CHUNK // (max(k, 1) * multiple)) * multiple
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def amax(w: np.ndarray) -> np.float32:
    """The largest magnitude in a float32 array, NaN where it holds one; makes no copy."""
    return np.float32(max(w.max(), -w.min()))


def first(a: np.ndarray, bad: Callable[[np.ndarray], np.ndarray]) -> tuple[int, ...] | None:
    """Index of the first element, in row-major order, for which `bad` (elementwise) is true."""
    if a.ndim == 0:
        return () if bad(a.reshape(1))[0] else None
    for rows in row_chunks(a.shape[0], a[0].size if a.shape[0] else 0):
        hit = bad(a[rows])
        if hit.any():
            at = np.unravel_index(int(hit.argmax()), hit.shape)
            return (rows.start + int(at[0]), *(int(i) for i in at[1:]))
    return None
