"""Neither how many weights a step of the GEMVs over FP8 has nor how a card converts them changes a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas_lab.arms import atlas_arms, fp8
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import run
from atlas_lab.kernels.gemv.fp8 import SPAN, gemv_fp8_block, gemv_fp8_row
from atlas_lab.runtime.device import open_device

H200 = shipped_targets()[0]
OLDER = replace(H200, capability=(8, 0))
ARMS = {a.name: a for a in atlas_arms()}
FORMS = [("fp8_gemv", "fp8", gemv_fp8_block), ("fp8_row_gemv", "fp8_row", gemv_fp8_row)]


@pytest.mark.parametrize("k", [16, SPAN - 16, SPAN, 2 * SPAN + 32, 5 * SPAN, 6 * SPAN + 272])
@pytest.mark.parametrize(("name", "form", "family"), FORMS)
def test_bits_depend_neither_on_how_much_a_step_loads_nor_on_how_a_card_converts(
    name: str, form: str, family, k: int, monkeypatch
) -> None:
    arm, found, launched = ARMS[name], [], set()
    for unroll, target in ((5, H200), (5, OLDER), (1, OLDER), (2, H200)):
        monkeypatch.setattr(fp8, "UNROLL", unroll)
        monkeypatch.setattr(arm, "kernels", fp8.gemvs(family, native=False))
        monkeypatch.setattr(arm, "optional_kernels", fp8.gemvs(family, native=True))
        with open_device("interpreter", target) as device:
            ran = run(Case(name, ("ffn.up",), 2, 5, k, form), arm, device, base_context(target))
        found.append(ran.out.tobytes())
        launched |= {x.kernel for x in ran.program.launches}
    assert np.any(ran.out.astype(np.float32))
    assert len(launched) == 4
    assert found == found[:1] * 4


def test_a_warp_may_have_more_sums_than_lanes(monkeypatch) -> None:
    """Sixteen rows of the weights times three of x, on a card so small that K is not cut."""
    arm, found, target = ARMS["fp8_gemv"], [], replace(H200, sms=1)
    for rows in (2, 16):
        monkeypatch.setattr(fp8, "ROWS", rows)
        monkeypatch.setattr(fp8, "BLOCKS", {native: {1: 1, 2: 1, 3: 1} for native in (True, False)})
        monkeypatch.setattr(arm, "optional_kernels", fp8.gemvs(gemv_fp8_block, native=True))
        with open_device("interpreter", target) as device:
            ran = run(Case("fp8_gemv", ("ffn.up",), 3, 37, 528, "fp8"), arm, device, base_context(target))
        found.append(ran.out.tobytes())
    assert np.any(ran.out.astype(np.float32)[:, -5:])
    assert found[0] == found[1]
