"""The answer of `resolve`: which arm serves which rows of a site, and what every arm had to say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.projection import Site, label_of
from atlas_lab.core.rows import Rows
from atlas_lab.core.verdict import Verdict


class RouteError(ValueError):
    """A site that cannot be served as asked; one sentence."""


class GapError(RouteError):
    """Rows that no arm serves; `route` is what is left of the route without them."""

    def __init__(self, route: Route, gaps: tuple[Gap, ...]) -> None:
        super().__init__(str(gaps[0]))
        self.route, self.gaps = route, gaps


@dataclass(frozen=True)
class Gap:
    """Rows of a projection that no arm serves; `reason` is what every arm that names its role had to say."""

    layer: int
    role: str
    rows: Rows
    format: str
    reason: str

    def __str__(self) -> str:
        label = label_of(self.layer, self.role)
        return f"{label}: no arm serves M {self.rows} of its {self.format} weight ({self.reason})"


@dataclass(frozen=True)
class Considered:
    """One arm's verdict on one projection (or group): `roles` it would serve, `rank` its place in the order,
    `origin` what put it there ("" for arms that nothing named and that run only where something does),
    `declarations` what it would read and build, and `note` what the lever `row_invariant` did with it."""

    arm: str
    roles: tuple[str, ...]
    verdict: Verdict
    rows: Rows
    rank: int
    origin: str
    declarations: tuple[Declaration, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Passed:
    """Rows of a role that arm `by` serves because the lever `row_invariant` is on; `arm` would come first."""

    rows: Rows
    role: str
    arm: str
    by: str


@dataclass(frozen=True)
class Assignment:
    """`arm` serves `roles` of the site for `rows`, because of `origin`."""

    rows: Rows
    roles: tuple[str, ...]
    arm: str
    version: str
    origin: str
    declarations: tuple[Declaration, ...]


@dataclass(frozen=True)
class Route:
    """Serialisable: `to_json`. `hash` covers arms, versions, declarations, levers, target and tuned table. `passed` is
    what the lever `row_invariant` moved."""

    site: Site
    assignments: tuple[Assignment, ...]
    considered: tuple[Considered, ...]
    stamp: str
    passed: tuple[Passed, ...] = ()

    def at(self, role: str, m: int) -> Assignment:
        """What serves `role` for `m` rows; raises RouteError if nothing does."""
        for a in self.assignments:
            if role in a.roles and m in a.rows:
                return a
        raise RouteError(f"{label_of(self.site.layer, role)}: no arm was resolved for M={m}")

    def of(self, role: str) -> tuple[Assignment, ...]:
        return tuple(a for a in self.assignments if role in a.roles)

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(a.arm for a in self.assignments))

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What the route reads and builds, each once, in order of first need."""
        out: dict[Any, Declaration] = {}
        for a in self.assignments:
            for d in a.declarations:
                out.setdefault(d if isinstance(d, Bind) else d.identity, d)
        return tuple(out.values())

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps([self.stamp, self.to_json()], sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain data: the assignments with their declarations, not the refusals."""
        return {
            "site": self.site.label,
            "assignments": [
                {
                    "rows": [a.rows.first, a.rows.last],
                    "roles": list(a.roles),
                    "arm": a.arm,
                    "version": a.version,
                    "origin": a.origin,
                    "weights": [_declaration(d) for d in a.declarations],
                }
                for a in self.assignments
            ],
        }

    def refusals(self) -> tuple[Considered, ...]:
        """Every arm that said no to a role it names."""
        return tuple(c for c in self.considered if not c.verdict and c.verdict.code != "role")


def _declaration(d: Declaration) -> dict[str, Any]:
    kind, weights = ("bind", (d.source,)) if isinstance(d, Bind) else ("derived", d.weights)
    return {
        "kind": kind,
        "key": d.key,
        "formats": [w.format for w in weights],
        "tensors": {f: str(t) for f, t in d.tensors.items()},
    }
