"""The lever `row_invariant`: one reduction class up to M 16 where one serves them, and never a gap."""

from __future__ import annotations

from typing import Any

import pytest
from core_fakes import Fake, catalog, context, site, third_party
from hypothesis import event, given, settings
from hypothesis import strategies as st

from atlas_lab.core.context import Context, Order, Pin
from atlas_lab.core.levers import Levers
from atlas_lab.core.orders import DEFAULTS, TUNED
from atlas_lab.core.projection import Site
from atlas_lab.core.resolve import Entry, resolve, resolve_all
from atlas_lab.core.route import Gap, Route
from atlas_lab.core.rows import Rows, rows, rows_from
from atlas_lab.core.verdict import no, yes
from atlas_lab.experiments.invariant import kept_rows

OFF = Levers(row_invariant=False)
ROLES = ("ffn.gate", "ffn.up")
LAST = 20  # rows beyond 16, so that worlds have prefill


def both(s: Site, entries: list[Entry], *served: Rows, **more: Any) -> tuple[Route, Route]:
    """The route with the lever on, and with it off."""
    on, off = context(*served, **more), context(*served, levers=OFF, **more)
    return resolve(s, on, entries), resolve(s, off, entries)


def said(route: Route) -> dict[str, str]:
    return {c.arm: c.note for c in route.considered}


GEMV = Fake("gemv", rows=rows(1, 3), reduces="C")
MMA = Fake("mma", rows=rows(1, 16), reduces="T")
GEMM = Fake("gemm", rows=rows_from(1), reduces="G")


def test_decode_goes_to_the_class_that_serves_every_width() -> None:
    on, off = both(site("ffn.up"), catalog(GEMV, MMA, GEMM), rows(1, 64))
    assert [(str(a.rows), a.arm) for a in on.assignments] == [("1 to 16", "mma"), ("17 to 64", "gemm")]
    assert [(str(a.rows), a.arm) for a in off.assignments] == [
        ("1 to 3", "gemv"), ("4 to 16", "mma"), ("17 to 64", "gemm"),
    ]  # fmt: skip
    why = "row_invariant: its class serves M 1 to 3 only, expected 1 to 16"
    assert said(on) == {"gemv": f"passed over for M 1 to 3: {why}", "mma": "", "gemm": ""}
    assert not any(said(off).values())
    assert kept_rows([on, on]) == [
        "row_invariant keeps M 1 to 3 on mma, where gemv would come first; --set row_invariant=off"
    ]
    assert kept_rows([off]) == []
    assert on.hash != off.hash


def test_an_arm_for_many_rows_is_no_reason_to_pass_another_over() -> None:
    """The gemv and gemm of one format, and no arm of at most 16 rows of one class: nothing moves."""
    few = Fake("few", rows=rows(2, 16), reduces="F")
    on, off = both(site("ffn.up"), catalog(GEMV, few, GEMM), rows(1, 64))
    assert on.assignments == off.assignments
    assert on.passed == ()
    assert said(on) == {
        "gemv": "row_invariant: its class serves M 1 to 3 only, expected 1 to 16; it stays, for no class of arms for "
        "at most 16 rows does",
        "few": "row_invariant: its class serves M 2 to 16 only, expected 1 to 16; it stays, for no class of arms for "
        "at most 16 rows does",
        "gemm": "",
    }


def test_but_one_that_stands_first_is_passed_over() -> None:
    on, off = both(site("ffn.up"), catalog(GEMM, MMA), rows(1, 64))
    assert (on.at("ffn.up", 16).arm, off.at("ffn.up", 16).arm) == ("mma", "gemm")
    assert said(on)["gemm"] == (
        "passed over for M 1 to 16: row_invariant: its class serves no M by arms of at most 16 rows, expected 1 to 16"
    )


def test_an_arm_without_a_class() -> None:
    on, _ = both(site("ffn.up"), catalog(Fake("bare", rows=rows(1)), MMA, GEMM), rows(1, 8))
    assert on.at("ffn.up", 1).arm == "mma"
    assert said(on)["bare"] == (
        "passed over for M 1: row_invariant: it declares no reduction class, expected one that serves M 1 to 8"
    )


