"""Proof that a tolerance would notice: outputs and weights made wrong on purpose, which must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from atlas_lab.core.numbers import Exact
from atlas_lab.experiments import oracle
from atlas_lab.experiments.oracle import Reference
from atlas_lab.experiments.parity import ParityResult, Ran
from atlas_lab.formats import get
from atlas_lab.formats.base import Geometry

PLACES = 16
ENOUGH = 0.75  # share of places that must be noticed: a weight beside an x near zero rightly changes nothing


def bite(ran: Ran, ref: Reference) -> ParityResult:
    """Whether the arm's tolerance rejects its own good output with a row or a column of it zeroed, and against weights
    in which one scale is doubled, or one weight where there are no scales."""

    def passes(out: np.ndarray, against: Reference) -> bool:
        return oracle.compare(out, against, ran.arm.tolerance, ran.call.k).ok

    if not passes(ran.out, ref):
        return ParityResult(False, "the output is wrong as it is, before anything was spoiled")
    for what, at in (("row", (ref.values.shape[0] // 3,)), ("column", (slice(None), ref.values.shape[1] // 3))):
        out = ran.out.copy()
        out[at] = 0
        if passes(out, ref):
            return ParityResult(False, f"the tolerance takes an output with a {what} of zeros for right")
    if isinstance(ran.arm.tolerance, Exact):
        return ParityResult(True)
    rng = np.random.default_rng(ran.case.seed)
    if ran.arm.reference is not None:  # whose weights only the arm knows how to read
        return _noticed("output", [not passes(out, ref) for out in _doubled_outputs(ran.out, rng)])
    w = oracle.dequantized(ran.declarations, ran.arrays, ran.call.n, ran.call.k)
    what, cut = _cut(get(ran.case.format).geometry, ran.case.n)
    x, terms = oracle.multiplied(ran.arm, ran.x, ran.arrays), oracle.terms_of(ran.arm, ran.arrays)
    return _noticed(what, [not passes(ran.out, oracle.product(x, v, terms)) for v in _doubled_weights(w, cut, rng)])


def _noticed(what: str, noticed: list[bool]) -> ParityResult:
    share = sum(noticed) / len(noticed)
    said = f"doubling one {what} was noticed in {sum(noticed)} of {len(noticed)} places"
    return ParityResult(share >= ENOUGH, "" if share >= ENOUGH else f"the tolerance has no teeth: {said}")


def _doubled_outputs(out: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(PLACES):
        spoiled = out.copy()
        at = tuple(rng.integers(0, extent) for extent in out.shape)
        spoiled[at] = spoiled[at] * 2
        yield spoiled


def _doubled_weights(
    w: np.ndarray, cut: Callable[[int, int], tuple[slice, slice]], rng: np.random.Generator
) -> Iterator[np.ndarray]:
    for _ in range(PLACES):
        spoiled = w.copy()
        spoiled[cut(int(rng.integers(0, w.shape[0])), int(rng.integers(0, w.shape[1])))] *= 2
        yield spoiled


def _cut(geometry: Geometry, n: int) -> tuple[str, Callable[[int, int], tuple[slice, slice]]]:
    """What one scale covers around an element, and its name. `n` is the rows of one weight of several."""

    def tile(rows: int, cols: int) -> Callable[[int, int], tuple[slice, slice]]:
        def at(i: int, j: int) -> tuple[slice, slice]:
            first, top = i - i % n, i % n - i % n % rows
            return slice(first + top, first + min(top + rows, n)), slice(j - j % cols, j - j % cols + cols)

        return at

    whole = 1 << 40
    if geometry.kind in ("block", "group"):
        return f"scale of {geometry.kind} {geometry.rows}x{geometry.cols}", tile(geometry.rows, geometry.cols)
    if geometry.kind == "none":
        return "weight", tile(1, 1)
    return f"scale of a {geometry.kind}", tile(1 if geometry.kind == "row" else whole, whole)
