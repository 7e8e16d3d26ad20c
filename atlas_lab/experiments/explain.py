"""Routes for people: equal layers together, every refusal in words, what stays in memory and what is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_lab.core.context import Context
from atlas_lab.core.levers import nearest
from atlas_lab.core.residency import LoadPlan, kv_tokens, load_plan
from atlas_lab.core.route import Considered, Route
from atlas_lab.experiments.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """One row of a plan: which arm serves these roles (`a+b` in one call) for these M, in all of these layers."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    rows: str
    arm: str
    origin: str
    reads: str


@dataclass(frozen=True)
class Refused:
    """Why an arm does not serve these roles, in all of these layers. `code` is the verdict's."""

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    arm: str
    sentence: str
    code: str


@dataclass(frozen=True)
class Explained:
    """A plan of a checkpoint, or of a variant; `whole` says that its routes cover the model."""

    name: str
    context: Context
    routes: tuple[Route, ...]
    load: LoadPlan
    whole: bool = True

    @property
    def served(self) -> list[Served]:
        found: list[tuple[int, str, tuple[str, ...]]] = []
        for r in self.routes:
            rows: dict[tuple[str, str, str, str], list[str]] = {}
            for a, plain in zip(r.assignments, r.to_json()["assignments"], strict=True):
                reads = dict.fromkeys(f"{w['kind']} {w['key']} ({'+'.join(w['formats'])})" for w in plain["weights"])
                rows.setdefault(("+".join(a.roles), a.arm, a.origin, ", ".join(reads)), []).append(str(a.rows))
            found += [(r.site.layer, roles, (", ".join(m), *rest)) for (roles, *rest), m in rows.items()]
        return [Served(layers, roles, *what) for layers, roles, what in together(found)]

    @property
    def refused(self) -> list[Refused]:
        found = [
            (r.site.layer, "+".join(c.roles), (c.arm, str(c.verdict), c.verdict.code))
            for r in self.routes
            for c in r.refusals()
        ]
        return [Refused(layers, roles, *what) for layers, roles, what in together(found)]

    @property
    def kv_tokens(self) -> int:
        return kv_tokens(self.context, self.load)

    @property
    def over_budget(self) -> int:
        """Bytes by which loading would exceed the memory at its peak; 0 where it fits."""
        return max(0, self.load.peak + self.context.reserve - self.context.memory_budget)

    def considered(self, wanted: str) -> tuple[Considered, ...]:
        """What every arm had to say to `LAYER.ROLE`; raises ConfigError for a projection that the plan lacks."""
        label = wanted.removeprefix("layers.")
        held = {f"{r.site.layer}.{p.role}": (r, p.role) for r in self.routes for p in r.site.projections}
        if label not in held:
            few = ", ".join(list(held)[:6])
            raise ConfigError(
                f"--explain {wanted}: found no such projection, expected one of {few}{nearest(label, held)}"
            )
        route, role = held[label]
        mine = [c for c in route.considered if role in c.roles]
        return tuple(sorted(mine, key=lambda c: (c.rank < 0, c.rank, not c.verdict)))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return {
            "name": self.name,
            "target": self.context.target.name,
            "levers": dict(self.context.levers.items()),
            "routes": [{**r.to_json(), "hash": r.hash} for r in self.routes],
            "refused": [
                {"layers": list(x.layers), "roles": list(x.roles), "arm": x.arm, "sentence": x.sentence}
                for x in self.refused
            ],
            "residency": {
                "steady": self.load.steady,
                "peak": self.load.peak,
                "labels": {x.label: x.bytes for x in self.load.ledger()},
            },
            "kv_tokens": self.kv_tokens,
            "over_budget": self.over_budget,
            "pruned": [
                {"tensor": x.tensor.name, "bytes": x.tensor.bytes, "reason": x.reason} for x in self.load.pruned
            ],
        }


def together(
    found: Iterable[tuple[int, str, tuple[str, ...]]],
) -> list[tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]]:
    """(layer, role, what) triples with equal layers joined first, then roles of equal layers, in order of first
    sight."""
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for layer, role, what in found:
        layers.setdefault((role, what), []).append(layer)
    roles: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for (role, what), held in layers.items():
        roles.setdefault((tuple(dict.fromkeys(held)), what), []).append(role)
    return [(held, tuple(names), what) for (held, what), names in roles.items()]


def explained(name: str, context: Context, routes: Iterable[Route], *, whole: bool = True) -> Explained:
    """The plan of these routes."""
    held = tuple(routes)
    return Explained(name, context, held, load_plan(held), whole)


def span(numbers: Sequence[int]) -> str:
    """`0-2, 4-6`."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in out)