def test_only_the_rows_of_the_run_count() -> None:
    for served in ((rows(1),), (rows(2, 3),), (rows(1), rows(3))):
        on, off = both(site("ffn.up"), catalog(GEMV, MMA), *served)
        assert on.assignments == off.assignments, served
        assert on.arms == ("gemv",)
    assert both(site("ffn.up"), catalog(GEMV, MMA), rows(1), rows(4))[0].arms == ("mma",)


def test_a_class_may_be_of_several_arms_and_the_first_for_decode_is_kept() -> None:
    one = [Fake("small", rows=rows(1, 8), reduces="S"), Fake("large", rows=rows(9, 16), reduces="S")]
    on, off = both(site("ffn.up"), catalog(one[0], MMA, one[1]), rows(1, 16))
    assert [a.arm for a in on.assignments] == ["small", "large"]
    assert [a.arm for a in off.assignments] == ["small", "mma"]
    assert said(on)["mma"] == (
        "passed over for M 9 to 16: row_invariant: another class that serves M 1 to 16 comes first for the fewest rows"
    )


@pytest.mark.parametrize("named", ["order", "pin"])
def test_what_a_file_names_is_left_alone(named: str) -> None:
    chosen = {"orders": [Order("*", rows(1), ("gemv",), "base")]} if named == "order" else {"pins": [Pin("*", "gemv")]}
    on, _ = both(site("ffn.up"), catalog(GEMV, MMA), rows(1, 16), **chosen)
    assert on.at("ffn.up", 1).arm == "gemv"
    tuned = [Order("*", rows(1), ("gemv",), TUNED)]
    on, off = both(site("ffn.up"), catalog(MMA, GEMV), rows(1, 16), orders=tuned)
    assert (on.at("ffn.up", 1).arm, off.at("ffn.up", 1).arm) == ("mma", "gemv")


def test_an_order_for_some_of_the_rows_may_take_them_from_the_class_that_is_kept() -> None:
    other = Fake("other", rows=rows(1, 16), reduces="X")
    order = Order("*", rows(8, 16), ("mma",), "file")
    on, _ = both(site("ffn.up"), catalog(MMA, other, GEMM), rows(1, 64), orders=(order,))
    assert [(str(a.rows), a.arm) for a in on.assignments if a.arm != "gemm"] == [("1 to 7", "mma"), ("8 to 16", "mma")]


def test_arms_that_do_not_run_unnamed_cover_nothing() -> None:
    for entry in (third_party(MMA), catalog(Fake("mma", rows=rows(1, 16), reduces="T", lossy=True))[0]):
        on, off = both(site("ffn.up"), catalog(GEMV, entry, GEMM), rows(1, 16))
        assert on.assignments == off.assignments


def test_groups() -> None:
    pair = Fake("pair", ["ffn.gate+ffn.up"], rows(1), reduces="P")
    on, off = both(site(*ROLES), catalog(pair, MMA), rows(1, 16))
    assert (on.arms, off.arms) == (("mma",), ("pair", "mma"))
    assert len(on.passed) == 2
    whole = Fake("pair", ["ffn.gate+ffn.up"], rows(1, 16), reduces="P")
    on, off = both(site(*ROLES), catalog(whole, MMA), rows(1, 16))
    assert on.arms == off.arms == ("pair",)
    named = [Order("ffn.gate", rows(1), ("pair",), "base")]
    assert both(site(*ROLES), catalog(pair, MMA), rows(1, 16), orders=named)[0].at("ffn.up", 1).arm == "pair"


@st.composite
def ranges(draw: st.DrawFn) -> Rows:
    first = draw(st.integers(1, LAST))
    return draw(st.sampled_from([Rows(1, 16), Rows(1, 1), Rows(2, 16), Rows(first, draw(st.integers(first, LAST)))]))


