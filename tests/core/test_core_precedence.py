"""Who wins, against a second and plainer telling of it: one M at a time, no ranges, no pieces."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import inf

from core_fakes import Fake, catalog, context, site
from hypothesis import event, given, settings
from hypothesis import strategies as st

from atlas_lab.core.context import Context, Order, Pin
from atlas_lab.core.projection import Site
from atlas_lab.core.resolve import BUILT_IN, Entry, resolve
from atlas_lab.core.route import RouteError
from atlas_lab.core.rows import Rows
from atlas_lab.core.verdict import no, yes

ROLES = ("ffn.gate", "ffn.up", "ffn.down")
PATTERNS = (*ROLES, "ffn.*", "*", "ffn.?p", "attn.*")
GROUPS = ("ffn.gate+ffn.up", "ffn.gate+ffn.up+ffn.down", "ffn.up+ffn.down", "attn.q+attn.k")
LAST = 5


class RefusedError(Exception):
    """The plain telling says that planning fails."""


def fail(*_: object) -> None:
    raise ZeroDivisionError("no")


def told(s: Site, ctx: Context, entries: list[Entry], m: int) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Arm, roles of its call, and origin, by role."""
    by_name = {e.arm.name: e.arm for e in entries}

    def calls(name: str, role: str) -> list[tuple[str, ...]]:
        """The role tuples under which this arm would serve `role`, groups in the order of its patterns."""
        arm = by_name[name]
        out = [tuple(g.split("+")) for g in arm.roles if "+" in g and set(g.split("+")) <= set(s.roles)]
        if any("+" not in g and fnmatchcase(role, g) for g in arm.roles):
            out.append((role,))
        return [roles for roles in out if role in roles]

    def answer(name: str) -> str:
        verdict = by_name[name]._verdict  # type: ignore[attr-defined]
        return "error" if verdict is fail else "yes" if verdict else "no"

    def order(role: str) -> dict[str, str]:
        names: dict[str, str] = {}
        for o in ctx.preferences.orders:
            if fnmatchcase(role, o.pattern) and m in o.rows:
                for name in o.arms:
                    names.setdefault(name, o.origin)
        for first in (True, False):
            for e in entries:
                if e.built_in and e.arm.accuracy is None and (ctx.target.arch in e.arm.first_on) == first:
                    names.setdefault(e.arm.name, BUILT_IN)
        return names

    held: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for role in s.roles:
        hits = []
        for pin in ctx.preferences.pins:
            if pin.layer not in (None, s.layer) or not fnmatchcase(role, pin.pattern):
                continue
            mine = calls(pin.arm, role)
            if not mine or answer(pin.arm) != "yes":
                raise RefusedError
            covered = [x for x in range(1, LAST + 1) if x in by_name[pin.arm].rows and (not pin.rows or x in pin.rows)]
            if not any(x in r for x in covered for r in ctx.rows):
                raise RefusedError
            if m in covered:
                hits.append((2 * (pin.layer is not None) + ("*" not in pin.pattern and "?" not in pin.pattern), pin))
        if hits:
            most = max(score for score, _ in hits)
            best = [pin for score, pin in hits if score == most]
            if len({pin.arm for pin in best}) > 1:
                raise RefusedError
            held[role] = (best[0].arm, calls(best[0].arm, role)[0], str(best[0]))
    for role in s.roles:
        for name, origin in order(role).items():
            if answer(name) == "error" and origin != BUILT_IN and calls(name, role) and m in by_name[name].rows:
                raise RefusedError
    for name, roles, origin in list(held.values()):
        for other in roles:
            if other in held and held[other][:2] != (name, roles):
                raise RefusedError
            held.setdefault(other, (name, roles, origin))

    def place(name: str, role: str) -> float:
        return list(order(role)).index(name) if name in order(role) else inf

    def serves(name: str) -> bool:
        return answer(name) == "yes" and m in by_name[name].rows

    alone = {
        role: min((place(n, role) for n in order(role) if serves(n) and (role,) in calls(n, role)), default=inf)
        for role in s.roles
    }
    groups = []
    for role in s.roles:
        for name in order(role):
            for roles in calls(name, role):
                if len(roles) > 1 and roles[0] == role and serves(name):
                    groups.append((place(name, role), name, roles))
    out = dict(held)
    for _, name, roles in sorted(groups, key=lambda g: g[0]):
        if all(r not in out and place(name, r) <= alone[r] and place(name, r) < inf for r in roles):
            out.update({r: (name, roles, order(roles[0])[name]) for r in roles})
    for role in s.roles:
        if role not in out:
            if alone[role] == inf:
                raise RefusedError
            name = list(order(role))[int(alone[role])]
            out[role] = (name, (role,), order(role)[name])
    return {
        role: (name, roles, out[next(r for r in s.roles if r in roles)][2]) for role, (name, roles, _) in out.items()
    }


