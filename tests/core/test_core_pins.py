"""Pins: most specific first, demands and never preferences, and the sentences they fail with."""

from __future__ import annotations

import pytest
from core_fakes import Fake, catalog, context, site, third_party

from atlas_lab.core.context import Order, Pin
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import RouteError
from atlas_lab.core.rows import Rows, rows, rows_from
from atlas_lab.core.verdict import no

EVERYWHERE = [Fake(n) for n in ("first", "glob", "role", "layer_glob", "layer_role")]


def test_a_layer_beats_a_role_beats_a_glob_whatever_their_order() -> None:
    pins = [
        Pin("*", "glob"),
        Pin("ffn.up", "role"),
        Pin("ffn.*", "layer_glob", layer=3),
        Pin("ffn.up", "layer_role", layer=3),
    ]
    for given in (pins, pins[::-1]):
        for keep, expected in ((1, "glob"), (2, "role"), (3, "layer_glob"), (4, "layer_role")):
            chosen = [p for p in given if p in pins[:keep]]
            route = resolve(site("ffn.up", layer=3), context(rows(1), pins=chosen), catalog(*EVERYWHERE))
            assert route.arms == (expected,)
    route = resolve(site("ffn.up", layer=2), context(rows(1), pins=pins), catalog(*EVERYWHERE))
    assert route.arms == ("role",)
    route = resolve(site("ffn.gate", layer=2), context(rows(1), pins=pins), catalog(*EVERYWHERE))
    assert route.arms == ("glob",)


def test_a_pin_beats_every_order() -> None:
    orders = [Order("ffn.up", rows(1), ("role",), "variant")]
    route = resolve(site("ffn.up"), context(rows(1), pins=[Pin("*", "glob")], orders=orders), catalog(*EVERYWHERE))
    assert route.arms == ("glob",)
    assert route.assignments[0].origin == "pins: * = glob"


def test_rows_default_to_the_arms_own_and_the_rest_follows_the_order() -> None:
    arms = catalog(Fake("all"), Fake("decode", rows=rows(1, 4)))
    route = resolve(site("ffn.up"), context(rows(1, 64), pins=[Pin("ffn.up", "decode")]), arms)
    assert [(str(a.rows), a.arm) for a in route.assignments] == [("1 to 4", "decode"), ("5 to 64", "all")]
    pin = Pin("ffn.up", "decode", rows=rows(2, 9))
    route = resolve(site("ffn.up"), context(rows(1, 64), pins=[pin]), arms)
    found = [(str(a.rows), a.arm) for a in route.assignments]
    assert found == [("1", "all"), ("2 to 4", "decode"), ("5 to 64", "all")]


def test_equally_specific_pins_may_share_out_the_rows() -> None:
    pins = [Pin("ffn.*", "a", rows=rows(1, 4)), Pin("*", "b", rows=rows_from(5)), Pin("ffn.up", "b", rows=rows(9))]
    arms = catalog(Fake("a"), Fake("b"))
    route = resolve(site("ffn.up"), context(rows(1, 9), pins=pins), arms)
    assert [(str(a.rows), a.arm) for a in route.assignments] == [("1 to 4", "a"), ("5 to 8", "b"), ("9", "b")]


def test_a_pin_may_name_an_arm_that_nothing_else_runs() -> None:
    arms = [*catalog(Fake("default"), Fake("lossy", lossy=True)), third_party(Fake("theirs"))]
    for name in ("lossy", "theirs"):
        assert resolve(site("ffn.up"), context(rows(1), pins=[Pin("ffn.up", name)]), arms).arms == (name,)