@st.composite
def worlds(draw: st.DrawFn, patterns: tuple[str, ...]) -> tuple[Site, Context, Context, list[Entry]]:
    names = [f"a{i}" for i in range(draw(st.integers(1, 5)))]
    entries = []
    for name in names:
        arm = Fake(
            name,
            [draw(st.sampled_from(patterns))],
            draw(ranges()),
            lossy=draw(st.sampled_from([False, False, False, True])),
            verdict=draw(st.sampled_from([yes(), yes(), yes(), no("k", "never")])),
            reduces=draw(st.sampled_from(["", "C", "T", "T", "U"])),
        )
        entries.append(Entry(arm, "d", "1", "w", built_in=draw(st.sampled_from([True, True, True, False]))))
    orders = [
        Order("*", draw(ranges()), tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True))), origin)
        for origin in draw(st.sampled_from([(), (), ("base",), (TUNED,), ("base", TUNED)]))
    ]
    served = draw(st.lists(ranges(), min_size=1, max_size=2))
    s = site(*draw(st.sampled_from([ROLES[:1], ROLES])))
    on = context(*served, orders=orders)
    return s, on, context(*served, orders=orders, levers=OFF), entries


def arms_at(s: Site, ctx: Context, entries: list[Entry]) -> tuple[Route, list[Gap], dict[tuple[str, int], Any]]:
    gaps: list[Gap] = []
    (route,) = resolve_all([s], ctx, entries, gaps=gaps)
    found = {
        (role, m): (a.arm, a.origin)
        for a in route.assignments
        for role in a.roles
        for m in range(a.rows.first, a.rows.last + 1)
    }
    return route, gaps, found


def covering(role: str, ctx: Context, entries: list[Entry]) -> set[str]:
    """Classes that arms of at most 16 rows, which run unnamed and say yes, serve for every M up to 16 of the run."""
    wanted = {m for r in ctx.rows for m in range(r.first, r.last + 1) if m <= 16}
    out = set()
    for name in ("C", "T", "U"):
        served: set[int] = set()
        for e in entries:
            a = e.arm
            mine = e.default and a.rows.last <= 16 and a.eligible(None, ctx) and a.roles in (("*",), (role,))
            if mine and a.reduction_class is not None and a.reduction_class.order == name:
                served |= set(range(a.rows.first, a.rows.last + 1))
        if wanted and wanted <= served:
            out.add(name)
    return out


@settings(max_examples=4 * settings.default.max_examples)
@given(worlds(("*", "*", "ffn.gate", "ffn.up")))
def test_single_arms(world: tuple[Site, Context, Context, list[Entry]]) -> None:
    s, on, off, entries = world
    route, gaps, with_it = arms_at(s, on, entries)
    _, gaps_off, without = arms_at(s, off, entries)
    assert [(g.role, g.rows) for g in gaps] == [(g.role, g.rows) for g in gaps_off]
    classes = {e.arm.name: e.arm.reduction_class and e.arm.reduction_class.order for e in entries}
    for role in s.roles:
        found = covering(role, on, entries)
        event(f"{len(found)} classes")
        few = {m: at for (r, m), at in with_it.items() if r == role and m <= 16}
        if found:
            used = {classes[arm] for arm, origin in few.values() if origin in DEFAULTS}
            assert len(used) <= 1 and used <= found
        else:
            assert all(at == without[role, m] for m, at in few.items())
        for (r, m), at in without.items():
            if r == role and (m > 16 or at[1] not in DEFAULTS):
                assert with_it[role, m] == at
    moved = {(p.role, m, p.arm, p.by) for p in route.passed for m in range(p.rows.first, p.rows.last + 1)}
    assert moved == {(r, m, at[0], with_it[r, m][0]) for (r, m), at in without.items() if at[0] != with_it[r, m][0]}
    noted = {c.arm for c in route.considered if c.note.startswith("passed over")}
    assert {arm for _, _, arm, _ in moved} <= noted


@given(worlds(("*", "ffn.gate+ffn.up", "ffn.gate")))
def test_groups_make_no_gap_either(world: tuple[Site, Context, Context, list[Entry]]) -> None:
    s, on, off, entries = world
    route, gaps, with_it = arms_at(s, on, entries)
    _, gaps_off, without = arms_at(s, off, entries)
    assert [(g.role, g.rows) for g in gaps] == [(g.role, g.rows) for g in gaps_off]
    assert all(with_it[at] == was for at, was in without.items() if at[1] > 16)
    moved = {(p.role, m) for p in route.passed for m in range(p.rows.first, p.rows.last + 1)}
    assert moved == {at for at, was in without.items() if was[0] != with_it[at][0]}
