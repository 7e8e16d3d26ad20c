"""Declarations, load plans, what is shared and what is pruned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from core_fakes import DIMS, H200, Fake, catalog, context, projection, site
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.core.context import Context, Pin
from atlas_lab.core.declare import Bind, Declaration, Derived, Source
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.residency import Alloc, Build, Check, Free, LoadPlan, Upload, kv_tokens, load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.rows import Rows, rows, rows_from
from atlas_lab.core.tensor import Tensor, round_up


def derived(key: str, source: Source, *, dtype: str = "i8", **parameters: Any) -> Derived:
    shape = (source if not hasattr(source, "weight") else source.weight).fields[0][1].shape
    return Derived(
        key,
        source=source,
        build=lambda w: {"q": w},
        dequantize=lambda t: t["q"],
        parameters=parameters,
        q=Tensor(dtype, shape),
        scale=Tensor("f32", (shape[0],)),
    )


def arm(name: str, served: Rows, declare: Any, roles: Sequence[str] = ("*",)) -> Fake:
    return Fake(name, roles, served, finalize=lambda p, c: declare(p))


def route(s: Site, *arms: Fake, **more: Any) -> Route:
    return resolve(s, context(rows(1, 64), **more), catalog(*arms))


def test_identity_is_sources_key_and_parameters() -> None:
    p, other = projection("ffn.up"), projection("ffn.gate")
    base = derived("q", p.weight, tile=8, order="k")
    same = derived("q", p.weight, order="k", tile=8)
    assert base == same
    assert hash(base) == hash(same)
    assert base.identity == same.identity
    different = [
        derived("r", p.weight, tile=8, order="k"),
        derived("q", p.weight, tile=16, order="k"),
        derived("q", p.weight),
        derived("q", other.weight, tile=8, order="k"),
        derived("q", p.weight.packed, tile=8, order="k"),
    ]
    assert len({base.identity, *(d.identity for d in different)}) == 6
    assert base.label == "q,order=k,tile=8"
    assert base.tensors["q"].name == "model.layers.0.ffn.up/q,order=k,tile=8.q"
    with pytest.raises(ValueError, match="derived weight 'q': found no tensors"):
        Derived("q", source=p.weight, build=dict, dequantize=np.asarray)


def test_arms_that_name_the_same_key_share_one_buffer() -> None:
    one = arm("decode", rows(1), lambda p: [derived("q", p.weight)])
    two = arm("prefill", rows_from(2), lambda p: [derived("q", p.weight), Bind(p.weight)])
    plan = load_plan([route(site("ffn.up"), one, two)])
    assert [type(s).__name__ for s in plan.steps] == ["Check", "Alloc", "Alloc", "Build", "Alloc", "Upload"]
    assert plan.steady == plan.peak == round_up(32 * 64) + round_up(32 * 4) + round_up(32 * 64 * 2)
    assert {(r.label, r.count) for r in plan.ledger()} == {("derived q", 2), ("checkpoint bf16", 1)}
    assert plan.pruned == ()


def test_one_key_with_two_meanings_is_refused() -> None:
    one = arm("decode", rows(1), lambda p: [derived("q", p.weight)])
    for two, what in (
        (lambda p: [derived("q", p.weight.packed)], "packed and values"),
        (lambda p: [derived("q", p.weight, dtype="u8")], "dtypes"),
    ):
        r = route(site("ffn.up"), one, arm("prefill", rows_from(2), two))
        with pytest.raises(RouteError) as e:
            load_plan([r])
        assert str(e.value) == (
            "layers.0.ffn.up: arms decode and prefill declare 'model.layers.0.ffn.up/q.q' differently under one key "
            "'q', expected equal sources and tensors, or parameters that tell them apart"
        ), what


def test_what_no_route_binds_is_pruned_and_says_who_serves() -> None:
    plan = load_plan([route(site("ffn.up"), arm("copy", rows_from(1), lambda p: [derived("q", p.weight)]))])
    assert [(x.tensor.name, x.reason) for x in plan.pruned] == [
        (
            "model.layers.0.ffn.up.weight",
            "layers.0.ffn.up is served by copy, which reads no model.layers.0.ffn.up.weight in place",
        )
    ]
    assert not [s for s in plan.steps if isinstance(s, Upload)]
    assert plan.reads == 32 * 64 * 2


def test_a_copy_that_only_rows_beyond_the_run_need_is_dead() -> None:
    copy = arm("copy", rows_from(65), lambda p: [derived("q", p.weight)])
    plan = load_plan([route(site("ffn.up"), Fake("low", rows=rows(1, 64)), copy)])
    assert not [s for s in plan.steps if isinstance(s, Build)]


@st.composite
def worlds(draw: st.DrawFn) -> list[Route]:
    def declare(choice: int, p: Projection) -> list[Declaration]:
        every: list[Declaration] = [Bind(p.weight), derived("q", p.weight), derived("r", p.weight, tile=choice)]
        return [d for i, d in enumerate(every) if choice >> i & 1]

    arms = [
        arm(f"a{i}", served, lambda p, c=draw(st.integers(1, 7)): declare(c, p))
        for i, served in enumerate((rows(1), rows(2, 16), rows_from(17)))
    ]
    layers = draw(st.permutations(range(draw(st.integers(1, 3)))))
    shapes = st.sampled_from([(1, 7), (32, 64), (129, 130)])
    made = []
    for layer in layers:
        n, k = draw(shapes)
        s = site(*draw(st.sampled_from([("ffn.gate", "ffn.up"), ("attn.o",)])), layer=layer, n=n, k=k)
        made.append(resolve(s, context(draw(st.sampled_from([rows(1, 64), rows(1), rows(2, 30)]))), catalog(*arms)))
    return made


@given(worlds())
def test_the_plan_is_the_union_of_what_routes_declare_and_nothing_else(routes: list[Route]) -> None:
    plan = load_plan(routes)
    declared = {t.name: t for r in routes for d in r.declarations for t in d.tensors.values()}
    assert plan.steady == sum(round_up(t.bytes) for t in declared.values())
    assert plan.peak == plan.steady == sum(r.bytes for r in plan.ledger())
    held: set[str] = set()
    checked: set[str] = set()
    layers = []
    for s in plan.steps:
        if isinstance(s, Check):
            assert not held, "values are checked before anything is allocated"
            checked.add(s.label)
        elif isinstance(s, Alloc):
            assert s.buffer not in held
            held.add(s.buffer)
            layers.append(int(s.owner.split(".")[1]))
            assert s.bytes % 256 == 0
        elif isinstance(s, Upload):
            assert s.tensor.name in held
        elif isinstance(s, Build):
            assert {t.name for t in s.derived.tensors.values()} <= held
    assert layers == sorted(layers)
    assert held == set(declared)
    assert checked == {p.label for r in routes for p in r.site.projections}
    stored = {t.name for r in routes for p in r.site.projections for t in p.weight.tensors.values()}
    assert {x.tensor.name for x in plan.pruned} == stored - held
    filled = [t.name for s in plan.steps if isinstance(s, Build) for t in s.derived.tensors.values()]
    filled += [s.tensor.name for s in plan.steps if isinstance(s, Upload)]
    assert sorted(filled) == sorted(held), "every buffer is filled once"
    assert load_plan(routes) == plan


def test_the_peak_counts_what_is_held_at_once() -> None:
    steps = (Alloc("a", 512, "x", "o"), Alloc("b", 256, "x", "o"), Free("a"), Alloc("c", 256, "y", "o"))
    plan = LoadPlan(steps)
    assert (plan.peak, plan.steady) == (768, 512)
    assert [(r.label, r.bytes, r.count) for r in plan.ledger()] == [("x", 256, 1), ("y", 256, 1)]


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**5), st.sampled_from([1, 16, 64]))
def test_kv_tokens_are_whole_pages_that_fit(budget: int, reserve: int, weights: int, page: int) -> None:
    ctx = Context(H200, DIMS, memory_budget=budget, reserve=reserve, kv_page=page)
    plan = LoadPlan((Alloc("w", weights, "x", "o"),))
    per_token = 2 * 2 * 2 * 16 * 2
    tokens = kv_tokens(ctx, plan)
    assert tokens % page == 0
    if budget:
        assert tokens * per_token <= max(0, budget - reserve - weights)
        assert (tokens + page) * per_token > budget - reserve - weights
    assert kv_tokens(dataclasses.replace(ctx, kv_dtype="e4m3"), plan) >= tokens
    assert kv_tokens(dataclasses.replace(ctx, dims=dataclasses.replace(DIMS, attention_layers=0)), plan) == 0


def test_pins_change_what_is_resident() -> None:
    arms = (Fake("inplace"), arm("copy", rows_from(1), lambda p: [derived("q", p.weight)]))
    pinned = load_plan([route(site("ffn.up"), *arms, pins=[Pin("ffn.up", "copy")])])
    assert [s.buffer for s in pinned.steps if isinstance(s, Alloc)] == [
        "model.layers.0.ffn.up/q.q",
        "model.layers.0.ffn.up/q.scale",
    ]
