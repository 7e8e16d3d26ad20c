"""The one predicate: which arm serves which rows of a site.

Everything that loads, dispatches, prunes, forecasts, plans or measures reads the `Route` returned here. Pure: it
sees names, dtypes, shapes, model dimensions, target, levers and preferences, never a GPU, a weight or another route.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from atlas_lab.core.arm import Arm, is_group
from atlas_lab.core.context import Context, Pin
from atlas_lab.core.declare import Bind, Declaration, Derived
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.route import Assignment, Considered, Route, RouteError
from atlas_lab.core.rows import PHASES, Rows, pieces
from atlas_lab.core.verdict import Verdict, no

BUILT_IN = "built-in order"


@dataclass(frozen=True)
class Entry:
    """An arm and where it comes from. `default` says that it may run unnamed: built in, and changes no numbers."""

    arm: Arm
    distribution: str
    version: str
    where: str
    built_in: bool = False

    @property
    def default(self) -> bool:
        return self.built_in and self.arm.accuracy is None


Catalog = Sequence[Entry]


@dataclass
class _Candidate:
    """One arm against one subject: a projection, or the part of the site its group pattern names."""

    entry: Entry
    subject: Projection | Site
    roles: tuple[str, ...]
    verdict: Verdict
    declarations: tuple[Declaration, ...] = field(default=())

    @property
    def arm(self) -> Arm:
        return self.entry.arm


def resolve(site: Site, context: Context, catalog: Catalog) -> Route:
    """The route of `site`.

    Precedence for each projection and M: a pin, most specific first; the orders of `context.preferences` as they
    come; the catalog's own order over arms that may run unnamed. A group's arm wins where it stands before the best
    arm of every member. Raises RouteError for a pin to an unknown or ineligible arm, a pin that serves no M, two
    equally specific pins, an arm whose predicate raised and that something names, or an M that no arm serves.
    """
    names = {e.arm.name for e in catalog}
    for pin in context.preferences.pins:
        if pin.arm not in names:
            raise RouteError(f"{pin}: unknown arm {pin.arm!r}, expected one of {', '.join(sorted(names))}")
    for order in context.preferences.orders:
        for name in order.arms:
            if name not in names:
                raise RouteError(f"{order.origin}: unknown arm {name!r}, expected one of {', '.join(sorted(names))}")
    candidates = [c for e in catalog for c in _consider(e, site, context)]
    pins = {p.role: _pins(p, context, candidates) for p in site.projections}
    cuts = [c.arm.rows for c in candidates] + [p.rows for p in context.preferences.pins if p.rows is not None]
    cuts += [o.rows for o in context.preferences.orders]
    assignments: list[Assignment] = []
    for piece in pieces(context.rows, tuple(cuts)):
        assignments += _assign(site, piece, context, candidates, pins)
    considered = tuple(
        Considered(c.arm.name, c.roles, c.verdict, c.arm.rows, *_rank(c, c.arm.rows, context, catalog))
        for c in candidates
    )
    return Route(site, _merge(assignments), considered, _stamp(context))


def _stamp(context: Context) -> str:
    return repr((context.target, context.levers.items(), context.tuned, context.rows))


def _subjects(arm: Arm, site: Site) -> Iterable[tuple[Projection | Site, tuple[str, ...]]]:
    for pattern in arm.roles:
        if is_group(pattern):
            parts = pattern.split("+")
            members = tuple(p for part in parts for p in site.projections if fnmatchcase(p.role, part))
            if len(members) == len(parts):
                yield Site(members), tuple(p.role for p in members)
    for p in site.projections:
        if any(not is_group(pattern) and fnmatchcase(p.role, pattern) for pattern in arm.roles):
            yield p, (p.role,)


def _consider(entry: Entry, site: Site, context: Context) -> list[_Candidate]:
    found = []
    for subject, roles in _subjects(entry.arm, site):
        c = _Candidate(entry, subject, roles, _verdict(entry.arm, subject, context))
        if c.verdict:
            c.verdict, c.declarations = _finalize(entry.arm, subject, context)
        found.append(c)
    if not found:
        allowed = ", ".join(entry.arm.roles)
        refusal = no("role", f"serves {allowed}", found=", ".join(site.roles), allowed=allowed)
        found.append(_Candidate(entry, site, site.roles, refusal))
    return found


def _error(arm: Arm, what: str, e: Exception) -> Verdict:
    frame = traceback.extract_tb(e.__traceback__)[-1]
    return no("error", f"{what} of arm {arm.name} raised {type(e).__name__}: {e} ({frame.filename}:{frame.lineno})")


def _verdict(arm: Arm, subject: Projection | Site, context: Context) -> Verdict:
    target = context.target
    for kernel in arm.kernels:
        if not target.meets(kernel.needs):
            return no(
                "needs",
                f"kernel {kernel.spec.family} needs {kernel.needs}",
                found=f"{target.name} (compute capability {target.capability[0]}.{target.capability[1]})",
                allowed=str(kernel.needs),
            )
    members = subject.projections if isinstance(subject, Site) else (subject,)
    for p in members:
        if arm.source and p.weight.family != arm.source:
            return no("source", f"starts from {arm.source} weights", found=p.weight.format, allowed=arm.source)
    try:
        verdict = arm.eligible(subject, context)
    except Exception as e:  # an arm's predicate is foreign code: its failure is a verdict
        return _error(arm, "eligible", e)
    if not isinstance(verdict, Verdict):
        return no(
            "error",
            f"eligible of arm {arm.name} returned {verdict!r}",
            found=type(verdict).__name__,
            allowed="a Verdict",
        )
    return verdict


def _finalize(arm: Arm, subject: Projection | Site, context: Context) -> tuple[Verdict, tuple[Declaration, ...]]:
    try:
        declarations = tuple(arm.finalize(subject, context))
    except Exception as e:
        return _error(arm, "finalize", e), ()
    for d in declarations:
        if not isinstance(d, Bind | Derived):
            found = type(d).__name__
            return no("error", f"finalize of arm {arm.name} returned {d!r}", found=found, allowed="Bind or Derived"), ()
    return Verdict(True), declarations


def _pins(p: Projection, context: Context, candidates: list[_Candidate]) -> list[tuple[Pin, _Candidate]]:
    """The pins of a projection, most specific first, each with the candidate it names."""
    out = []
    for pin in sorted(context.preferences.pins, key=lambda x: x.specificity, reverse=True):
        if not pin.matches(p.layer, p.role):
            continue
        mine = [c for c in candidates if c.arm.name == pin.arm and p.role in c.roles]
        chosen = next((c for c in mine if c.verdict), mine[0])
        if not chosen.verdict:
            raise RouteError(f"{p.label}: pinned to {pin.arm}, which is not eligible: {chosen.verdict}")
        served = [r for r in context.rows if _covers(pin, chosen.arm).intersect(r)]
        if not served or (pin.rows and not pin.rows.intersect(chosen.arm.rows)):
            wanted = ", ".join(map(str, context.rows))
            raise RouteError(f"{p.label}: pinned to {pin.arm}, which serves M {chosen.arm.rows}, none of M {wanted}")
        out.append((pin, chosen))
    return out


def _covers(pin: Pin, arm: Arm) -> Rows:
    return (pin.rows and pin.rows.intersect(arm.rows)) or arm.rows


def _pinned(p: Projection, piece: Rows, pins: list[tuple[Pin, _Candidate]]) -> tuple[_Candidate, str] | None:
    hits = [(pin, c) for pin, c in pins if _covers(pin, c.arm).intersect(piece)]
    if not hits:
        return None
    best = [h for h in hits if h[0].specificity == hits[0][0].specificity]
    if len({pin.arm for pin, _ in best}) > 1:
        a, b = best[0][0], best[1][0]
        raise RouteError(f"{p.label}: two equally specific pins for M {piece}, {a} and {b}")
    return hits[0][1], str(hits[0][0])


def _order(role: str, piece: Rows, context: Context, catalog: Iterable[Entry]) -> list[tuple[str, str]]:
    """Arm names for a role and rows, best first, each with what put it there."""
    out: dict[str, str] = {}
    for order in context.preferences.orders:
        if order.matches(role, piece):
            for name in order.arms:
                out.setdefault(name, order.origin)
    for e in catalog:
        if e.default:
            out.setdefault(e.arm.name, BUILT_IN)
    return list(out.items())


def _rank(c: _Candidate, piece: Rows, context: Context, catalog: Iterable[Entry]) -> tuple[int, str]:
    for rank, (name, origin) in enumerate(_order(c.roles[0], piece, context, catalog)):
        if name == c.arm.name:
            return rank, origin
    return -1, ""


def _assign(
    site: Site,
    piece: Rows,
    context: Context,
    candidates: list[_Candidate],
    pins: dict[str, list[tuple[Pin, _Candidate]]],
) -> list[Assignment]:
    entries = list(dict.fromkeys(c.entry for c in candidates))
    best: dict[str, tuple[int, _Candidate, str]] = {}
    groups: list[tuple[int, _Candidate, str]] = []
    for p in site.projections:
        held = _pinned(p, piece, pins[p.role])
        if held is not None:
            best[p.role] = (-1, *held)
            continue
        for rank, (name, origin) in enumerate(_order(p.role, piece, context, entries)):
            mine = [c for c in candidates if c.arm.name == name and p.role in c.roles and c.arm.rows.intersect(piece)]
            for c in mine:
                if c.verdict.code == "error" and origin != BUILT_IN:
                    sentence = f"names arm {name}, whose predicate failed: {c.verdict.sentence}"
                    raise RouteError(f"{p.label}: {origin} {sentence}")
                if c.verdict and len(c.roles) > 1:
                    groups.append((rank, c, origin))
                elif c.verdict and p.role not in best:
                    best[p.role] = (rank, c, origin)
    _spread_pinned_groups(site, best)
    taken: dict[str, tuple[int, _Candidate, str]] = {}
    for rank, c, origin in sorted(groups, key=lambda g: g[0]):
        if all(r not in taken and (r not in best or rank < best[r][0]) for r in c.roles):
            taken.update(dict.fromkeys(c.roles, (rank, c, origin)))
    chosen = {**best, **taken}
    for p in site.projections:
        if p.role not in chosen:
            raise RouteError(_gap(p, piece, candidates))
    out: dict[tuple[str, tuple[str, ...]], Assignment] = {}
    for p in site.projections:
        _, c, origin = chosen[p.role]
        if p.role not in c.roles[:1] and (c.arm.name, c.roles) in out:
            continue
        out[c.arm.name, c.roles] = Assignment(piece, c.roles, c.arm.name, c.arm.version, origin, c.declarations)
    return list(out.values())


def _spread_pinned_groups(site: Site, best: dict[str, tuple[int, _Candidate, str]]) -> None:
    """A pin of one member to a group's arm pins the others; a member pinned elsewhere contradicts it."""
    for role, (rank, c, origin) in list(best.items()):
        if rank != -1:
            continue
        for other in c.roles:
            held = best.get(other)
            if held and held[0] == -1 and held[1] is not c:
                label = f"layers.{site.layer}.{other}"
                raise RouteError(f"{label}: {held[2]} contradicts {origin}, whose arm serves {role} too")
            best[other] = (rank, c, origin)


