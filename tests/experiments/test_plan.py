"""Plans of variants: steps for every role and M, floors against hand counts, routes that are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.registry import PluginError
from atlas_lab.core.route import RouteError
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.experiments import config, plan, reference
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan import VariantPlan
from atlas_lab.experiments.settings import Said
from atlas_lab.experiments.yaml_source import parse
from atlas_lab.kernels import lang as L


def planned(registry, variant: str, more: str = "", m: str = "[1, 3]", hidden: int = 64):
    """The plan of one variant."""
    text = (
        f"experiments:\n  x:\n    model: {{family: qwen3.5, hidden: {hidden}, intermediate: 96}}\n    m: {m}\n"
        f"    baseline: a\n    variants: {{a: {variant}}}\n{more}"
    )
    loaded = config.check(parse(text, "r.yaml", Path("r.yaml")))
    name, x = loaded.experiment(None)
    full = reference.references(loaded, name, x, small=False, models={}).full
    v = x.variants["a"]
    context = plan.context_for(loaded, Said(), registry.target("h200"), full.dims, x.m, "a", v)
    return plan.plan_variant("a", v.weights or "bf16", full.sites(v.weights or "bf16"), context, x.m, registry)


def test_steps(registry):
    p: VariantPlan = planned(registry, "{pins: {'*': toy}}")
    assert [s.key for s in p.steps] == [(0, role, m) for role in ("ffn.gate", "ffn.up", "ffn.down") for m in (1, 3)]
    assert {s.assignment.arm for s in p.steps} == {"toy"}
    assert p.load.steady == 3 * 64 * 96 * 2
    step = p.step((0, "ffn.gate", 3))
    assert step is not None
    assert step.program.traffic == 64 * 96 * 2 + 3 * 64 * 2 + 3 * 96 * 2
    assert step.program.flops == 2 * 3 * 64 * 96


def test_floor(registry):
    step = planned(registry, "{pins: {'*': toy}}").step((0, "ffn.gate", 3))
    h200 = registry.target("h200")
    seconds, by = plan.program_floor(h200, step.program)
    assert by == "read"
    assert seconds == step.program.traffic / 4.26e12
    heavy = list(step.program.launches)
    object.__setattr__(heavy[0], "flops", 10**12)
    assert plan.floor_of(h200, 1, heavy) == (10**12 / 66.9e12, "fma")
    object.__setattr__(heavy[0], "pipe", "mma_x")
    assert plan.floor_of(h200, 1, heavy) == (None, "target h200 has no rate of pipe mma_x")


@L.kernel
def mapped(x: L.InMap[L.bf16]):
    L.tma_prefetch(x)


def test_the_same_route_through_tensor_maps(registry):
    def step(name: str, swizzle: int = 128, cluster: int = 1):
        made = planned(registry, "{pins: {'*': toy}}").step((0, "ffn.up", 1))
        x = Tensor("bf16", (8, 64), name)
        launch = Launch(mapped, 2, 32, (TensorMap(x, (8, 64), swizzle),), cluster=cluster)
        return replace(made, program=Program("p", (launch,), inputs=(x,), outputs=()))

    a = step("a")
    assert plan.same_route(a, step("b"))
    assert not plan.same_route(a, step("a", swizzle=0))
    assert not plan.same_route(a, step("a", cluster=2))


def test_same_route(registry):
    key = (0, "ffn.up", 1)
    toy = planned(registry, "{pins: {'*': toy}}").step(key)
    ordered = planned(registry, "{arms: {'*': [toy]}}").step(key)
    grid = planned(registry, "{pins: {'*': toy_grid}}").step(key)
    other_m = planned(registry, "{pins: {'*': toy}}").step((0, "ffn.up", 3))
    same = planned(registry, "{pins: {'*': toy_same}}").step(key)
    eager = planned(registry, "{pins: {'*': toy}, levers: {graph: off}}").step(key)
    assert plan.same_route(toy, ordered)
    assert not any(plan.same_route(toy, s) for s in (grid, other_m, same, eager))


@pytest.mark.parametrize(
    ("variant", "hidden", "sentence"),
    [
        ("{pins: {ffn.gate: toy}}", 68, "layers.0.ffn.gate: pins of variant a: ffn.gate = toy, which is not eligible: "
         "K must be a multiple of 8 (found 68, expected 8, 16, ...)"),
        ("{pins: {ffn.gate: {arm: toy_one, rows: prefill}}}", 64, "layers.0.ffn.gate: pins of variant a: ffn.gate = "
         "toy_one, which serves M 1 and is pinned for M 17+, none of M 1, 3"),
    ],
)  # fmt: skip
def test_refusals_of_routes(registry, variant, hidden, sentence):
    with pytest.raises(RouteError) as e:
        planned(registry, variant, hidden=hidden)
    assert str(e.value).startswith(sentence)


def test_a_third_partys_lower_that_raises(registry, monkeypatch):
    arm = registry.arm("toy")
    monkeypatch.setattr(arm, "lower", lambda c: 1 // 0, raising=False)
    with pytest.raises(PluginError, match=r"lower for M=1 raised ZeroDivisionError: .*test_plan\.py:\d+\)$"):
        planned(registry, "{pins: {'*': toy}}")


def test_the_numbers_sizes_must_be_served_by_the_same_arm(registry):
    full = planned(registry, "{arms: {'*': {decode: [toy_one], few: [toy]}}}")
    small = planned(registry, "{arms: {'*': [toy]}}")
    with pytest.raises(ConfigError) as e:
        plan.agree(full, small, "experiment x")
    assert str(e.value) == (
        "experiment x, variant a: layers.0.ffn.gate M=1: found toy at the interpreter's sizes (K=64), expected "
        "toy_one as for the full model (K=64); choose sizes that it serves"
    )
    plan.agree(full, full, "experiment x")
