"""A row's bits do not depend on how many rows of x share the pass over the weight, whatever the setting, and wherever
the last blocks take fewer row tiles than the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.mma.base import Mma
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tuning import spelled
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import run
from atlas_lab.formats import FORMATS
from atlas_lab.runtime.device import open_device

# Three row tiles on an SM: a block of two tiles is followed by one of one.
TARGET, N, K = replace(shipped_targets()[0], sms=1), 39, 512
ARMS = {a.name: a for a in atlas_arms() if isinstance(a, Mma) and not a.joined}
KINDS = {"cluster", "abreast"}
# Of each arm the first, and the last where it is over a cluster or abreast; the others in make test-full.
SETTINGS = [
    pytest.param(
        name, s, marks=() if i == 0 or (i == len(offered) - 1 and KINDS & dict(s).keys()) else pytest.mark.full
    )
    for name, offered in ((name, a.settings(N, K, TARGET)) for name, a in ARMS.items())
    for i, s in enumerate(offered)
]


def form_of(arm: Mma) -> str:
    if arm.name == "fp8_row_mma":
        return "fp8_row"
    return next(f.name for f in FORMATS.values() if f.family == (arm.source or "nvfp4"))


@pytest.mark.parametrize(("name", "setting"), SETTINGS, ids=lambda v: v if isinstance(v, str) else spelled(v))
def test_bits_of_a_row_are_those_of_one_row_alone(name: str, setting) -> None:
    case = Case(name, ("ffn.up",), 16, N, K, form_of(ARMS[name]), setting=setting)
    base = base_context(TARGET)
    with open_device("interpreter", TARGET) as device:
        ran = [run(replace(case, m=m), ARMS[name], device, base) for m in (1, 9, 16)]
    for r in ran:
        assert r.out.tobytes() == ran[-1].out[: r.case.m].tobytes()
    assert np.any(ran[-1].out.astype(np.float32)[:, -7:])
    if ARMS[name].ragged and dict(setting)["wide_tiles"] == 2:
        assert ran[-1].program.launches[0].grid[0] == 2 * dict(setting).get("wide_cluster", 1)
