"""The one predicate: which arm serves which rows of a site.

Everything that loads, dispatches, prunes, forecasts, plans or measures reads the `Route` returned here. Pure: it
sees names, dtypes, shapes, model dimensions, target, levers and preferences, never a GPU, a weight or another route.
"""

from __future__ import annotations

from collections.abc import Iterable

from atlas_lab.core.candidate import Candidate, Catalog, Entry, consider, subjects_of, unmet_needs
from atlas_lab.core.choose import Choices, choose, pins_of
from atlas_lab.core.context import Context
from atlas_lab.core.levers import nearest
from atlas_lab.core.orders import BUILT_IN, Orders
from atlas_lab.core.projection import Site
from atlas_lab.core.route import Assignment, Considered, Gap, GapError, Route, RouteError
from atlas_lab.core.rows import PHASES, Rows


def resolve(site: Site, context: Context, catalog: Catalog) -> Route:
    """The route of `site`.

    Precedence for each projection and M: a pin, most specific first; the orders of `context.preferences` as they
    come; the catalog's own order over arms that may run unnamed, some of which the lever `row_invariant` passes over
    for M up to 16 (see `invariance`). A group's arm wins where it stands before the best arm of every member. Raises
    RouteError for a pin to an unknown or ineligible arm, a pin that serves no M, two equally specific pins and an arm
    whose predicate raised and that something names; GapError, a RouteError with the rest of the route, for an M that
    no arm serves.
    """
    return resolve_all((site,), context, catalog)[0]


def resolve_all(
    sites: Iterable[Site], context: Context, catalog: Catalog, *, gaps: list[Gap] | None = None
) -> tuple[Route, ...]:
    """`resolve` of each site in turn, with what no site changes worked out once.

    With `gaps`, rows that no arm serves are appended to it, and the routes lack them; without, GapError is raised.
    """
    one = _Resolver(context, catalog)
    out = []
    for site in sites:
        route, missing = one.route(site)
        if missing and gaps is None:
            raise GapError(route, missing)
        if gaps is not None:
            gaps += missing
        out.append(route)
    return tuple(out)


class _Resolver:
    """A context and a catalog, with what follows from them alone."""

    def __init__(self, context: Context, catalog: Catalog) -> None:
        self.context, self.catalog = context, catalog
        _known(context, sorted(e.arm.name for e in catalog))
        self.stamp = repr((context.target, context.levers.items(), context.table.digest, context.rows))
        self.orders = Orders(context, catalog)
        self.unmet = [unmet_needs(e.arm, context.target) for e in catalog]
        self.subjects: dict[tuple[str, ...], list[tuple[tuple[int, ...], ...]]] = {}
        self.choices: dict[object, Choices] = {}

    def route(self, site: Site) -> tuple[Route, tuple[Gap, ...]]:
        """Every arm is asked about every site; equal answers, as of a model's equal layers, are weighed once."""
        candidates = self._candidates(site)
        pins = {p.role: pins_of(p, self.context, candidates) for p in site.projections}
        answers = tuple("yes" if c.verdict else c.verdict.code == "error" for c in candidates)
        asked = (site.roles, answers, tuple(tuple(mine) for mine in pins.values()))
        if asked not in self.choices:
            self.choices[asked] = choose(site, self.context, candidates, pins, self.orders)
        made = self.choices[asked]
        assignments = tuple(
            Assignment(
                c.rows,
                c.roles,
                candidates[c.candidate].arm.name,
                candidates[c.candidate].arm.version,
                c.origin,
                candidates[c.candidate].declarations,
            )
            for c in made.chosen
        )
        considered = tuple(
            Considered(c.arm.name, c.roles, c.verdict, c.arm.rows, *place, c.declarations, note)
            for c, place, note in zip(candidates, made.places, made.notes, strict=True)
        )
        missing = tuple(
            Gap(site.layer, role, rows, site[role].weight.format, _reason(role, rows, considered, site))
            for role, rows in made.gaps
        )
        return Route(site, assignments, considered, self.stamp, made.passed), missing

    def _candidates(self, site: Site) -> list[Candidate]:
        if site.roles not in self.subjects:
            self.subjects[site.roles] = [subjects_of(e.arm, site.roles) for e in self.catalog]
        found = zip(self.catalog, self.subjects[site.roles], self.unmet, strict=True)
        return [c for e, subjects, unmet in found for c in consider(e, subjects, unmet, site, self.context)]


def _known(context: Context, names: list[str]) -> None:
    named = [(str(pin), pin.arm) for pin in context.preferences.pins]
    named += [(order.origin, name) for order in context.preferences.orders for name in order.arms]
    for where, name in named:
        if name not in names:
            known = ", ".join(names)
            raise RouteError(f"{where}: unknown arm {name!r}, expected one of {known}{nearest(name, names)}")


def _reason(role: str, rows: Rows, considered: Iterable[Considered], site: Site) -> str:
    """What every arm that names the role had to say; those that start from another format only if no other does."""
    mine = [c for c in considered if role in c.roles and c.verdict.code != "role"]
    said: dict[str, list[str]] = {}
    for c in mine:
        if c.verdict and c.rows.intersect(rows) and c.rank < 0:
            said.setdefault("runs only where an order or pin names it", []).append(c.arm)
        elif c.verdict and c.rows.intersect(rows):
            said.setdefault(f"serves {'+'.join(c.roles)} in one call alone", []).append(c.arm)
        elif c.verdict:
            said.setdefault(f"serves M {c.rows}", []).append(c.arm)
        elif c.verdict.code != "source":
            said.setdefault(str(c.verdict), []).append(c.arm)
    if mine and not said:
        return f"no arm starts from {site[role].weight.format} weights"
    return "; ".join(f"{', '.join(arms)}: {why}" for why, arms in said.items()) or "no arm names this role"


__all__ = ["BUILT_IN", "PHASES", "Catalog", "Entry", "resolve", "resolve_all"]