@st.composite
def ranges(draw: st.DrawFn) -> Rows:
    first = draw(st.integers(1, LAST))
    return Rows(first, draw(st.integers(first, LAST)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Site, Context, list[Entry]]:
    s = site(*draw(st.sampled_from([ROLES[:1], ROLES[:2], ROLES])))
    names = [f"a{i}" for i in range(draw(st.integers(1, 5)))]
    verdicts = st.sampled_from([yes(), yes(), yes(), yes(), no("k", "never"), fail])
    entries = []
    for name in names:
        patterns = draw(st.lists(st.sampled_from((*GROUPS[:3], "*", "ffn.*", *PATTERNS)), min_size=1, max_size=2))
        arm = Fake(
            name,
            sorted(set(patterns), key=lambda p: "+" not in p),
            Rows(1, LAST) if draw(st.booleans()) else draw(ranges()),
            lossy=draw(st.sampled_from([False, False, True])),
            verdict=draw(verdicts),
        )
        arm.first_on = draw(st.sampled_from([(), (), ("sm_80",), ("sm_80", "sm_90a")]))
        entries.append(Entry(arm, "d", "1", "w", built_in=draw(st.sampled_from([True, True, False]))))
    named = st.sampled_from(names)
    orders = [
        Order(draw(st.sampled_from(PATTERNS)), draw(ranges()), tuple(draw(st.lists(named, max_size=3, unique=True))), o)
        for o in ("variant", "base", "tuned")[: draw(st.integers(0, 3))]
    ]
    pins = [
        Pin(
            draw(st.sampled_from(PATTERNS)),
            draw(named),
            draw(st.sampled_from([None, None, 0, 1])),
            draw(st.none() | ranges()),
            f"pin {i}",
        )
        for i in range(draw(st.sampled_from([0, 0, 0, 1, 2])))
    ]
    return s, context(*draw(st.lists(ranges(), min_size=1, max_size=2)), pins=pins, orders=orders), entries


@settings(max_examples=3 * settings.default.max_examples)
@given(worlds())
def test_resolve_agrees_with_the_plain_telling_for_every_m(world: tuple[Site, Context, list[Entry]]) -> None:
    s, ctx, entries = world
    served = sorted({m for r in ctx.rows for m in range(r.first, r.last + 1)})
    try:
        expected = {m: told(s, ctx, entries, m) for m in served}
    except RefusedError:
        expected = None
    try:
        route = resolve(s, ctx, entries)
    except RouteError:
        route = None
    event("served" if route else "refused")
    assert (route is None) == (expected is None)
    if route is None or expected is None:
        return
    for m in served:
        for role in s.roles:
            a = route.at(role, m)
            assert (a.arm, a.roles, a.origin) == expected[m][role], (m, role)
            assert sum(m in b.rows and role in b.roles for b in route.assignments) == 1
    for m in set(range(1, LAST + 1)) - set(served):
        assert not any(m in a.rows for a in route.assignments)


def test_the_order_of_orders() -> None:
    arms = catalog(*(Fake(n) for n in ("built_in", "tuned", "base", "variant")))
    orders = [Order("ffn.*", Rows(1, 16), (n,), n) for n in ("variant", "base", "tuned")]
    for i, expected in enumerate(("variant", "base", "tuned", "built_in")):
        route = resolve(site("ffn.up"), context(Rows(1, 16), orders=orders[i:]), arms)
        assert route.at("ffn.up", 1).arm == expected
        assert route.at("ffn.up", 1).origin == (expected if expected != "built_in" else BUILT_IN)
