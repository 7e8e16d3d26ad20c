"""Ranges of token rows M."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST = 1 << 30


@dataclass(frozen=True, order=True)
class Rows:
    """`first` to `last` token rows, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(f"rows: found {self.first} to {self.last}, expected 1 <= first <= last")

    def __contains__(self, m: object) -> bool:
        return isinstance(m, int) and self.first <= m <= self.last

    def intersect(self, other: Rows) -> Rows | None:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return Rows(first, last) if first <= last else None

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}+" if self.last >= MOST else f"{self.first} to {self.last}"


def rows(first: int, last: int | None = None) -> Rows:
    """`rows(1)`: one row; `rows(2, 16)`: two to sixteen."""
    return Rows(first, first if last is None else last)


def rows_from(first: int) -> Rows:
    """`first` rows and every count above."""
    return Rows(first, MOST)


PHASES: dict[str, Rows] = {"decode": rows(1), "few": rows(2, 16), "prefill": rows_from(17)}


def pieces(served: tuple[Rows, ...], cuts: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """The union of `served`, split wherever a range of `cuts` begins or ends, ascending and without overlaps."""
    starts = sorted({c.first for c in cuts} | {c.last + 1 for c in cuts})
    out: list[Rows] = []
    for r in sorted(served):
        first = max(r.first, out[-1].last + 1) if out else r.first
        if first > r.last:
            continue
        for s in starts:
            if first < s <= r.last:
                out.append(Rows(first, s - 1))
                first = s
        out.append(Rows(first, r.last))
    return tuple(out)


def merged(ranges: Iterable[Rows]) -> tuple[Rows, ...]:
    """The union of `ranges`, ascending, with those that touch or overlap joined."""
    out: list[Rows] = []
    for r in sorted(ranges):
        if out and r.first <= out[-1].last + 1:
            out[-1] = Rows(out[-1].first, max(out[-1].last, r.last))
        else:
            out.append(r)
    return tuple(out)


def covers(outer: Rows, inner: Rows) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last
