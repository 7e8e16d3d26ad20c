"""Who wins at a site, once every arm has said whether it may serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atlas_lab.core.arm import Arm
from atlas_lab.core.candidate import Candidate
from atlas_lab.core.context import Context, Pin
from atlas_lab.core.invariance import Invariance
from atlas_lab.core.orders import BUILT_IN, DEFAULTS, Offer, Orders
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.route import Passed, RouteError
from atlas_lab.core.rows import Rows, pieces

Pins = dict[str, list[tuple[Pin, int]]]


@dataclass(frozen=True)
class Choice:
    """Candidate `candidate`, by its number, serves `roles` for `rows` because of `origin`."""

    rows: Rows
    roles: tuple[str, ...]
    candidate: int
    origin: str


@dataclass(frozen=True)
class Choices:
    """What was chosen at a site, the rows of a role that nothing serves, each candidate's place in the order, what the
    lever `row_invariant` has to say of each, and what it moved.

    It depends on the site's roles, on which candidates said yes and on the pins, on nothing else about the site.
    """

    chosen: tuple[Choice, ...]
    gaps: tuple[tuple[str, Rows], ...]
    places: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    passed: tuple[Passed, ...]


def choose(site: Site, context: Context, candidates: list[Candidate], pins: Pins, orders: Orders) -> Choices:
    """Raises RouteError for two pins that contradict each other, and for an arm that an order names and that raised."""
    cuts = [c.arm.rows for c in candidates] + [p.rows for p in context.preferences.pins if p.rows is not None]
    cuts += [o.rows for o in context.preferences.orders]
    invariance = Invariance(context, candidates)
    chosen: list[Choice] = []
    gaps: list[Choice] = []
    moved: list[Passed] = []
    for piece in pieces(context.rows, tuple(cuts)):
        offered = {p.role: _offers(p, piece, candidates, orders) for p in site.projections}
        named = {o.candidate for offers in offered.values() for o in offers if o.origin not in DEFAULTS}
        kept = {role: invariance.kept(role, piece, offers, named) for role, offers in offered.items()}
        served, missing = _assign(site, piece, candidates, pins, kept)
        if kept != offered:
            before, _ = _assign(site, piece, candidates, pins, offered)
            moved += _moved(before, served, candidates)
        chosen += served
        gaps += [Choice(piece, (role,), -1, "") for role in missing]
    places = tuple(orders.places(c.roles[0], c.arm.rows).get(c.arm.name, (-1, "")) for c in candidates)
    notes = []
    for i in range(len(candidates)):
        notes.append(invariance.note(i, [c.rows for c in chosen if c.candidate == i and c.origin in DEFAULTS]))
    missed = tuple((g.roles[0], g.rows) for g in _merge(site, gaps))
    return Choices(_merge(site, chosen), missed, places, tuple(notes), _joined(moved))


def _moved(before: list[Choice], after: list[Choice], candidates: list[Candidate]) -> list[Passed]:
    """The roles that another arm serves."""
    was = {role: candidates[c.candidate].arm.name for c in before for role in c.roles}
    now = {role: candidates[c.candidate].arm.name for c in after for role in c.roles}
    rows = after[0].rows
    return [Passed(rows, role, was[role], arm) for role, arm in now.items() if was[role] != arm]


def _joined(moved: list[Passed]) -> tuple[Passed, ...]:
    """Neighbouring ranges with the same answer become one."""
    out: list[Passed] = []
    for p in sorted(moved, key=lambda p: (p.role, p.rows)):
        last = out[-1] if out else None
        if last and replace(last, rows=p.rows) == p and last.rows.last + 1 == p.rows.first:
            out[-1] = replace(p, rows=Rows(last.rows.first, p.rows.last))
        else:
            out.append(p)
    return tuple(out)


def pins_of(p: Projection, context: Context, candidates: list[Candidate]) -> list[tuple[Pin, int]]:
    """The pins of a projection, most specific first, each with the candidate it names; raises RouteError for one that
    is not eligible and for one that serves no M."""
    out = []
    for pin in sorted(context.preferences.pins, key=lambda x: x.specificity, reverse=True):
        if not pin.matches(p.layer, p.role):
            continue
        named = [i for i, c in enumerate(candidates) if c.arm.name == pin.arm]
        mine = [i for i in named if p.role in candidates[i].roles]
        number = next((i for i in mine if candidates[i].verdict), (mine or named)[0])
        chosen = candidates[number]
        if not mine or not chosen.verdict:
            why = chosen.verdict if mine else f"serves {', '.join(chosen.arm.roles)}"
            raise RouteError(f"{p.label}: {pin}, which is not eligible: {why}")
        served = [r for r in context.rows if _covers(pin, chosen.arm).intersect(r)]
        if not served or (pin.rows and not pin.rows.intersect(chosen.arm.rows)):
            wanted = ", ".join(map(str, context.rows))
            asked = f" and is pinned for M {pin.rows}" if pin.rows else ""
            raise RouteError(f"{p.label}: {pin}, which serves M {chosen.arm.rows}{asked}, none of M {wanted}")
        out.append((pin, number))
    return out


def _covers(pin: Pin, arm: Arm) -> Rows:
    return (pin.rows and pin.rows.intersect(arm.rows)) or arm.rows


def _pinned(p: Projection, piece: Rows, pins: list[tuple[Pin, int]], candidates: list[Candidate]) -> Offer | None:
    hits = [(pin, i) for pin, i in pins if _covers(pin, candidates[i].arm).intersect(piece)]
    if not hits:
        return None
    best = [h for h in hits if h[0].specificity == hits[0][0].specificity]
    if len({pin.arm for pin, _ in best}) > 1:
        a, b = best[0][0], best[1][0]
        raise RouteError(f"{p.label}: two equally specific pins for M {piece}, {a} and {b}")
    return Offer(-1, str(hits[0][0]), hits[0][1])


def _assign(
    site: Site, piece: Rows, candidates: list[Candidate], pins: Pins, offers: dict[str, list[Offer]]
) -> tuple[list[Choice], list[str]]:
    """What serves these rows, and the roles that nothing does."""
    chosen = _held(site, piece, pins, candidates)
    for group in _groups(site, offers, candidates):
        roles = candidates[group.candidate].roles
        if not any(role in chosen for role in roles):
            chosen.update(dict.fromkeys(roles, group))
    missing = []
    for role in site.roles:
        best = chosen.get(role) or next((o for o in offers[role] if candidates[o.candidate].serves_alone), None)
        if best is None:
            missing.append(role)
        else:
            chosen[role] = best
    picked: dict[int, str] = {}
    for role in site.roles:
        if role in chosen:
            picked.setdefault(chosen[role].candidate, chosen[role].origin)
    return [Choice(piece, candidates[i].roles, i, why) for i, why in picked.items()], missing


def _offers(p: Projection, piece: Rows, candidates: list[Candidate], orders: Orders) -> list[Offer]:
    """What the orders offer a projection for these rows, best first; eligible or not."""
    places = orders.places(p.role, piece)
    out = []
    for i, c in enumerate(candidates):
        place = places.get(c.arm.name)
        if place is not None and p.role in c.roles and c.arm.rows.intersect(piece):
            out.append(Offer(*place, i))
    out.sort(key=lambda o: o.rank)
    for o in out:
        verdict = candidates[o.candidate].verdict
        if verdict.code == "error" and o.origin != BUILT_IN:
            name = candidates[o.candidate].arm.name
            raise RouteError(f"{p.label}: {o.origin} names arm {name}, which failed: {verdict.sentence}")
    return out


def _groups(site: Site, offers: dict[str, list[Offer]], candidates: list[Candidate]) -> list[Offer]:
    """Groups that stand, in the order of every member, no lower than what would serve that member alone."""

    def first(role: str, group: int) -> Candidate | None:
        mine = (o.candidate for o in offers[role])
        return next((candidates[i] for i in mine if i == group or candidates[i].serves_alone), None)

    out = []
    for role in site.roles:
        for offer in offers[role]:
            c = candidates[offer.candidate]
            if c.verdict and len(c.roles) > 1 and c.roles[0] == role:
                firsts = [first(r, offer.candidate) for r in c.roles]
                if all(f is not None and f.arm is c.arm for f in firsts):
                    out.append(offer)
    return sorted(out, key=lambda o: o.rank)


def _held(site: Site, piece: Rows, pins: Pins, candidates: list[Candidate]) -> dict[str, Offer]:
    """What pins decide. A pin of one member to a group's arm pins the others; a member pinned elsewhere contradicts."""
    held = {}
    for p in site.projections:
        offer = _pinned(p, piece, pins[p.role], candidates)
        if offer is not None:
            held[p.role] = offer
    for role, offer in list(held.items()):
        for other in candidates[offer.candidate].roles:
            theirs = held.setdefault(other, offer)
            if theirs.candidate != offer.candidate:
                label = site[other].label
                raise RouteError(f"{label}: {theirs.origin} contradicts {offer.origin}, whose arm serves {role} too")
    return held


def _merge(site: Site, choices: list[Choice]) -> tuple[Choice, ...]:
    """Neighbouring ranges with the same answer become one; in the order of the site's roles, then of rows."""
    out: list[Choice] = []
    for c in sorted(choices, key=lambda c: (c.roles, c.rows)):
        last = out[-1] if out else None
        if (
            last
            and (last.roles, last.candidate, last.origin) == (c.roles, c.candidate, c.origin)
            and last.rows.last + 1 == c.rows.first
        ):
            out[-1] = Choice(Rows(last.rows.first, c.rows.last), c.roles, c.candidate, c.origin)
        else:
            out.append(c)
    return tuple(sorted(out, key=lambda c: (min(map(site.roles.index, c.roles)), c.rows)))
