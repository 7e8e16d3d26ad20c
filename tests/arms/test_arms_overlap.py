"""Launches of an arm that overlap with those of its last call: nothing is read or written before those are over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unwaited import twice

from atlas_lab.arms import atlas_arms
from atlas_lab.core.arm import kernels_of
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle, parity, trial
from atlas_lab.experiments.case import base_context
from atlas_lab.experiments.cases import teeth_case
from atlas_lab.experiments.parity import run
from atlas_lab.kernels.lang import WAITS
from atlas_lab.runtime import load
from atlas_lab.runtime.bind import Resolved
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice

HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
ARMS = {a.name: a for a in atlas_arms() if any(WAITS & set(k.ops) for k in kernels_of(a)) and teeth_case(a, HOPPER)}
# One of each way to wait; the others with --full.
MAIN = ("bf16_gemv", "fp8_mma", "q4k_mma_repacked", "bf16_wgmma", "fp8_wgmma_w8a8", "nvfp4_wgmma", "q2_dequant")


@pytest.mark.parametrize("name", [n if n in MAIN else pytest.param(n, marks=pytest.mark.full) for n in ARMS])
def test_two_calls_that_nobody_waits_for_between_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = ARMS[name]
    case = teeth_case(arm, HOPPER)
    assert case is not None
    with open_device("interpreter", HOPPER) as device:
        once = run(case, arm, device, base_context(HOPPER))
        monkeypatch.setattr(trial, "run_program", twice)
        again = run(case, arm, device, base_context(HOPPER))
    assert oracle.same_bits(once.out, again.out)
    assert np.any(again.out.astype(np.float32))
    waiting = [x for x in again.program.launches if x.waits]
    assert waiting
    # what reads what the launch before made, before it waits, may not overlap with it
    assert [x.pdl for x in waiting] == [not (name == "q2_dequant" and x.label == name) for x in waiting]


def test_nothing_is_in_flight_once_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches read weights before they wait for the one that built them, if that may still run."""
    execute, left = load.execute, []

    def on_device(plan: Any, read: Any, check: Any, device: InterpreterDevice) -> Any:
        monkeypatch.setattr(device, "_give", lambda buffer: None)  # as if nothing were freed after the last build
        loaded = execute(plan, read, check, device, builds="device")
        left.append(device.in_flight.overlap(Resolved(again, ())))
        return loaded

    arm = ARMS["nvfp4_mma_repacked"]
    case = teeth_case(arm, HOPPER)
    assert case is not None
    with open_device("interpreter", HOPPER) as device:
        (again,) = run(case, arm, device, base_context(HOPPER)).program.launches
    assert again.pdl
    monkeypatch.setattr(parity.load, "execute", on_device)
    with open_device("interpreter", HOPPER) as device:
        run(case, arm, device, base_context(HOPPER))
    assert [overlap.spans for overlap in left] == [[]]