def _gap(p: Projection, piece: Rows, candidates: list[_Candidate]) -> str:
    mine = [c for c in candidates if p.role in c.roles and c.verdict.code != "role"]
    said = (
        "; ".join(f"{c.arm.name}: " + (f"serves M {c.arm.rows}" if c.verdict else str(c.verdict)) for c in mine)
        or "no arm names this role"
    )
    return f"{p.label}: no arm serves M {piece} of its {p.weight.format} weight ({said})"


def _merge(assignments: list[Assignment]) -> tuple[Assignment, ...]:
    """Neighbouring ranges with the same answer become one."""
    out: list[Assignment] = []
    for a in sorted(assignments, key=lambda a: (a.roles, a.rows)):
        last = out[-1] if out else None
        same: Any = last and (last.roles, last.arm, last.origin) == (a.roles, a.arm, a.origin)
        if last and same and last.rows.last + 1 == a.rows.first:
            rows = Rows(last.rows.first, a.rows.last)
            out[-1] = Assignment(rows, a.roles, a.arm, a.version, a.origin, a.declarations)
        else:
            out.append(a)
    order = {a.roles: i for i, a in reversed(list(enumerate(assignments)))}
    return tuple(sorted(out, key=lambda a: (order[a.roles], a.rows)))


__all__ = ["BUILT_IN", "PHASES", "Catalog", "Entry", "resolve"]
