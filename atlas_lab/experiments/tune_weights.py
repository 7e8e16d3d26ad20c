"""Weights to tune on: as large as a model's, quantized and judged in the time of a small one.

The rows of a weight repeat those of a tile of random values, quantized by the format's own recipe; the values are
uniform, so that half of a ternary format's codes are not zero. So the output's
columns repeat too, and every setting is judged at full size, on all of N, by the float64 product of the tile alone.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.oracle import Reference
from atlas_lab.formats.base import Format

ROWS = 256  # a multiple of every scale grid's
LARGEST = 0.02


def site_of(prefix: str, role: str, form: Format, n: int, k: int) -> Site:
    """One projection as handles, its tensors named after `prefix`; raises FormatError for a shape it cannot have."""
    fields = tuple((f, Tensor(s.dtype, s.shape, f"{prefix}.{role}.{f}")) for f, s in form.tensors(n, k).items())
    return Site((Projection(0, role, n, k, WeightSource(form.name, form.family, form.geometry, fields)),))


class Repeated:
    """The stored tensors of `whole`, `[n, k]`, and of `tile`, its first rows; by name."""

    def __init__(self, form: Format, role: str, n: int, k: int, seed: int) -> None:
        self.rows = min(n, ROWS)
        self.whole = site_of("tune", role, form, n, k)
        self.tile = site_of("tile", role, form, self.rows, k)
        w = np.random.default_rng([seed, n, k]).uniform(-LARGEST, LARGEST, (self.rows, k)).astype(np.float32)
        made = form.quantize(w.astype(ml_dtypes.bfloat16).astype(np.float32))
        self._arrays: dict[str, np.ndarray] = {}
        for site in (self.whole, self.tile):
            for field, t in site.projections[0].weight.fields:
                self._arrays[t.name] = _repeated(made[field], t.shape)

    def read(self, t: Tensor) -> np.ndarray:
        return self._arrays[t.name]

    def expected(self, tile: Reference, n: int) -> Reference:
        """The reference of the whole weight's output `[M, n]` from that of the tile's."""
        columns = np.arange(n) % self.rows
        return Reference(tile.values[:, columns], tile.magnitude[:, columns])


def _repeated(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`a` again and again along its first axis, to `shape`."""
    a = a.reshape(a.shape or shape)
    if a.shape == shape:
        return a
    return np.ascontiguousarray(np.concatenate([a] * -(-shape[0] // a.shape[0]))[: shape[0]])
