"""Weights to tune on: as large as a model's, quantized and judged in the time of a small one.

The rows of each weight repeat those of a tile of random values, quantized by the format's own recipe; the values are
uniform, so that half of a ternary format's codes are not zero. So the output's
columns repeat too, and every setting is judged at full size, on all of N, by the float64 product of the tile alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.oracle import Reference
from atlas_lab.formats.base import Format

ROWS = 256  # a multiple of every scale grid's
LARGEST = 0.02


def site_of(prefix: str, roles: Sequence[str], form: Format, ns: Sequence[int], k: int) -> Site:
    """Projections as handles, their tensors named after `prefix`; raises FormatError for a shape one cannot have."""

    def one(role: str, n: int) -> Projection:
        fields = tuple((f, Tensor(s.dtype, s.shape, f"{prefix}.{role}.{f}")) for f, s in form.tensors(n, k).items())
        return Projection(0, role, n, k, WeightSource(form.name, form.family, form.geometry, fields))

    return Site(tuple(map(one, roles, ns)))


class Repeated:
    """The stored tensors of `whole`, weights `[ns[i], k]` of one projection or of several that share x, and of `tile`,
    the first rows of each; by name. Each projection has values of its own."""

    def __init__(self, form: Format, roles: Sequence[str], ns: Sequence[int], k: int, seed: int) -> None:
        self.ns = tuple(ns)
        self.rows = tuple(min(n, ROWS) for n in ns)
        self.whole = site_of("tune", roles, form, ns, k)
        self.tile = site_of("tile", roles, form, self.rows, k)
        self._arrays: dict[str, np.ndarray] = {}
        for i, rows in enumerate(self.rows):
            rng = np.random.default_rng([seed, ns[i], k, *([i] if i else [])])
            w = rng.uniform(-LARGEST, LARGEST, (rows, k)).astype(np.float32)
            made = form.quantize(w.astype(ml_dtypes.bfloat16).astype(np.float32))
            for site in (self.whole, self.tile):
                for field, t in site.projections[i].weight.fields:
                    self._arrays[t.name] = _repeated(made[field], t.shape)

    def read(self, t: Tensor) -> np.ndarray:
        return self._arrays[t.name]

    def expected(self, tile: Reference) -> Reference:
        """The reference of the whole weights' output `[M, N]` from that of the tile's."""
        begin = np.cumsum((0, *self.rows))
        columns = np.concatenate([begin[i] + np.arange(n) % self.rows[i] for i, n in enumerate(self.ns)])
        return Reference(tile.values[:, columns], tile.magnitude[:, columns])


def _repeated(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`a` again and again along its first axis, to `shape`."""
    a = a.reshape(a.shape or shape)
    if a.shape == shape:
        return a
    return np.ascontiguousarray(np.concatenate([a] * -(-shape[0] // a.shape[0]))[: shape[0]])
