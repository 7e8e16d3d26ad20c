"""Blocks on the built-in joined arms, their inputs clamped: the places of the product agree bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_runs import Ran, routes_of, weights_of

from atlas_lab.arms import atlas_arms
from atlas_lab.blocks.ffn import DOWN, GATE, UP
from atlas_lab.checkpoint import sizes, synthetic_sites
from atlas_lab.core.context import Context
from atlas_lab.core.levers import Levers
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.target import shipped_targets

ARMS = {a.name: a for a in atlas_arms()}
SIZES = sizes("tiny", hidden=128, intermediate=128, activation_limit=0.8)
H200 = next(t for t in shipped_targets() if t.name == "h200")
PLACES = ("epilogue", "launch")
FULL = pytest.mark.full


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    return request.param


@pytest.mark.parametrize(
    ("form", "arm", "places", "m"),
    [
        pytest.param(*case, m, marks=() if m == quick else FULL)
        for case, quick in (
            (("bf16", "bf16_mma", PLACES), 9),
            (("fp8", "fp8_mma", PLACES), 1),
            (("nvfp4", "nvfp4_mma", PLACES), 1),
            (("nvfp4", "nvfp4_mma_repacked", (*PLACES, "input")), 9),
        )
        for m in (1, 9)
    ],
)
def test_clamped_products_agree(on: str, form: str, arm: str, places: tuple[str, ...], m: int):
    sites = synthetic_sites(SIZES, form, (0,), (GATE, UP, DOWN))
    stored, ran = weights_of(sites), []
    for place in places:
        ctx = Context(H200, SIZES.dims, Levers(gated=place), rows=(rows(1, 16),))
        ran.append(Ran(stored, routes_of(sites, ARMS, ARMS[f"{arm}_joined"], ARMS[arm], ctx), ARMS, m, ctx, on))
        assert ran[-1].said == ()
        assert ran[-1].parity.passed, (place, ran[-1].parity.reason)
        assert np.array_equal(ran[-1].out["y"].view(np.uint16), ran[0].out["y"].view(np.uint16)), place
    plain = replace(SIZES.dims, activation_limit=0.0)
    assert not ran[0].judge.parity(ran[0].program, m, plain, ran[0].x, ran[0].out.__getitem__).passed


@pytest.mark.parametrize(
    ("form", "arm", "width", "m", "place"),
    [
        ("bf16", "bf16_wgmma", 200, 67, "epilogue"),
        ("nvfp4", "nvfp4_wgmma", 384, 17, "launch"),
        pytest.param("bf16", "bf16_wgmma", 200, 17, "launch", marks=FULL),
        pytest.param("nvfp4", "nvfp4_wgmma", 384, 67, "epilogue", marks=FULL),
    ],
)
def test_gate_and_up_of_many_rows_in_one_launch(on: str, form: str, arm: str, width: int, m: int, place: str):
    """The gated product is a launch of its own, wherever it is asked for."""
    made = sizes("tiny", hidden=128, intermediate=width, activation_limit=0.8)
    sites = synthetic_sites(made, form, (0,), (GATE, UP, DOWN))
    ctx = Context(H200, made.dims, Levers(gated=place), rows=(rows_from(17),))
    ran = Ran(weights_of(sites), routes_of(sites, ARMS, ARMS[f"{arm}_joined"], ARMS[arm], ctx), ARMS, m, ctx, on)
    lacks = (
        f"layers.0.ffn M={m}: gated=epilogue: arm {arm}_joined fuses no activation: a launch makes the gated product"
    )
    assert ran.said == ((lacks,) if place == "epilogue" else ())
    products = [x for x in ran.program.launches if x.flops]
    assert [(x.label, x.flops) for x in products] == [
        (f"{arm}_joined", 4 * m * width * 128),
        (arm, 2 * m * 128 * width),
    ]
    assert ran.parity.passed, ran.parity.reason
