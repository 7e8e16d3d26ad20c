"""Optional kernels are compiled and inspected beside an arm's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes_arms import JOINED, LANES, PLAIN, UNCLAMPED

from atlas_lab.core.arm import Arm
from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.checks import checks_of
from atlas_lab.experiments.inspection import launches
from atlas_lab.formats import FORMATS

TARGETS = {t.name: t for t in shipped_targets()}


@pytest.fixture(scope="module")
def registry() -> Registry:
    made = load_registry([str(Path(__file__).parent / "lanes_arms.py")])
    made.targets, made.formats = dict(TARGETS), dict(FORMATS)
    return made


def ways(registry: Registry, arm: Arm, target: str) -> list[tuple[str, bool]]:
    """What each launch is asked for beside a product, and whether it is dependent."""
    out = []
    for x in launches(registry, registry.arm(arm.name), TARGETS[target], 256, 128, (1,)):
        p = dict(x.launch.kernel.spec.parameters)
        out.append((" ".join(name for name in ("pair", "gate", "clamp") if p[name]), x.launch.pdl))
    return out


@pytest.mark.parametrize(("arm", "way"), [(LANES, "gate"), (JOINED, "pair"), (PLAIN, ""), (UNCLAMPED[0], "pair")])
def test_launches_of_blocks_are_inspected_where_arm_and_target_have_them(registry: Registry, arm: Arm, way: str):
    """Those with a gated product, clamped where the arm clamps; dependent ones where the target has them."""
    expected = ["", *([way] if way else []), *([f"{way} clamp"] if arm in (LANES, JOINED) else [])]
    assert ways(registry, arm, "a100") == [(w, False) for w in expected]
    assert ways(registry, arm, "h200") == [(w, arm is not PLAIN) for w in expected]


def test_a_card_below_sm_90_is_among_the_archs_that_are_compiled_for():
    archs = {c.arch for c in checks_of(LANES, TARGETS["h200"]) if c.kind == "compile"}
    assert {"sm_80", "sm_90a"} <= archs
