"""Weights that share an input, one below the other in one tensor: one launch where there were two or three.

Their tensor scales may differ: a fused weight keeps one a segment. The stored tensors are not needed any more; what
reads one projection reads a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_lab.arms.copies.launches import copied
from atlas_lab.arms.copies.shapes import CopyError, agrees
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats import get

TILE = 128  # rows that one scale of a block grid covers


def can_fuse(projections: Sequence[Projection]) -> Verdict:
    """Two or more of one format, convention, dtypes and K, each as wide as its tensors; under a grid of block scales,
    N and K multiples of 128, so that no scale covers rows of two."""
    if len(projections) < 2:
        return no("site", "a fused weight is made of several", found=len(projections), allowed="2, 3, ...")
    first = projections[0]
    for p in projections:
        verdict = agrees(p)
        if not verdict:
            return no(verdict.code, f"{p.role}: {verdict.sentence}", found=verdict.found, allowed=verdict.allowed)
        kinds = [(q.weight.format, str(q.weight.geometry), q.k, _dtypes(q)) for q in (first, p)]
        if kinds[0] != kinds[1]:
            return no("mixed", "its weights differ in kind", found=kinds[1], allowed=kinds[0])
        if p.weight.geometry.kind == "block" and (p.n % TILE or p.k % TILE):
            found, allowed = f"{p.role} [{p.n}, {p.k}]", f"multiples of {TILE}"
            return no("block-boundary", "one scale would cover rows of two weights", found=found, allowed=allowed)
    return yes()


def fused(projections: Sequence[Projection], key: str = "fused") -> Derived:
    """The weights of `projections`, in order, as one. Fields are those of the format, for ΣN rows: what has rows
    (codes, scales by row, group or block) is concatenated; a single scale becomes one a projection, `[count]`.

    Raises CopyError.
    """
    verdict = can_fuse(projections)
    if not verdict:
        raise CopyError(f"{'+'.join(p.label for p in projections)}: they cannot be fused: {verdict}")
    members = tuple(projections)

    def build(*stored: Arrays) -> dict[str, np.ndarray]:
        fields = members[0].weight.tensors
        return {f: np.concatenate([_rows(s[f], single=_single(t)) for s in stored]) for f, t in fields.items()}

    def dequantize(t: Arrays) -> np.ndarray:
        parts = [{f: t[f][a:b].reshape(p.weight[f].shape) for f, (a, b) in _spans(members, p).items()} for p in members]
        return np.concatenate([get(p.weight.format).dequantize(x) for p, x in zip(members, parts, strict=True)])

    def device(call: BuildCall) -> list[Launch]:
        return [
            copied(s[f], _slice(call.out[f], *_spans(members, p)[f], s[f].shape))
            for p, s in zip(members, call.sources, strict=True)
            for f in s
        ]

    tensors: dict[str, Any] = {}
    for field, t in members[0].weight.fields:
        rows = sum(1 if _single(t) else p.weight[field].shape[0] for p in members)
        tensors[field] = Tensor(t.dtype, (rows,) if _single(t) else (rows, *t.shape[1:]))
    return Derived(
        key,
        source=tuple(p.weight.packed for p in members),
        build=build,
        dequantize=dequantize,
        device=device,
        **tensors,
    )


def part(projections: Sequence[Projection], p: Projection, key: str = "weight", whole: str = "fused") -> Derived:
    """What `p`, one of `projections`, reads of `fused(projections, whole)`: views with the fields and shapes of its own
    stored weight, so that any kernel for that weight reads them."""
    of, members = fused(projections, whole), tuple(projections)
    views = {f: _slice(of.tensors[f], a, b, p.weight[f].shape) for f, (a, b) in _spans(members, p).items()}
    return of.part(key, get(p.weight.format).dequantize, **views)


def segments(projections: Sequence[Projection], whole: Derived, field: str) -> tuple[tuple[int, Tensor], ...]:
    """Rows and tensor scale of each segment, as `Epilogue.alpha` takes them."""
    return tuple((p.n, whole.tensors[field].view(i, ())) for i, p in enumerate(projections))


def _dtypes(p: Projection) -> tuple[tuple[str, str], ...]:
    return tuple((f, t.dtype) for f, t in p.weight.fields)


def _single(t: Tensor) -> bool:
    """One value for the whole weight: it has no rows to follow each other."""
    return t.shape in ((), (1,))


def _rows(a: np.ndarray, *, single: bool) -> np.ndarray:
    return a.reshape(1) if single else a


def _spans(members: tuple[Projection, ...], p: Projection) -> dict[str, tuple[int, int]]:
    """First row and end of `p` in each field of the fused weight."""
    out = {}
    for field, t in p.weight.fields:
        before = members[: members.index(p)]
        lengths = [1 if _single(t) else q.weight[field].shape[0] for q in (*before, p)]
        out[field] = (sum(lengths[:-1]), sum(lengths))
    return out


def _slice(whole: Tensor, first: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Rows `first` to `end` of a contiguous tensor, in another shape of as many elements."""
    width = whole.elements // whole.shape[0]
    return whole.view(first * width, shape)
