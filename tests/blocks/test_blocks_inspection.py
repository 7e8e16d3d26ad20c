"""Optional kernels are compiled and inspected beside an arm's own."""

from __future__ import annotations

from pathlib import Path

from lanes_arms import JOINED, LANES

from atlas_lab.core.registry import load_registry
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.checks import checks_of
from atlas_lab.experiments.inspection import launches
from atlas_lab.formats import FORMATS

TARGETS = {t.name: t for t in shipped_targets()}


def test_dependent_launches_are_inspected_where_the_target_runs_them():
    registry = load_registry([str(Path(__file__).parent / "lanes_arms.py")])
    registry.targets, registry.formats = dict(TARGETS), dict(FORMATS)
    for arm in (LANES, JOINED):
        for target, expected in (("h200", [False, True]), ("a100", [False])):
            found = launches(registry, registry.arm(arm.name), TARGETS[target], 256, 128, (1,))
            assert [x.launch.pdl for x in found] == expected


def test_a_card_below_sm_90_is_among_the_archs_that_are_compiled_for():
    archs = {c.arch for c in checks_of(LANES, TARGETS["h200"]) if c.kind == "compile"}
    assert {"sm_80", "sm_90a"} <= archs
