"""Values of a trial, a function of its seed: BF16 weights and activations that find what round numbers hide."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

from atlas_lab.core.projection import Site, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.case import Case
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import dtype

SIGMA = 0.02
GROUP = 16  # neighbours in K that share a magnitude, as block scales do
FAR = 2.0**100  # products stay near 1 where one factor is this large and the other this small
LARGEST = 64 * SIGMA  # above any normal value that is drawn


def _generator(case: Case, what: str) -> np.random.Generator:
    text = f"{case.seed}/{case.format}/{case.n}/{case.k}/{case.values}/{what}"
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _far(case: Case) -> float:
    return float(min(FAR, 2.0 ** np.floor(np.log2(get(case.format).largest / LARGEST))))


def weights(case: Case, role: str) -> np.ndarray:
    """float32 `[N, K]` of BF16 values.

    `heavy`: magnitudes that differ by 2^12 between groups of K, one in 64 values 4 to 32 times as large, zeros of both
    signs, and from N = 3 on a row of zeros. `plain`: normal. `huge` and `tiny`: normal, times or over 2^100, or what
    the format has room for.
    """
    rng = _generator(case, role)
    w = rng.standard_normal((case.n, case.k), np.float32) * np.float32(SIGMA)
    if case.values == "heavy":
        groups = -(-case.k // GROUP)
        small = rng.integers(3, 13, (case.n, groups)) * (rng.random((case.n, groups)) < 0.2)
        w *= np.repeat(np.exp2(-small).astype(np.float32), GROUP, axis=1)[:, : case.k]
        w *= np.where(rng.random(w.shape) < 1 / 64, rng.uniform(4, 32, w.shape), 1).astype(np.float32)
        w[rng.random(w.shape) < 1 / 64] = -0.0
        w[rng.random(w.shape) < 1 / 64] = 0.0
        if case.n > 2:
            w[case.n // 2] = 0
    w *= np.float32({"huge": _far(case), "tiny": 1 / _far(case)}.get(case.values, 1))
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


def activations(case: Case, m: int | None = None) -> np.ndarray:
    """BF16 `[M, K]`. `heavy`: one in 32 values 8 to 64 times as large, and from M = 3 on a row of zeros. The first rows
    of a larger `m` are those of a smaller one."""
    count = case.m if m is None else m
    made = np.empty((count, case.k), np.float32)
    for i in range(count):
        rng = _generator(case, f"x{i}")
        made[i] = rng.standard_normal(case.k, np.float32)
        if case.values == "heavy":
            made[i] *= np.where(rng.random(case.k) < 1 / 32, rng.uniform(8, 64, case.k), 1).astype(np.float32)
            made[i] *= i != 2
    made *= np.float32({"huge": 1 / _far(case), "tiny": _far(case)}.get(case.values, 1))
    return made.astype(ml_dtypes.bfloat16)


class Stored:
    """The stored tensors of a case's site by name, and the unquantized weights they were made from."""

    def __init__(self, case: Case, site: Site) -> None:
        self.unquantized = [weights(case, p.role) for p in site.projections]
        self.arrays: dict[str, np.ndarray] = {}
        for p, w in zip(site.projections, self.unquantized, strict=True):
            made = get(p.weight.format).quantize(w)
            for field, t in p.weight.fields:
                # a scale stored as bf16 is another scale, in the checkpoint and in the reference alike
                self.arrays[t.name] = made[field].astype(dtype(t.dtype).numpy).reshape(t.shape)

    def read(self, t: Tensor) -> np.ndarray:
        return self.arrays[t.name]

    def of(self, weight: WeightSource) -> dict[str, np.ndarray]:
        """A weight's arrays by field."""
        return {field: self.arrays[t.name] for field, t in weight.fields}

    def check(self, weight: WeightSource, label: str) -> None:
        """Raise FormatError for values no kernel may be handed."""
        get(weight.format).check(self.of(weight), label)
