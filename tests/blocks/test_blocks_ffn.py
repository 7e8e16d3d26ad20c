"""The gated feed-forward block: which launches its levers give, in which of three places, with which bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lanes_arms import JOINED, LANES, PLAIN, UNFUSED

from atlas_lab.blocks.ffn import DOWN, GATE, UP, ffn_program
from atlas_lab.checkpoint import sizes, synthetic_sites
from atlas_lab.core.arm import Arm
from atlas_lab.core.candidate import Entry
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.levers import Levers
from atlas_lab.core.program import PlanError
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route
from atlas_lab.core.rows import rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import trial
from atlas_lab.experiments.ffn_parity import FfnParity
from atlas_lab.experiments.numbers import activations
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.load import execute

SIZES = sizes("tiny", hidden=128, intermediate=256)
TARGETS = {t.name: t for t in shipped_targets()}
ARMS = {a.name: a for a in (LANES, JOINED, PLAIN, UNFUSED)}
SITES = synthetic_sites(SIZES, "nvfp4", (0,), (GATE, UP, DOWN))


def context(kind: str = "silu", target: str = "h200", **levers: Any) -> Context:
    return Context(TARGETS[target], replace(SIZES.dims, activation=kind), Levers(**levers), rows=(rows(1, 16),))


def routes(first: Arm, second: Arm, ctx: Context) -> list[Route]:
    entries = [Entry(a, "atlas-lab", "1", "tests", built_in=True) for a in ARMS.values()]
    pins = tuple(Pin(r, a.name) for r, a in ((GATE, first), (UP, first), (DOWN, second)))
    return [resolve(s, replace(ctx, preferences=Preferences(pins)), entries) for s in SITES]


def planned(first: Arm, second: Arm, m: int, ctx: Context) -> Any:
    return ffn_program(*routes(first, second, ctx), m, ctx, ARMS)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(7), {}
    for p in (p for s in SITES for p in s.projections):
        w = (rng.standard_normal((p.n, p.k)) / np.sqrt(p.k) * (3 if p.role == GATE else 1)).astype(np.float32)
        fields = get("nvfp4").quantize(w)
        made |= {t.name: fields[f] for f, t in p.weight.fields}
    return made


class Ran:
    """A block run on the interpreter with everything checked: outputs by name, and its parity."""

    def __init__(self, stored: dict[str, np.ndarray], first: Arm, second: Arm, m: int, ctx: Context) -> None:
        found = routes(first, second, ctx)
        self.program, self.said = ffn_program(*found, m, ctx, ARMS)
        judge = FfnParity(*found, ARMS, lambda t: stored[t.name])
        x = activations((0, "ffn", m), SIZES.hidden, 3)
        call, arrays = judge.call(self.program, m, ctx), judge.arrays(m)
        exposed = replace(self.program, outputs=(*self.program.outputs, *self.program.temporaries), temporaries=())
        self.out: dict[str, np.ndarray] = {}
        with open_device("interpreter") as device:
            with execute(load_plan(found), lambda t: stored[t.name], lambda w, label: None, device) as weights:
                for t in exposed.outputs:
                    one = replace(call, y=replace(call.y, data=t))
                    ports = {self.program.inputs[0].name: x}
                    made = trial.run_program(exposed, one, weights, device, ports, arrays)
                    self.out[t.name.rpartition("/")[2]] = made
            device.ledger.check_empty()
        self.parity = judge.parity(self.program, m, ctx.dims.activation, x, lambda name: self.out[name])
        self.judge, self.x = judge, x


@pytest.mark.parametrize("m", [1, 3, 13])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_three_places_agree_bit_for_bit_and_are_right(stored, kind: str, m: int):
    forms = [(JOINED, LANES, g, True) for g in ("epilogue", "launch", "input")]
    forms += [(LANES, LANES, "launch", True), (UNFUSED, PLAIN, "epilogue", False)] if m == 3 else []
    ran = [Ran(stored, a, b, m, context(kind, gated=g, pdl=pdl)) for a, b, g, pdl in forms]
    for r, form in zip(ran, forms, strict=True):
        assert r.parity.passed, (form, r.parity.reason)
        assert np.array_equal(r.out["y"].view(np.uint16), ran[0].out["y"].view(np.uint16)), form
        if "h" in r.out:
            assert np.array_equal(r.out["h"].view(np.uint16), ran[0].out["h"].view(np.uint16)), form
    assert np.abs(ran[0].out["y"].astype(np.float64)).max() > 0.1


def test_what_is_wrong_is_seen(stored):
    """A row of zeros, one element off by two ulps, halves exchanged, in every stage."""
    bf16 = dtype("bf16").numpy
    for place in ("epilogue", "launch", "input"):
        r = Ran(stored, JOINED, LANES, 3, context(gated=place))
        for name, held in r.out.items():
            zeroed, off = held.copy(), held.copy()
            zeroed[1] = 0
            at = np.unravel_index(np.abs(held.astype(np.float32)).argmax(), held.shape)
            off[at] = (off[at].astype(np.float32) * (1.125)).astype(bf16)
            for wrong in (zeroed, off, np.full_like(held, np.nan)):
                changed = {**r.out, name: wrong}
                found = r.judge.parity(r.program, 3, "silu", r.x, changed.__getitem__)
                assert not found.passed, (place, name)
                assert "outputs of" in found.reason
        assert not r.judge.parity(r.program, 3, "gelu_tanh", r.x, r.out.__getitem__).passed


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
}


@pytest.mark.parametrize("case", FALLS)
def test_what_an_arm_cannot_do_is_said(case: tuple[str, Arm, Arm]):
    place, first, second = case
    program, said = planned(first, second, 1, context(gated=place, pdl=False))
    assert list(said) == [f"layers.0.ffn M=1: {s}: a launch makes the gated product" for s in FALLS[case]]
    assert "gated product" in [x.label for x in program.launches]
    assert program.name.endswith("gated=launch")


def test_dependent_launches_where_arm_and_target_have_them():
    program, said = planned(JOINED, PLAIN, 1, context(gated="launch", pdl=True))
    assert said == ("layers.0.ffn M=1: pdl: arm lanes_plain has no dependent launches for ffn.down",)
    assert [x.pdl for x in program.launches] == [True, True, False]
    program, said = planned(JOINED, LANES, 1, context(gated="launch", pdl=True))
    assert said == ()
    assert [x.pdl for x in program.launches] == [True] * 3
    for ctx in (context(gated="launch", target="a100", pdl=True), context(gated="launch")):
        program, said = planned(JOINED, LANES, 1, ctx)
        assert said == ()
        assert [x.pdl for x in program.launches] == [False] * 3


def test_no_gated_block():
    ctx = context()
    gate_up, down = routes(JOINED, LANES, ctx)
    with pytest.raises(PlanError, match=r"found activation 'relu', expected one of silu, gelu_tanh"):
        ffn_program(gate_up, down, 1, context("relu"), ARMS)
    p = down.site[DOWN]
    other = replace(down, site=type(down.site)((replace(p, k=512),)))
    with pytest.raises(PlanError, match=r"found N=256 of gate, N=256 of up, K=512 of down, expected one intermedi"):
        ffn_program(gate_up, other, 1, ctx, ARMS)
