"""The one predicate: which arm serves which rows of a site.

Everything that loads, dispatches, prunes, forecasts, plans or measures reads the `Route` returned here. Pure: it
sees names, dtypes, shapes, model dimensions, target, levers and preferences, never a GPU, a weight or another route.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from atlas_lab.core.arm import Arm, is_group
from atlas_lab.core.context import Context, Pin
from atlas_lab.core.declare import Bind, Declaration, Derived
from atlas_lab.core.levers import nearest
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


@dataclass(eq=False)
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

    @property
    def serves_alone(self) -> bool:
        return self.verdict.ok and len(self.roles) == 1


class _Offer(NamedTuple):
    """A candidate for a projection: its place in the order (-1 for a pin), and what put it there."""

    rank: int
    origin: str
    candidate: _Candidate


def resolve(site: Site, context: Context, catalog: Catalog) -> Route:
    """The route of `site`.

    Precedence for each projection and M: a pin, most specific first; the orders of `context.preferences` as they
    come; the catalog's own order over arms that may run unnamed. A group's arm wins where it stands before the best
    arm of every member. Raises RouteError for a pin to an unknown or ineligible arm, a pin that serves no M, two
    equally specific pins, an arm whose predicate raised and that something names, or an M that no arm serves.
    """
    _known(context, sorted(e.arm.name for e in catalog))
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
    return Route(site, _merge(site, assignments), considered, _stamp(context))


def _known(context: Context, names: list[str]) -> None:
    named = [(str(pin), pin.arm) for pin in context.preferences.pins]
    named += [(order.origin, name) for order in context.preferences.orders for name in order.arms]
    for where, name in named:
        if name not in names:
            known = ", ".join(names)
            raise RouteError(f"{where}: unknown arm {name!r}, expected one of {known}{nearest(name, names)}")


def _stamp(context: Context) -> str:
    return repr((context.target, context.levers.items(), context.tuned, context.rows))


def _subjects(arm: Arm, site: Site) -> Iterable[tuple[Projection | Site, tuple[str, ...]]]:
    for pattern in arm.roles:
        if is_group(pattern):
            matches = [[p for p in site.projections if fnmatchcase(p.role, part)] for part in pattern.split("+")]
            members = tuple(m[0] for m in matches if len(m) == 1)
            if len(set(members)) == len(matches):
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
    said = " ".join(str(e).split())
    return no("error", f"{what} of arm {arm.name} raised {type(e).__name__}: {said} ({frame.filename}:{frame.lineno})")


def _nonsense(arm: Arm, what: str, made: Any, allowed: str) -> Verdict:
    found = f"{type(made).__name__} {made!r}"
    return no("error", f"{what} of arm {arm.name} returned the wrong kind of value", found=found, allowed=allowed)


def _verdict(arm: Arm, subject: Projection | Site, context: Context) -> Verdict:
    target = context.target
    for kernel in arm.kernels:
        try:
            needs = kernel.needs
        except Exception as e:
            return _error(arm, f"kernel {kernel.spec.family}", e)
        if not target.meets(needs):
            return no(
                "needs",
                f"kernel {kernel.spec.family} needs {needs}",
                found=f"{target.name} (compute capability {target.capability[0]}.{target.capability[1]})",
                allowed=str(needs),
            )
    members = subject.projections if isinstance(subject, Site) else (subject,)
    for p in members:
        if arm.source and p.weight.family != arm.source:
            return no("source", f"starts from {arm.source} weights", found=p.weight.format, allowed=arm.source)
    try:
        verdict = arm.eligible(subject, context)
    except Exception as e:  # an arm's predicate is foreign code: its failure is a verdict
        return _error(arm, "eligible", e)
    return verdict if isinstance(verdict, Verdict) else _nonsense(arm, "eligible", verdict, "yes() or no(...)")


def _finalize(arm: Arm, subject: Projection | Site, context: Context) -> tuple[Verdict, tuple[Declaration, ...]]:
    try:
        made = arm.finalize(subject, context)
        declarations = tuple(made) if isinstance(made, Iterable) else None
    except Exception as e:
        return _error(arm, "finalize", e), ()
    if declarations is None:
        return _nonsense(arm, "finalize", made, "a list of Bind and Derived"), ()
    keys = [d.key for d in declarations if isinstance(d, Bind | Derived)]
    if len(keys) < len(declarations):
        wrong = next(d for d in declarations if not isinstance(d, Bind | Derived))
        return _nonsense(arm, "finalize", wrong, "Bind or Derived"), ()
    if len(set(keys)) < len(keys):
        return no("error", f"finalize of arm {arm.name} declares a key twice", found=keys, allowed="unique keys"), ()
    return Verdict(True), declarations


def _pins(p: Projection, context: Context, candidates: list[_Candidate]) -> list[tuple[Pin, _Candidate]]:
    """The pins of a projection, most specific first, each with the candidate it names."""
    out = []
    for pin in sorted(context.preferences.pins, key=lambda x: x.specificity, reverse=True):
        if not pin.matches(p.layer, p.role):
            continue
        named = [c for c in candidates if c.arm.name == pin.arm]
        mine = [c for c in named if p.role in c.roles]
        chosen = next((c for c in mine if c.verdict), (mine or named)[0])
        if not mine or not chosen.verdict:
            why = chosen.verdict if mine else f"serves {', '.join(chosen.arm.roles)}"
            raise RouteError(f"{p.label}: {pin}, which is not eligible: {why}")
        served = [r for r in context.rows if _covers(pin, chosen.arm).intersect(r)]
        if not served or (pin.rows and not pin.rows.intersect(chosen.arm.rows)):
            wanted = ", ".join(map(str, context.rows))
            asked = f" and is pinned for M {pin.rows}" if pin.rows else ""
            raise RouteError(f"{p.label}: {pin}, which serves M {chosen.arm.rows}{asked}, none of M {wanted}")
        out.append((pin, chosen))
    return out


def _covers(pin: Pin, arm: Arm) -> Rows:
    return (pin.rows and pin.rows.intersect(arm.rows)) or arm.rows


def _pinned(p: Projection, piece: Rows, pins: list[tuple[Pin, _Candidate]]) -> _Offer | None:
    hits = [(pin, c) for pin, c in pins if _covers(pin, c.arm).intersect(piece)]
    if not hits:
        return None
    best = [h for h in hits if h[0].specificity == hits[0][0].specificity]
    if len({pin.arm for pin, _ in best}) > 1:
        a, b = best[0][0], best[1][0]
        raise RouteError(f"{p.label}: two equally specific pins for M {piece}, {a} and {b}")
    return _Offer(-1, str(hits[0][0]), hits[0][1])


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
    offers = {p.role: _offers(p, piece, context, candidates, entries) for p in site.projections}
    chosen = _held(site, piece, pins)
    for group in _groups(site, offers):
        if not any(role in chosen for role in group.candidate.roles):
            chosen.update(dict.fromkeys(group.candidate.roles, group))
    for p in site.projections:
        best = chosen.get(p.role) or next((o for o in offers[p.role] if o.candidate.serves_alone), None)
        if best is None:
            raise RouteError(_gap(p, piece, candidates))
        chosen[p.role] = best
    picked: dict[_Candidate, str] = {}
    for role in site.roles:
        picked.setdefault(chosen[role].candidate, chosen[role].origin)
    return [Assignment(piece, c.roles, c.arm.name, c.arm.version, why, c.declarations) for c, why in picked.items()]


def _offers(
    p: Projection, piece: Rows, context: Context, candidates: list[_Candidate], entries: list[Entry]
) -> list[_Offer]:
    """What the orders offer a projection for these rows, best first; eligible or not."""
    out = []
    for rank, (name, origin) in enumerate(_order(p.role, piece, context, entries)):
        for c in candidates:
            if c.arm.name == name and p.role in c.roles and c.arm.rows.intersect(piece):
                if c.verdict.code == "error" and origin != BUILT_IN:
                    raise RouteError(f"{p.label}: {origin} names arm {name}, which failed: {c.verdict.sentence}")
                out.append(_Offer(rank, origin, c))
    return out


def _groups(site: Site, offers: dict[str, list[_Offer]]) -> list[_Offer]:
    """Groups that stand, in the order of every member, no lower than what would serve that member alone."""
    out = []
    for role in site.roles:
        for offer in offers[role]:
            c = offer.candidate
            if c.verdict and len(c.roles) > 1 and c.roles[0] == role:
                firsts = (_first(offers[r], c) for r in c.roles)
                if all(o is not None and o.candidate.arm is c.arm for o in firsts):
                    out.append(offer)
    return sorted(out, key=lambda o: o.rank)


def _first(offers: list[_Offer], group: _Candidate) -> _Offer | None:
    return next((o for o in offers if o.candidate is group or o.candidate.serves_alone), None)


def _held(site: Site, piece: Rows, pins: dict[str, list[tuple[Pin, _Candidate]]]) -> dict[str, _Offer]:
    """What pins decide. A pin of one member to a group's arm pins the others; a member pinned elsewhere contradicts."""
    held = {}
    for p in site.projections:
        offer = _pinned(p, piece, pins[p.role])
        if offer is not None:
            held[p.role] = offer
    for role, offer in list(held.items()):
        for other in offer.candidate.roles:
            theirs = held.setdefault(other, offer)
            if theirs.candidate is not offer.candidate:
                label = f"layers.{site.layer}.{other}"
                raise RouteError(f"{label}: {theirs.origin} contradicts {offer.origin}, whose arm serves {role} too")
    return held


