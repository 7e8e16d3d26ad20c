"""The gated feed-forward block: which launches its levers give, in which of three places, with which bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from block_runs import Ran, routes_of, weights_of
from lanes_arms import JOINED, LANES, PLAIN, UNCLAMPED, UNFUSED

from atlas_lab.blocks.ffn import DOWN, GATE, UP, ffn_program
from atlas_lab.checkpoint import sizes, synthetic_sites
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Epilogue, Operand
from atlas_lab.core.context import Context
from atlas_lab.core.levers import Levers
from atlas_lab.core.program import PlanError, program_of, projection_call
from atlas_lab.core.route import Route
from atlas_lab.core.rows import rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import dtype

SIZES = sizes("tiny", hidden=128, intermediate=256)
TARGETS = {t.name: t for t in shipped_targets()}
ARMS = {a.name: a for a in (LANES, JOINED, PLAIN, UNFUSED, *UNCLAMPED)}
LIMIT = 1.3  # no number of BF16
SITES = synthetic_sites(SIZES, "nvfp4", (0,), (GATE, UP, DOWN))


def context(kind: str = "silu", target: str = "h200", limit: float = 0.0, **levers: Any) -> Context:
    dims = replace(SIZES.dims, activation=kind, activation_limit=limit)
    return Context(TARGETS[target], dims, Levers(**levers), rows=(rows(1, 16),))


def routes(first: Arm, second: Arm, ctx: Context) -> list[Route]:
    return routes_of(SITES, ARMS, first, second, ctx)


def planned(first: Arm, second: Arm, m: int, ctx: Context) -> Any:
    return ffn_program(*routes(first, second, ctx), m, ctx, ARMS)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return weights_of(SITES)


def ran_on(stored: dict[str, np.ndarray], first: Arm, second: Arm, m: int, ctx: Context) -> Ran:
    return Ran(stored, routes(first, second, ctx), ARMS, m, ctx)


@pytest.mark.parametrize(
    ("kind", "limit", "m"),
    [
        *(("silu", 0, 3), ("silu", LIMIT, 13), ("gelu_tanh", 0, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("silu", 0, 1), ("silu", 0, 13), ("silu", LIMIT, 3))
        ),
        *(pytest.param("gelu_tanh", *case, marks=pytest.mark.full) for case in ((0, 3), (0, 13), (LIMIT, 3))),
    ],
)
def test_the_three_places_agree_bit_for_bit_and_are_right(stored, kind: str, limit: float, m: int):
    forms = [(JOINED, LANES, g, True) for g in ("epilogue", "launch", "input")]
    forms += [(LANES, LANES, "launch", True), (UNFUSED, PLAIN, "epilogue", False)] if m == 3 and not limit else []
    ran = [ran_on(stored, a, b, m, context(kind, limit=limit, gated=g, pdl=pdl)) for a, b, g, pdl in forms]
    for r, form in zip(ran, forms, strict=True):
        assert r.parity.passed, (form, r.parity.reason)
        assert np.array_equal(r.out["y"].view(np.uint16), ran[0].out["y"].view(np.uint16)), form
        if "h" in r.out:
            assert np.array_equal(r.out["h"].view(np.uint16), ran[0].out["h"].view(np.uint16)), form
    assert np.abs(ran[0].out["y"].astype(np.float64)).max() > 0.1
    if limit:
        g, u = np.split(ran[1].out["gu"].astype(np.float64), 2, axis=1)
        beyond = {"gate": g > limit, "up": u > limit, "up below": u < -limit, "gate below": g < -limit}
        assert all(0.02 < v.mean() < 0.5 for v in beyond.values()), {n: v.mean() for n, v in beyond.items()}
        plain = context(kind).dims
        assert not ran[0].judge.parity(ran[0].program, m, plain, ran[0].x, ran[0].out.__getitem__).passed


def test_what_is_wrong_is_seen(stored):
    """A row of zeros, one element off by two ulps, halves exchanged, in every stage."""
    bf16 = dtype("bf16").numpy
    for place in ("epilogue", "launch", "input"):
        r = ran_on(stored, JOINED, LANES, 3, context(gated=place))
        for name, held in r.out.items():
            zeroed, off = held.copy(), held.copy()
            zeroed[1] = 0
            at = np.unravel_index(np.abs(held.astype(np.float32)).argmax(), held.shape)
            off[at] = (off[at].astype(np.float32) * (1.125)).astype(bf16)
            for wrong in (zeroed, off, np.full_like(held, np.nan)):
                changed = {**r.out, name: wrong}
                found = r.judge.parity(r.program, 3, context().dims, r.x, changed.__getitem__)
                assert not found.passed, (place, name)
                assert "outputs of" in found.reason
        for other in (context("gelu_tanh"), context(limit=LIMIT)):
            assert not r.judge.parity(r.program, 3, other.dims, r.x, r.out.__getitem__).passed


LAUNCHES = {
    ("epilogue", JOINED, LANES): (2, ["h"]),
    ("launch", JOINED, LANES): (3, ["gu", "h"]),
    ("input", JOINED, LANES): (2, ["gu"]),
    ("launch", LANES, LANES): (4, ["g", "u", "h"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.parametrize("pdl", [True, False])
def test_launches_ports_and_lifetimes(case: tuple[str, Arm, Arm], pdl: bool):
    count, names = LAUNCHES[case]
    place, first, second = case
    program, said = planned(first, second, 3, context(gated=place, pdl=pdl))
    assert said == ()
    assert [x.pdl for x in program.launches] == [pdl] * count
    assert [t.name for t in (*program.inputs, *program.outputs)] == ["layers.0.ffn/x", "layers.0.ffn/y"]
    assert [t.name for t in program.temporaries] == [f"layers.0.ffn/{n}" for n in names]
    assert len(program.persistent) == 6
    first_named = [program.lifetime(t) for t in program.temporaries]
    assert first_named[-1] == (count - 2, count - 1)
    assert program.name == f"layers.0.ffn M=3 {', '.join(dict.fromkeys((first.name, second.name)))}, gated={place}"


FALLS = {
    ("epilogue", LANES, LANES): ["gated=epilogue: lanes serves ffn.gate and ffn.up in calls of their own"],
    ("epilogue", UNFUSED, LANES): ["gated=epilogue: arm lanes_unfused fuses no activation"],
    ("input", JOINED, PLAIN): ["gated=input: arm lanes_plain does not fuse silu into its input"],
    ("input", LANES, LANES): ["gated=input: lanes serves ffn.gate and ffn.up in calls of their own"],
    ("epilogue", UNCLAMPED[0], LANES): ["gated=epilogue: arm lanes_unclamped_joined clamps no inputs of its product"],
    ("input", JOINED, UNCLAMPED[1]): ["gated=input: arm lanes_unclamped clamps no inputs of its product"],
}


@pytest.mark.parametrize("case", FALLS)
def test_what_an_arm_cannot_do_is_said(case: tuple[str, Arm, Arm]):
    place, first, second = case
    program, said = planned(first, second, 1, context(limit=LIMIT, gated=place, pdl=False))
    assert list(said) == [f"layers.0.ffn M=1: {s}: a launch makes the gated product" for s in FALLS[case]]
    assert "gated product" in [x.label for x in program.launches]
    assert program.name.endswith("gated=launch")


def test_dependent_launches_where_arm_and_target_have_them():
    program, said = planned(JOINED, PLAIN, 1, context(gated="launch"))
    assert said == ()
    assert [x.pdl for x in program.launches] == [True, True, False]
    program, said = planned(JOINED, LANES, 1, context(gated="launch", pdl=True))
    assert said == ()
    assert [x.pdl for x in program.launches] == [True] * 3
    for ctx in (context(gated="launch", target="a100", pdl=True), context(gated="launch", pdl=False)):
        program, said = planned(JOINED, LANES, 1, ctx)
        assert said == ()
        assert [x.pdl for x in program.launches] == [False] * 3


def test_a_limit_is_asked_of_no_arm_that_has_none():
    gate_up, down = routes(*UNCLAMPED, context())
    x, y = (Operand(Tensor("bf16", (1, n), "t")) for n in (128, 256))
    first = replace(projection_call(gate_up.site.projections, gate_up.at(GATE, 1), 1, context()), x=x, y=y)
    with pytest.raises(PlanError, match=r"arm lanes_unclamped_joined does not fuse limit, expected \['activation'\]"):
        program_of(UNCLAMPED[0], replace(first, epilogue=Epilogue(activation="silu", limit=LIMIT)))
    second = projection_call(down.site.projections, down.at(DOWN, 1), 1, context())
    said = "arm lanes_unclamped does not clamp what goes into its gated product, found a limit of 1.3, expected none"
    with pytest.raises(PlanError, match=said):
        program_of(UNCLAMPED[1], replace(second, prologue="silu", prologue_limit=LIMIT))


def test_no_gated_block():
    ctx = context()
    gate_up, down = routes(JOINED, LANES, ctx)
    with pytest.raises(PlanError, match=r"found activation 'relu', expected one of silu, gelu_tanh"):
        ffn_program(gate_up, down, 1, context("relu"), ARMS)
    for limit in (-1.0, np.inf, np.nan):
        with pytest.raises(PlanError, match=r"found an activation limit of .*, expected 0 for none or more"):
            ffn_program(gate_up, down, 1, context(limit=limit), ARMS)
    p = down.site[DOWN]
    other = replace(down, site=type(down.site)((replace(p, k=512),)))
    with pytest.raises(PlanError, match=r"found N=256 of gate, N=256 of up, K=512 of down, expected one intermedi"):
        ffn_program(gate_up, other, 1, ctx, ARMS)