REFUSED = {
    "two equally specific": (
        [Pin("ffn.*", "first"), Pin("*.up", "glob", origin="variant")],
        "layers.0.ffn.up: two equally specific pins for M 1 to 64, pins: ffn.* = first and variant: *.up = glob",
    ),
    "unknown arm": (
        [Pin("ffn.up", "roll")],
        "pins: ffn.up = roll: unknown arm 'roll', expected one of decode, first, glob, layer_glob, layer_role, never, "
        "other, raises, role, did you mean 'role'?",
    ),
    "not eligible": (
        [Pin("ffn.up", "never")],
        "layers.0.ffn.up: pins: ffn.up = never, which is not eligible: not today (found Monday, expected Sunday)",
    ),
    "predicate raises": (
        [Pin("ffn.up", "raises")],
        "layers.0.ffn.up: pins: ffn.up = raises, which is not eligible: eligible of arm raises raised "
        "ZeroDivisionError: ",
    ),
    "another role": (
        [Pin("ffn.*", "other")],
        "layers.0.ffn.up: pins: ffn.* = other, which is not eligible: serves ffn.down",
    ),
    "serves no M of the run": (
        [Pin("ffn.up", "decode")],
        "layers.0.ffn.up: pins: ffn.up = decode, which serves M 100 to 200, none of M 1 to 64",
    ),
    "its rows are not the arm's": (
        [Pin("ffn.up", "decode", rows=rows(1))],
        "layers.0.ffn.up: pins: ffn.up = decode, which serves M 100 to 200 and is pinned for M 1, none of M 1 to 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pin_that_cannot_hold_is_an_error_and_never_a_downgrade(case: str) -> None:
    pins, sentence = REFUSED[case]
    arms = catalog(
        *EVERYWHERE,
        Fake("never", verdict=no("day", "not today", found="Monday", allowed="Sunday")),
        Fake("raises", verdict=lambda p, c: 1 // 0),
        Fake("other", ["ffn.down"]),
        Fake("decode", rows=Rows(100, 200)),
    )
    with pytest.raises(RouteError) as e:
        resolve(site("ffn.up"), context(rows(1, 64), pins=pins), arms)
    assert str(e.value).startswith(sentence)
    assert "\n" not in str(e.value)


def test_pins_of_other_layers_and_roles_are_not_looked_at() -> None:
    arms = catalog(Fake("first"), Fake("never", verdict=no("day", "not today")))
    pins = [Pin("ffn.up", "never", layer=7), Pin("attn.*", "never")]
    assert resolve(site("ffn.up"), context(rows(1), pins=pins), arms).arms == ("first",)


PAIR = Fake("pair", ["ffn.gate+ffn.up"], rows(1, 16))


def test_a_group_arm_competes_at_its_own_place() -> None:
    s = site("ffn.gate", "ffn.up", "ffn.down")
    before = resolve(s, context(rows(1, 64)), catalog(PAIR, Fake("solo")))
    assert [(str(a.rows), a.roles, a.arm) for a in before.assignments] == [
        ("1 to 16", ("ffn.gate", "ffn.up"), "pair"),
        ("17 to 64", ("ffn.gate",), "solo"),
        ("17 to 64", ("ffn.up",), "solo"),
        ("1 to 64", ("ffn.down",), "solo"),
    ]
    after = resolve(s, context(rows(1, 64)), catalog(Fake("solo"), PAIR))
    assert after.arms == ("solo",)


@pytest.mark.parametrize("better", ["ffn.gate", "ffn.up"])
def test_one_member_that_is_better_served_alone_breaks_the_group(better: str) -> None:
    route = resolve(site("ffn.gate", "ffn.up"), context(rows(1)), catalog(Fake("best", [better]), PAIR, Fake("solo")))
    assert route.at(better, 1).arm == "best"
    assert set(route.arms) == {"best", "solo"}


def test_a_group_that_only_one_member_s_order_names_does_not_run() -> None:
    arms = [*catalog(Fake("solo")), third_party(PAIR)]
    orders = [Order("ffn.gate", rows(1), ("pair",), "base")]
    assert resolve(site("ffn.gate", "ffn.up"), context(rows(1), orders=orders), arms).arms == ("solo",)
    orders = [Order("ffn.*", rows(1), ("pair",), "base")]
    assert resolve(site("ffn.gate", "ffn.up"), context(rows(1), orders=orders), arms).arms == ("pair",)


def test_a_pin_of_one_member_takes_the_group() -> None:
    arms = catalog(Fake("solo"), PAIR)
    route = resolve(site("ffn.gate", "ffn.up"), context(rows(1), pins=[Pin("ffn.up", "pair")]), arms)
    (a,) = route.assignments
    assert (a.arm, a.roles, a.origin) == ("pair", ("ffn.gate", "ffn.up"), "pins: ffn.up = pair")


def test_pins_of_both_members_to_the_group_are_one_call() -> None:
    arms = catalog(Fake("solo"), PAIR)
    pins = [Pin("ffn.gate", "pair"), Pin("ffn.up", "pair")]
    (a,) = resolve(site("ffn.gate", "ffn.up"), context(rows(1), pins=pins), arms).assignments
    assert (a.arm, a.roles, a.origin) == ("pair", ("ffn.gate", "ffn.up"), "pins: ffn.gate = pair")


def test_a_pin_against_the_group_another_pin_takes_is_an_error() -> None:
    pins = [Pin("ffn.up", "pair"), Pin("ffn.gate", "solo")]
    with pytest.raises(RouteError) as e:
        resolve(site("ffn.gate", "ffn.up"), context(rows(1), pins=pins), catalog(Fake("solo"), PAIR))
    assert "contradicts" in str(e.value)
    assert "pins: ffn.up = pair" in str(e.value)
    assert "pins: ffn.gate = solo" in str(e.value)


def test_a_group_needs_all_its_members_in_the_site() -> None:
    with pytest.raises(RouteError, match=r"which is not eligible: serves ffn\.gate\+ffn\.up"):
        resolve(site("ffn.up"), context(rows(1), pins=[Pin("ffn.up", "pair")]), catalog(Fake("solo"), PAIR))
