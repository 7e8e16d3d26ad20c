"""What `resolve` keeps and says: every arm's verdict, gaps, failures of foreign code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from core_fakes import A100, H200, Fake, catalog, context, projection, site, third_party

from atlas_lab.core.context import Order, Pin
from atlas_lab.core.declare import Bind
from atlas_lab.core.resolve import BUILT_IN, resolve
from atlas_lab.core.route import Considered, RouteError
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.kernels import lang as L


def by_arm(considered: tuple[Considered, ...]) -> dict[str, Considered]:
    return {c.arm: c for c in considered}


def test_every_verdict_is_kept_those_after_the_winner_too() -> None:
    arms = [
        *catalog(
            Fake("winner"),
            Fake("after", verdict=no("k-multiple", "K must be a multiple of 7", found=64, allowed="7, 14")),
            Fake("lossy", lossy=True),
            Fake("elsewhere", ["attn.*"]),
        ),
        third_party(Fake("theirs")),
    ]
    orders = [Order("ffn.up", rows(1), ("theirs",), "base")]
    route = resolve(site("ffn.up"), context(rows(1, 9), orders=orders), arms)
    said = by_arm(route.considered)
    assert list(said) == ["winner", "after", "lossy", "elsewhere", "theirs"]
    assert [(c.verdict.code, c.rank, c.origin) for c in said.values()] == [
        ("", 1, BUILT_IN),
        ("k-multiple", 2, BUILT_IN),
        ("", -1, ""),
        ("role", 3, BUILT_IN),
        ("", 0, "base"),
    ]
    assert [c.arm for c in route.refusals()] == ["after"]
    assert str(said["after"].verdict) == "K must be a multiple of 7 (found 64, expected 7, 14)"


def test_lossy_and_foreign_arms_never_run_unnamed() -> None:
    arms = [*catalog(Fake("lossy", lossy=True)), third_party(Fake("theirs"))]
    with pytest.raises(RouteError, match="no arm serves M 1"):
        resolve(site("ffn.up"), context(rows(1)), arms)
    arms += catalog(Fake("default"))
    assert resolve(site("ffn.up"), context(rows(1)), arms).arms == ("default",)
    orders = [Order("ffn.*", rows(1), ("lossy", "theirs"), "base")]
    assert resolve(site("ffn.up"), context(rows(1), orders=orders), arms).arms == ("lossy",)


def test_installing_a_package_changes_no_route() -> None:
    before = resolve(site("ffn.up"), context(), catalog(Fake("default")))
    after = resolve(site("ffn.up"), context(), [third_party(Fake("theirs")), *catalog(Fake("default"))])
    assert (before.assignments, before.hash) == (after.assignments, after.hash)


def test_a_gap_is_named_with_what_every_arm_said() -> None:
    arms = catalog(
        Fake("decode", rows=rows(1)),
        Fake("prefill", rows=rows_from(17)),
        Fake("few", rows=rows(2, 16), verdict=no("k-multiple", "K must be a multiple of 128", found=64, allowed=128)),
        Fake("elsewhere", ["attn.*"]),
    )
    with pytest.raises(RouteError) as e:
        resolve(site("ffn.up"), context(), arms)
    assert str(e.value) == (
        "layers.0.ffn.up: no arm serves M 2 to 16 of its bf16 weight (decode: serves M 1; prefill: serves M 17+; "
        "few: K must be a multiple of 128 (found 64, expected 128))"
    )
    with pytest.raises(RouteError, match=r"layers\.0\.ffn\.up: no arm serves M 1 .*\(no arm names this role\)"):
        resolve(site("ffn.up"), context(rows(1)), catalog(Fake("elsewhere", ["attn.*"])))


def test_a_row_count_that_is_not_served_needs_no_arm() -> None:
    arms = catalog(Fake("decode", rows=rows(1)), Fake("prefill", rows=rows_from(17)))
    route = resolve(site("ffn.up"), context(rows(1), rows(512)), arms)
    assert [(str(a.rows), a.arm) for a in route.assignments] == [("1", "decode"), ("512", "prefill")]
    with pytest.raises(RouteError, match="no arm was resolved for M=2"):
        route.at("ffn.up", 2)


def fails(*_: Any) -> Any:
    raise LookupError("the table is empty")


def leaves(*_: Any) -> Any:
    raise SystemExit(7)


BROKEN = {
    "eligible exits": ({"verdict": leaves}, "eligible of arm broken raised SystemExit: 7 ("),
    "eligible raises": ({"verdict": fails}, "eligible of arm broken raised LookupError: the table is empty ("),
    "eligible returns True": (
        {"verdict": lambda p, c: True},
        "eligible of arm broken returned the wrong kind of value (found bool True, expected yes() or no(...))",
    ),
    "finalize raises": ({"finalize": fails}, "finalize of arm broken raised LookupError: the table is empty ("),
    "finalize raises late": (
        {"finalize": lambda p, c: (fails() for _ in "x")},
        "finalize of arm broken raised LookupError: the table is empty (",
    ),
    "finalize returns nothing": (
        {"finalize": lambda p, c: None},
        "finalize of arm broken returned the wrong kind of value (found NoneType None, expected a list of Bind and",
    ),
    "finalize returns a weight": (
        {"finalize": lambda p, c: [Bind(p.weight), p.k]},
        "finalize of arm broken returned the wrong kind of value (found int 64, expected Bind or Derived)",
    ),
    "finalize declares a key twice": (
        {"finalize": lambda p, c: [Bind(p.weight), Bind(p.weight)]},
        "finalize of arm broken declares a key twice (found ['weight', 'weight'], expected unique keys)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_arm_that_fails_is_shown_and_fatal_only_where_something_names_it(case: str) -> None:
    how, sentence = BROKEN[case]
    arms = catalog(Fake("broken", **how), Fake("default"))
    route = resolve(site("ffn.up"), context(rows(1)), arms)
    assert route.arms == ("default",)
    verdict = by_arm(route.considered)["broken"].verdict
    assert verdict.code == "error"
    assert str(verdict).startswith(sentence)
    order = Order("ffn.*", rows(1, 16), ("default", "broken"), "base")
    with pytest.raises(RouteError) as e:
        resolve(site("ffn.up"), context(rows(1), orders=[order]), arms)
    assert str(e.value).startswith("layers.0.ffn.up: base names arm broken, which failed: ")
    with pytest.raises(RouteError, match="broken, which is not eligible: "):
        resolve(site("ffn.up"), context(rows(1), pins=[Pin("ffn.up", "broken")]), arms)
    for named in (Order("attn.*", rows(1), ("broken",), "base"), Order("ffn.*", rows(2), ("broken",), "base")):
        assert resolve(site("ffn.up"), context(rows(1), orders=[named]), arms).arms == ("default",)


def test_a_failure_is_placed_in_the_arms_own_code_not_in_what_it_called() -> None:
    class Reader(Fake):
        def eligible(self, p: Any, ctx: Any) -> Any:
            return json.loads("{")

    route = resolve(site("ffn.up"), context(rows(1)), catalog(Reader("reader"), Fake("default")))
    line = Reader.eligible.__code__.co_firstlineno + 1
    assert str(by_arm(route.considered)["reader"].verdict).endswith(f"test_core_verdicts.py:{line})")


def test_a_named_failure_is_fatal_even_where_a_pin_decides() -> None:
    arms = catalog(Fake("broken", verdict=fails), Fake("default"))
    order = Order("ffn.*", rows(1), ("broken",), "base")
    with pytest.raises(RouteError, match="base names arm broken"):
        resolve(site("ffn.up"), context(rows(1), orders=[order], pins=[Pin("ffn.up", "default")]), arms)


def test_an_order_that_names_an_unknown_arm_is_an_error_with_the_nearest() -> None:
    order = Order("attn.*", rows(1), ("defualt",), "variant")
    with pytest.raises(RouteError) as e:
        resolve(site("ffn.up"), context(rows(1), orders=[order]), catalog(Fake("default")))
    assert str(e.value) == "variant: unknown arm 'defualt', expected one of default, did you mean 'default'?"


def test_hardware_and_source_are_checked_before_the_predicate() -> None:
    asked: list[str] = []

    def watch(p: Any, c: Any) -> Verdict:
        asked.append(c.target.name)
        return Verdict(True)

    needy = Fake("needy", verdict=watch, kernels=[convert])
    arms = catalog(needy, Fake("default"))
    old = resolve(site("ffn.up"), context(rows(1), target=A100), arms)
    assert asked == []
    verdict = by_arm(old.considered)["needy"].verdict
    assert (verdict.code, verdict.sentence) == ("needs", "kernel convert needs sm_89 or later")
    assert verdict.found == "a100 (compute capability 8.0)"
    assert resolve(site("ffn.up"), context(rows(1), target=H200), arms).arms == ("needy",)
    assert asked == ["h200"]
    with pytest.raises(RouteError, match="kernel convert needs sm_89 or later"):
        resolve(site("ffn.up"), context(rows(1), target=A100, pins=[Pin("*", "needy")]), arms)
    wrong = resolve(site("ffn.up"), context(rows(1)), catalog(Fake("fp8", source="fp8", verdict=watch), Fake("other")))
    verdict = by_arm(wrong.considered)["fp8"].verdict
    assert (verdict.code, verdict.found, verdict.allowed) == ("source", "bf16", "fp8")
    assert asked == ["h200"]


@L.kernel
def convert(x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, 0, L.e4m3x2_f16x2(L.ldg_b32(x, 0)))


def test_a_group_s_arm_is_handed_the_site_and_a_single_one_the_projection() -> None:
    seen: list[Any] = []

    def watch(p: Any, c: Any) -> Verdict:
        seen.append(p)
        return Verdict(True)

    s = site("ffn.down", "ffn.up", "ffn.gate")
    resolve(s, context(rows(1)), catalog(Fake("both", ["ffn.gate+ffn.up", "ffn.d*"], verdict=watch), Fake("rest")))
    group, single = seen
    assert group.roles == ("ffn.gate", "ffn.up")
    assert single == projection("ffn.down")
