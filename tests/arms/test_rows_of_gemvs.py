"""A row's bits do not depend on how many rows of x share the pass over the weight, however K is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.parity import run
from atlas_lab.formats import FORMATS
from atlas_lab.runtime.device import open_device

H200 = shipped_targets()[0]
GEMVS = {a.name: a for a in atlas_arms() if "_gemv" in a.name}
FORM = {
    "": ("nvfp4",),
    **{f.family: tuple(g.name for g in FORMATS.values() if g.family == f.family) for f in FORMATS.values()},
}
K = 2304


@pytest.mark.parametrize("sms", [pytest.param(1, marks=pytest.mark.full), 132])
@pytest.mark.parametrize("name", GEMVS)
def test_bits_of_a_row_are_those_of_one_row_alone(name: str, sms: int) -> None:
    arm, target = GEMVS[name], replace(H200, sms=sms)
    assert (arm.rows.first, arm.rows.last) == (1, 3)
    base = base_context(target)
    cuts = set()
    for form in FORM[arm.source]:
        case = Case(name, ("ffn.up",), 3, 19, K, form)
        if not verdict_of(case, arm, base):
            continue
        with open_device("interpreter", target) as device:
            ran = [run(replace(case, m=m), arm, device, base) for m in (1, 2, 3)]
        for r in ran:
            assert r.out.tobytes() == ran[-1].out[: r.case.m].tobytes()
            assert np.any(r.out.astype(np.float32))
            cuts.add(r.program.launches[0].grid)
    assert len(cuts) == 1
