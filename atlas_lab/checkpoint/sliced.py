"""Parts of stored tensors as tensors of their own: `NAME[0:512+2048:2560]` is rows 0 to 511 and 2048 to 2559 of NAME,
`NAME[:,0:64]` its first 64 columns.

The name says which bytes of the file the part is, so whoever is handed a part, a plan, a loader or an oracle, reads it
as it reads any other tensor. Extents count stored elements: of packed codes, bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from atlas_lab.core.tensor import Tensor

Span = tuple[int, int]
Spans = tuple[Span, ...] | None  # along one axis, in order; None for all of it

_AXIS = r"(?::|\d{1,18}:\d{1,18}(?:\+\d{1,18}:\d{1,18})*)"
_NAME = re.compile(rf"(.+)\[({_AXIS}(?:,{_AXIS})*)\]", re.DOTALL)


@dataclass(frozen=True)
class Slice:
    """Spans of every axis of the stored tensor `base`; axes left out at the end are whole."""

    base: str
    axes: tuple[Spans, ...]

    @classmethod
    def parse(cls, name: str) -> Slice | None:
        """The part that a name says, None for a name that says none."""
        found = _NAME.fullmatch(name)
        return found and cls(found[1], tuple(_spans(axis) for axis in found[2].split(",")))

    def __str__(self) -> str:
        axes = [":" if a is None else "+".join(f"{b}:{e}" for b, e in a) for a in self.axes]
        while axes and axes[-1] == ":":
            axes.pop()
        return f"{self.base}[{','.join(axes)}]" if axes else self.base

    def shape(self, whole: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of this part of a tensor of shape `whole`; None where it has no such part."""
        if len(self.axes) > len(whole):
            return None
        out = list(whole)
        for i, spans in enumerate(self.axes):
            if spans is not None:
                ends = [at for span in spans for at in span]
                if ends != sorted(ends) or ends[-1] > whole[i]:
                    return None
                out[i] = sum(e - b for b, e in spans)
        return tuple(out)

    def runs(self, whole: Sequence[int]) -> Iterator[Span]:
        """Consecutive elements of a row-major tensor of shape `whole` that are this part, first and length, in the
        order of the part's own elements."""
        axes = [*self.axes, *[None] * (len(whole) - len(self.axes))]
        cut = [i for i, spans in enumerate(axes) if spans is not None]
        if not cut:
            yield 0, prod(whole)
            return
        last = cut[-1]
        steps = [prod(whole[i + 1 :]) for i in range(len(whole))]
        outer = [[*_indices(axes[i], whole[i])] for i in range(last)]
        for at in product(*outer):
            first = sum(i * step for i, step in zip(at, steps, strict=False))
            for begin, end in axes[last] or ():
                yield first + begin * steps[last], (end - begin) * steps[last]


def base_name(name: str) -> str:
    """The stored tensor that a handle's name is, or is part of."""
    part = Slice.parse(name)
    return part.base if part else name


def part_of(t: Tensor, axes: Sequence[Spans]) -> Tensor:
    """A part of a stored tensor, or of a part of one, as a handle; `t` itself where that is all of it."""
    held = Slice.parse(t.name) or Slice(t.name, ())
    before = [*held.axes, *[None] * (len(t.shape) - len(held.axes))]
    wanted = [*axes, *[None] * (len(t.shape) - len(axes))]
    spans = [_compose(b, w, e) for b, w, e in zip(before, wanted, t.shape, strict=True)]
    shape = Slice(t.name, tuple(wanted)).shape(t.shape)
    if shape is None:
        raise ValueError(f"{t}: has no part {Slice('', tuple(wanted))}")
    return replace(t, name=str(Slice(held.base, tuple(spans))), shape=shape)


def _spans(axis: str) -> Spans:
    if axis == ":":
        return None
    return tuple((int(b), int(e)) for b, _, e in (span.partition(":") for span in axis.split("+")))


def _indices(spans: Spans, extent: int) -> Iterator[int]:
    for begin, end in ((0, extent),) if spans is None else spans:
        yield from range(begin, end)


def _compose(held: Spans, wanted: Spans, extent: int) -> Spans:
    """Spans of the stored axis that are `wanted` of an axis which is itself `held` of it; neighbours become one."""
    if wanted is None or wanted == ((0, extent),):
        return held
    out: list[Span] = []
    for begin, end in wanted:
        at = 0
        for b, e in held or ((0, extent),):
            first, last = max(begin, at), min(end, at + e - b)
            if first < last:
                out.append((b + first - at, b + last - at))
            at += e - b
    joined: list[Span] = []
    for b, e in out:
        if joined and joined[-1][1] == b:
            joined[-1] = (joined[-1][0], e)
        else:
            joined.append((b, e))
    return tuple(joined)