def _gap(p: Projection, piece: Rows, candidates: list[_Candidate]) -> str:
    mine = [c for c in candidates if p.role in c.roles and c.verdict.code != "role"]
    said = (
        "; ".join(f"{c.arm.name}: " + (f"serves M {c.arm.rows}" if c.verdict else str(c.verdict)) for c in mine)
        or "no arm names this role"
    )
    return f"{p.label}: no arm serves M {piece} of its {p.weight.format} weight ({said})"


def _merge(site: Site, assignments: list[Assignment]) -> tuple[Assignment, ...]:
    """Neighbouring ranges with the same answer become one; in the order of the site's roles, then of rows."""
    out: list[Assignment] = []
    for a in sorted(assignments, key=lambda a: (a.roles, a.rows)):
        last = out[-1] if out else None
        same: Any = last and (last.roles, last.arm, last.origin) == (a.roles, a.arm, a.origin)
        if last and same and last.rows.last + 1 == a.rows.first:
            rows = Rows(last.rows.first, a.rows.last)
            out[-1] = Assignment(rows, a.roles, a.arm, a.version, a.origin, a.declarations)
        else:
            out.append(a)
    return tuple(sorted(out, key=lambda a: (min(map(site.roles.index, a.roles)), a.rows)))


__all__ = ["BUILT_IN", "PHASES", "Catalog", "Entry", "resolve"]
