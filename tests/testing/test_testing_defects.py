"""Every kind of check finds what it is for, and an arm with nothing wrong passes them all."""

from __future__ import annotations

import pytest
from defective import DEFECTS

from atlas_lab.core.arm import Arm
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.checks import KINDS, checks_of, run_check
from atlas_lab.kernels.lang.compile import compiler_missing
from atlas_lab.runtime.device import open_device

H200 = shipped_targets()[0]
SOUND = DEFECTS[0][0]
FOLLOW = {"reduction", "teeth"}  # these run the arm too, and fail where it does


@pytest.mark.parametrize(("arm", "expected"), [pytest.param(a, e, id=a.name) for a, e in DEFECTS])
def test_a_defect_is_found_by_its_check(arm: Arm, expected: dict[str, str]) -> None:
    compiles = arm is SOUND or "compile" in expected
    if compiler_missing():
        compiles, expected = False, {k: v for k, v in expected.items() if k != "compile"}
    checks = [c for c in checks_of(arm, H200) if c.kind != "compile" or (compiles and c.arch == "sm_90a")]
    device = open_device("interpreter", H200)
    results = [(c, run_check(c, arm, device, {"sound": SOUND})) for c in checks]
    failed: dict[str, list[str]] = {}
    for check, result in results:
        if not result.ok:
            failed.setdefault(check.kind, []).append(result.sentence)
            assert "\n" not in result.sentence
    for kind, words in expected.items():
        assert any(words in sentence for sentence in failed.get(kind, ())), (kind, failed)
    assert set(failed) - set(expected) <= (FOLLOW if "parity" in expected else set()), failed
    if arm is SOUND:
        assert {c.kind for c in checks} >= set(KINDS) - {"compile"}
