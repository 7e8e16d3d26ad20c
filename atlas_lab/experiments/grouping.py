"""Equal layers of a plan together, for people: what serves them, what refused, what is pruned."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.residency import Alloc, Free
from atlas_lab.core.route import Assignment, Route
from atlas_lab.core.rows import Rows
from atlas_lab.core.verdict import no
from atlas_lab.experiments.whole_model import ModelPlan

What = TypeVar("What", bound=Hashable)
RUNS_SHOWN = 4


@dataclass(frozen=True)
class Line:
    """What serves some rows of a group's projections: `arm` is "" where none does. `together` are the roles it serves
    in one call, if several; `bytes` the weights it reads, over all of the group."""

    rows: tuple[Rows, ...]
    arm: str
    together: tuple[str, ...]
    origin: str
    reads: str
    bytes: int = 0


@dataclass(frozen=True)
class Group:
    """Projections of equal layers that are served alike. `resident` are the bytes of the buffers that are there for
    them; a buffer that several read counts for the first."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    format: str
    lines: tuple[Line, ...]
    resident: int


@dataclass(frozen=True)
class Refusal:
    """Why an arm does not serve these roles of these layers; `found` are the values that were found there."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    arm: str
    code: str
    sentence: str
    found: tuple[str, ...]
    allowed: str

    def __str__(self) -> str:
        found = ", ".join((*self.found[:3], *(["..."] if len(self.found) > 3 else [])))
        return str(no(self.code, self.sentence, found=found, allowed=self.allowed))


@dataclass(frozen=True)
class PrunedGroup:
    """Stored tensors of equal layers that do not stay, for one reason."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    fields: tuple[str, ...]
    reason: str
    bytes: int
    count: int


def groups(p: ModelPlan) -> list[Group]:
    """Every projection of the plan, equal ones together; in order of first sight. Their `resident` bytes sum to the
    plan's steady ones."""
    resident = _resident(p)
    gaps: dict[tuple[int, str], list[Rows]] = {}
    for g in p.gaps:
        gaps.setdefault((g.layer, g.role), []).append(g.rows)
    found: list[tuple[int, str, tuple[str, tuple[Line, ...]]]] = []
    sizes: dict[tuple[int, str], tuple[list[int], int]] = {}
    for r in p.routes:
        for q in r.site.projections:
            lines = _lines(r, q.role, gaps.get((q.layer, q.role), ()))
            found.append((q.layer, q.role, (q.weight.format, tuple(replace(x, bytes=0) for x in lines))))
            sizes[q.layer, q.role] = ([x.bytes for x in lines], resident.get((q.layer, q.role), 0))
    made = []
    for layers, roles, (form, plain) in together(found):
        mine = [sizes[layer, role] for layer in layers for role in roles]
        lines = [replace(x, bytes=sum(m[0][i] for m in mine)) for i, x in enumerate(plain)]
        made.append(Group(layers, roles, form, tuple(lines), sum(m[1] for m in mine)))
    return made


def _lines(r: Route, role: str, missing: Iterable[Rows]) -> list[Line]:
    """What serves a role, ranges of rows with one answer together; last the rows that nothing serves."""
    out: dict[Line, tuple[list[Rows], int]] = {}
    for a in r.of(role):
        line = Line((), a.arm, a.roles if len(a.roles) > 1 else (), a.origin, reads_of(a.declarations))
        out.setdefault(line, ([], _read(a) if a.roles[0] == role else 0))[0].append(a.rows)
    lines = [replace(line, rows=tuple(rows), bytes=size) for line, (rows, size) in out.items()]
    return lines + [Line((rows,), "", (), "", "") for rows in missing]


def reads_of(declarations: Iterable[Declaration]) -> str:
    """`nvfp4 in place`, `int8_row of bf16`."""
    return ", ".join(
        dict.fromkeys(
            f"{d.source.format} in place"
            if isinstance(d, Bind)
            else f"{d.label} of {'+'.join(dict.fromkeys(w.format for w in d.weights))}"
            for d in declarations
        )
    )


def _read(a: Assignment) -> int:
    return sum(t.bytes for t in {t for d in a.declarations for t in d.tensors.values()})


def _resident(p: ModelPlan) -> dict[tuple[int, str], int]:
    """Bytes of the buffers that stay, by the layer and role of the first projection that reads them."""
    live: dict[str, int] = {}
    for s in p.load.steps:
        if isinstance(s, Alloc):
            live[s.buffer] = s.bytes
        elif isinstance(s, Free):
            del live[s.buffer]
    out: dict[tuple[int, str], int] = {}

    def give(layer: int, role: str, names: Iterable[str]) -> None:
        for name in names:
            out[layer, role] = out.get((layer, role), 0) + live.pop(name, 0)

    for r in p.routes:
        for a in r.assignments:
            for d in a.declarations:
                whole = d if isinstance(d, Bind) else d.whole
                give(r.site.layer, a.roles[0], (t.name for t in whole.tensors.values()))
    stored = {(q.layer, q.role): q.weight for r in p.routes for q in r.site.projections}
    for g in p.gaps:
        give(g.layer, g.role, (t.name for t in stored[g.layer, g.role].tensors.values()))
    return out


