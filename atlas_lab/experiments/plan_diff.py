"""Two configurations against each other: the rows that another arm serves, bytes, KV capacity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from atlas_lab.blocks.ffn import FFN
from atlas_lab.core.route import Route
from atlas_lab.core.rows import Rows, merged, pieces
from atlas_lab.experiments.grouping import reads_of, together
from atlas_lab.experiments.plan_blocks import BlockLine
from atlas_lab.experiments.whole_model import NO_ARM, ModelPlan

ABSENT = "not there"


@dataclass(frozen=True)
class Changed:
    """Rows of equal layers' roles that `a` and `b` serve otherwise: arm, and what it reads."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    rows: tuple[Rows, ...]
    a: tuple[str, str]
    b: tuple[str, str]


@dataclass(frozen=True)
class LabelBytes:
    """What the two hold under one label of the ledger."""

    label: str
    a: int
    b: int


@dataclass(frozen=True)
class ChangedBlock:
    """Rows at which feed-forward blocks of equal layers take other programs, in short."""

    layers: tuple[int, ...]
    rows: tuple[Rows, ...]
    a: str
    b: str


@dataclass(frozen=True)
class Diff:
    """`b` against `a`. Totals are of the plans; `more` is what b holds more in its steady state."""

    a: ModelPlan
    b: ModelPlan
    changed: tuple[Changed, ...]
    labels: tuple[LabelBytes, ...]
    blocks: tuple[ChangedBlock, ...] = ()

    @property
    def more(self) -> int:
        return self.b.load.steady - self.a.load.steady

    @property
    def more_at_peak(self) -> int:
        return self.b.load.peak - self.a.load.peak

    @property
    def more_others(self) -> int:
        """Bytes of the models' other tensors."""
        return self.b.kept_others - self.a.kept_others

    @property
    def more_tokens(self) -> int | None:
        if self.a.kv_tokens is None or self.b.kv_tokens is None:
            return None
        return self.b.kv_tokens - self.a.kv_tokens

    @property
    def same(self) -> bool:
        alike = not self.changed and not self.blocks
        return alike and self.more == self.more_at_peak == self.more_others == 0 and not self.more_tokens


def compare(a: ModelPlan, b: ModelPlan) -> Diff:
    """What differs between two plans, layer by layer and row by row."""
    mine, theirs = _served(a), _served(b)
    found: list[tuple[int, str, tuple[tuple[Rows, ...], tuple[str, str], tuple[str, str]]]] = []
    for key in dict.fromkeys([*mine, *theirs]):
        rows: dict[tuple[tuple[str, str], tuple[str, str]], list[Rows]] = {}
        for piece, x, y in _aligned(mine.get(key), theirs.get(key)):
            if x != y:
                rows.setdefault((x, y), []).append(piece)
        found += [(*key, (tuple(held), x, y)) for (x, y), held in rows.items()]
    changed = tuple(Changed(layers, roles, *what) for layers, roles, what in together(found))
    return Diff(a, b, changed, tuple(_labels(a, b)), tuple(_blocks(a, b)))


def _blocks(a: ModelPlan, b: ModelPlan) -> Iterable[ChangedBlock]:
    mine, theirs = _programs(a), _programs(b)
    found: dict[tuple[int, str, str], list[int]] = {}
    for layer, m in dict.fromkeys([*mine, *theirs]):
        x, y = mine.get((layer, m)), theirs.get((layer, m))
        if x != y:
            found.setdefault((layer, x.short if x else ABSENT, y.short if y else ABSENT), []).append(m)
    changed = [(layer, FFN, (x, y, merged(Rows(m, m) for m in ms))) for (layer, x, y), ms in found.items()]
    for layers, _, (before, after, rows) in together(changed):
        yield ChangedBlock(layers, rows, before, after if after != before else f"{after}, of other kernels")


def _programs(p: ModelPlan) -> dict[tuple[int, int], BlockLine]:
    """What each layer's block takes, by layer and M."""
    return {
        (layer, m): replace(line, rows=(), said=())
        for b in p.blocks
        for layer in b.layers
        for line in b.lines
        for r in line.rows
        for m in range(r.first, r.last + 1)
    }


Served = list[tuple[Rows, tuple[str, str]]]


def _served(p: ModelPlan) -> dict[tuple[int, str], Served]:
    """What serves each projection, by rows."""
    out: dict[tuple[int, str], Served] = {}
    for r in p.routes:
        for q in r.site.projections:
            out[q.layer, q.role] = _answers(r, q.role)
    for g in p.gaps:
        out[g.layer, g.role].append((g.rows, (NO_ARM, f"{g.format} as stored")))
    return out


def _answers(r: Route, role: str) -> Served:
    return [(a.rows, (a.arm, reads_of(a.declarations))) for a in r.of(role)]


def _aligned(a: Served | None, b: Served | None) -> Iterable[tuple[Rows, tuple[str, str], tuple[str, str]]]:
    """Both answers for every range of rows in which neither changes; neighbours with equal answers are one."""
    every = tuple(rows for rows, _ in [*(a or ()), *(b or ())])
    out: list[tuple[Rows, tuple[str, str], tuple[str, str]]] = []
    for piece in pieces(every, every):
        x, y = _answer(a, piece), _answer(b, piece)
        if out and out[-1][1:] == (x, y) and out[-1][0].last + 1 == piece.first:
            out[-1] = (Rows(out[-1][0].first, piece.last), x, y)
        else:
            out.append((piece, x, y))
    return out


def _answer(served: Served | None, piece: Rows) -> tuple[str, str]:
    return next((what for rows, what in served or () if piece.first in rows), (ABSENT, ""))


def _labels(a: ModelPlan, b: ModelPlan) -> Iterable[LabelBytes]:
    mine, theirs = ({r.label: r.bytes for r in p.load.ledger()} for p in (a, b))
    for label in dict.fromkeys([*mine, *theirs]):
        yield LabelBytes(label, mine.get(label, 0), theirs.get(label, 0))
