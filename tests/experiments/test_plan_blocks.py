"""Feed-forward blocks of whole models: launches by M, equal layers together, what an arm cannot do, what differs."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import whole_model_cases as cases
from rich.console import Console

from atlas_lab import checkpoint
from atlas_lab.cli.plan_tables import print_diff, print_plan
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.levers import Levers
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import rows
from atlas_lab.experiments.plan_blocks import BlockGroup, ffn_blocks
from atlas_lab.experiments.plan_diff import compare
from atlas_lab.experiments.plan_results import read_plan, result_of
from atlas_lab.experiments.results import dumps
from atlas_lab.experiments.whole_model import ModelPlan, plan_model

SMALL = checkpoint.sizes("tiny", layers=8, intermediate=512, activation_limit=7.0)
JOINED = {"ffn.gate": "nvfp4_mma_joined", "ffn.up": "nvfp4_mma_joined", "ffn.down": "nvfp4_mma"}


def planned(registry: Registry, pins: dict[str, str], s=SMALL, spelled: str = "nvfp4", **more) -> ModelPlan:
    levers = Levers(**{name: more.pop(name) for name in ("gated", "pdl") if name in more})
    ctx = replace(cases.context(registry, dims=s.dims, **more), levers=levers)
    ctx = replace(ctx, preferences=Preferences(tuple(Pin(role, arm) for role, arm in pins.items())))
    made = plan_model(spelled, cases.sites(spelled, s), ctx, registry)
    return replace(made, blocks=ffn_blocks(made.routes, made.context, registry))


def lines(groups: tuple[BlockGroup, ...]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    (one,) = groups
    return [(", ".join(map(str, x.rows)), x.gated, [(y.does, y.arm) for y in x.launches]) for x in one.lines]


def test_launches_by_rows(registry):
    p = planned(registry, JOINED)
    assert [b.layers for b in p.blocks] == [tuple(range(8))]
    joined, down = ("ffn.gate+ffn.up", "nvfp4_mma_joined"), ("ffn.down", "nvfp4_mma")
    gate, up, last = ((role, "nvfp4_wgmma") for role in ("ffn.gate", "ffn.up", "ffn.down"))
    ordered, gated = ("nvfp4_wgmma x", ""), ("gated product", "")
    assert lines(p.blocks) == [
        ("1 to 8", "epilogue", [joined, down]),
        ("9 to 16", "epilogue", [joined, down]),
        ("64", "launch", [ordered, gate, ordered, up, gated, ordered, last]),
        ("4096", "launch", [gate, up, gated, last]),
    ]
    kernels = [[y.kernel.partition("__")[0] for y in x.launches] for x in p.blocks[0].lines]
    assert kernels[0] == ["mma_nvfp4", "mma_nvfp4"]
    said = (
        "gated=epilogue: nvfp4_wgmma serves ffn.gate and ffn.up in calls of their own: a launch makes the gated product"
    )
    assert [x.said for x in p.blocks[0].lines] == [(), (), (said,), (said,)]
    out = StringIO()
    print_plan(p, Console(file=out, width=160))
    text = " ".join(out.getvalue().split())
    assert "feed-forward blocks, silu, inputs clamped at 7: layers M gated launches of a block arm kernel" in text
    assert "0-7 (8) 1 to 8 epilogue ffn.gate+ffn.up nvfp4_mma_joined mma_nvfp4__" in text
    assert f"M 64, 4096: {said}" in text


def test_layers_that_are_served_otherwise_are_a_group_of_their_own(registry):
    p = planned(registry, JOINED)
    pins = (*(Pin(role, "nvfp4_gemv", 3, rows(1, 3)) for role in JOINED), *p.context.preferences.pins)
    ctx = replace(p.context, preferences=Preferences(pins), rows=(rows(1, 3),))
    made = plan_model("x", cases.sites("nvfp4", SMALL), ctx, registry)
    found = ffn_blocks(made.routes, ctx, registry)
    assert [(b.layers, len(b.lines[0].launches)) for b in found] == [((0, 1, 2, 4, 5, 6, 7), 2), ((3,), 4)]


def test_as_data_and_back(registry, tmp_path):
    p = planned(registry, JOINED, rows=(rows(1, 1), rows(37, 37)))
    (tmp_path / "p.json").write_text(dumps(result_of([p])))
    (plan,) = read_plan(tmp_path / "p.json").plans
    assert (plan.activation, plan.activation_limit) == ("silu", 7.0)
    (block,) = plan.blocks
    assert block.layers == list(range(8))
    assert [(x.rows, x.gated, len(x.launches)) for x in block.programs] == [
        ([(1, 1)], "epilogue", 2),
        ([(37, 37)], "launch", 7),
    ]
    assert block.programs[1].launches[4].arm is None


def test_blocks_that_differ(registry):
    a, b = (planned(registry, JOINED, gated=g) for g in ("epilogue", "launch"))
    d = compare(a, b)
    both = "nvfp4_mma_joined, nvfp4_mma"
    assert [(c.layers, list(map(str, c.rows)), c.a, c.b) for c in d.blocks] == [
        (tuple(range(8)), ["1 to 16"], f"2 launches, gated=epilogue: {both}", f"3 launches, gated=launch: {both}")
    ]
    assert not d.changed
    assert not d.same
    assert [c.programs for c in result_of([a, b], [d]).diffs[0].blocks] == [(d.blocks[0].a, d.blocks[0].b)]
    out = StringIO()
    print_diff(d, Console(file=out, width=160))
    assert "block at M" in out.getvalue()
    assert compare(a, planned(registry, JOINED)).same


def test_no_program_is_said(registry, monkeypatch: pytest.MonkeyPatch):
    """An arm that reads quantized activations, which a block does not make."""
    monkeypatch.setattr(registry.arm("toy"), "activation", "int8")
    p = planned(registry, {"ffn.*": "toy"}, spelled="bf16", rows=(rows(1, 1),))
    (line,) = p.blocks[0].lines
    assert (line.gated, line.launches) == ("", ())
    assert line.reason == "layers.0.ffn/x: arm toy reads int8, found bf16"
    out = StringIO()
    print_plan(p, Console(file=out, width=160))
    assert "no program: layers.0.ffn/x: arm toy reads int8, found bf16" in " ".join(out.getvalue().split())
    assert line.short.startswith("no program: ")


def test_a_part_of_a_block_is_none(registry):
    p = planned(registry, JOINED)
    routes = tuple(r for r in p.routes if r.site.roles != ("ffn.down",))
    assert ffn_blocks(routes, p.context, registry) == ()


@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_clamped_inputs_take_other_kernels(registry, limit: float):
    p = planned(registry, JOINED, s=replace(SMALL, activation_limit=limit), rows=(rows(1, 1),))
    other = planned(registry, JOINED, s=replace(SMALL, activation_limit=7.0 - limit), rows=(rows(1, 1),))
    first, second = ([y.kernel for y in x.blocks[0].lines[0].launches] for x in (p, other))
    assert first[0] != second[0]
    assert first[1] == second[1]
    (c,) = compare(p, other).blocks
    assert c.b == f"{c.a}, of other kernels"