def refusals(p: ModelPlan) -> list[Refusal]:
    """Every arm that said no to a role it names, each reason once."""
    found: list[tuple[int, str, tuple[str, str, str, str]]] = []
    values: dict[tuple[tuple[str, str, str, str], int, str], str] = {}
    for r in p.routes:
        for c in r.refusals():
            what = (c.arm, c.verdict.code, c.verdict.sentence, c.verdict.allowed)
            role = "+".join(c.roles)
            found.append((r.site.layer, role, what))
            values[what, r.site.layer, role] = c.verdict.found
    out = []
    for layers, roles, what in together(found):
        mine = dict.fromkeys(values[what, layer, role] for layer in layers for role in roles)
        arm, code, sentence, allowed = what
        out.append(Refusal(layers, roles, arm, code, sentence, tuple(v for v in mine if v), allowed))
    return out


def refusals_in_short(p: ModelPlan) -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """(arms, roles, why), arms that refuse the same with the same words together; a role that is refused in some of
    its layers alone has them beside it. Arms that only find weights of other formats are left out."""
    held: dict[str, set[int]] = {}
    for r in p.routes:
        for c in r.considered:
            held.setdefault("+".join(c.roles), set()).add(r.site.layer)
    by_arm: dict[tuple[str, str], list[str]] = {}
    for x in refusals(p):
        if x.code != "source":
            roles = by_arm.setdefault((x.arm, str(x)), [])
            roles += [role if set(x.layers) == held[role] else f"{role} (layers {span(x.layers)})" for role in x.roles]
    out: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (arm, why), roles in by_arm.items():
        out.setdefault((tuple(roles), why), []).append(arm)
    return [(tuple(arms), roles, why) for (roles, why), arms in out.items()]


def pruned(p: ModelPlan) -> list[PrunedGroup]:
    """What of the checkpoint's projections does not stay, equal layers together."""
    owners = {
        t.name: (q.layer, q.role, field)
        for r in p.routes
        for q in r.site.projections
        for field, t in q.weight.tensors.items()
    }
    found: list[tuple[int, str, str]] = []
    tensors: dict[tuple[int, str, str], list[tuple[str, int]]] = {}
    for x in p.load.pruned:
        layer, role, field = owners[x.tensor.name]
        # names of one layer and tensor are taken out of the reason: what is left is equal in equal layers
        reason = x.reason.replace(f"reads no {x.tensor.name} in place", "reads none of it in place")
        reason = re.sub(r"layers\.\d+\.", "", reason).removeprefix(f"{role} is ")
        found.append((layer, role, reason))
        tensors.setdefault((layer, role, reason), []).append((field, x.tensor.bytes))
    out = []
    for layers, roles, reason in together(found):
        mine = [t for layer in layers for role in roles for t in tensors[layer, role, reason]]
        fields = tuple(dict.fromkeys(field for field, _ in mine))
        out.append(PrunedGroup(layers, roles, fields, reason, sum(size for _, size in mine), len(mine)))
    return out


def together(found: Iterable[tuple[int, str, What]]) -> list[tuple[tuple[int, ...], tuple[str, ...], What]]:
    """(layer, role, what) triples with equal layers joined first, then roles of equal layers, in order of first
    sight."""
    layers: dict[tuple[str, What], dict[int, None]] = {}
    for layer, role, what in found:
        layers.setdefault((role, what), {})[layer] = None
    roles: dict[tuple[tuple[int, ...], What], list[str]] = {}
    for (role, what), held in layers.items():
        roles.setdefault((tuple(held), what), []).append(role)
    return [(held, tuple(names), what) for (held, what), names in roles.items()]


def span(numbers: Sequence[int]) -> str:
    """`0-2, 4-6`, or `0-2, 4-6, ..., 60-62 (48)` where many runs follow one another at one distance."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = [f"{a}-{b}" if a != b else str(a) for a, b in runs]
    steps = {(b[0] - a[0], b[1] - b[0]) for a, b in pairwise(runs)}
    if len(runs) > RUNS_SHOWN and len(steps) == 1 and runs[0][1] - runs[0][0] == runs[1][1] - runs[1][0]:
        said = [*said[:2], "...", said[-1]]
    count = len(set(numbers))
    return ", ".join(said) + (f" ({count})" if count > 1 else "")
