"""`bench` on a whole feed-forward block, on the interpreter: one load, every form checked before it is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.route import RouteError
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import bench, bench_ffn, bench_peer, numbers
from atlas_lab.experiments.bench_case import FfnCase
from atlas_lab.experiments.bench_projection import Measuring
from atlas_lab.experiments.bench_results import BenchResult
from atlas_lab.experiments.settings import Said
from atlas_lab.formats import FORMATS
from atlas_lab.runtime.device import open_device

LANES = Path(__file__).parent.parent / "blocks" / "lanes_arms.py"
FIRST = FfnCase("lanes_joined", "lanes", "nvfp4", 128, 128, 1, of_floor=0.6)
CASES = (FIRST, replace(FIRST, gated="input", of_floor=0.8), replace(FIRST, gated="launch", pdl=False, of_floor=0.0))


@pytest.fixture(scope="module")
def lanes() -> Registry:
    made = load_registry([str(LANES)])
    made.targets, made.formats = {t.name: t for t in shipped_targets()}, dict(FORMATS)
    return made


def measuring(registry: Registry) -> Measuring:
    return Measuring(registry, Said(), True, 5, 0, bench_peer.Products())


def run(registry: Registry, cases) -> BenchResult:
    result = BenchResult()
    with open_device("interpreter") as device:
        bench.measure(cases, measuring(registry), device, result, lambda *_: None)
        device.ledger.check_empty()
    return result


def test_every_form_is_checked_then_timed_over_one_load(lanes, bench_clock, monkeypatch: pytest.MonkeyPatch):
    loads = []
    execute = numbers.execute
    monkeypatch.setattr(numbers, "execute", lambda *a: loads.append(a) or execute(*a))
    result = run(lanes, CASES)
    assert [(c.name, c.status, c.reason) for c in result.cells] == [(c.name, "passed", "") for c in CASES]
    assert (len(loads), bench_clock) == (1, [["ours", "read", "read ahead"]] * 3)
    assert [len(c.launches) for c in result.cells] == [2, 2, 3]
    assert all(c.parity.passed and c.ours.median_us == pytest.approx(10) for c in result.cells)
    assert [[(m.name, round(m.found, 3), m.passed) for m in c.must] for c in result.cells] == [
        [("of_floor", 0.7, True)],
        [("of_floor", 0.7, False)],
        [],
    ]
    assert bench.says_no(result)
    weights = 3 * (128 // 16) * 1152 + 3 * 4
    assert [c.bytes for c in result.cells] == [weights + 2 * 2 * 128] * 3


def test_a_wrong_block_is_not_timed(lanes, bench_clock, monkeypatch: pytest.MonkeyPatch):
    checked = bench_ffn.trial.run_program

    def off(program, call, *rest):
        made = checked(program, call, *rest)
        if "gated=input" in program.name:
            made[:, : call.n] = 0
        return made

    monkeypatch.setattr(bench_ffn.trial, "run_program", off)
    cells = run(lanes, CASES).cells
    assert [c.status for c in cells] == ["passed", "failed", "passed"]
    assert cells[1].reason.startswith("its output differs in its bits from that of ffn gated=epilogue") or (
        "outputs of y are outside the tolerance" in cells[1].reason
    )
    assert cells[1].ours is None


def test_a_fault_ends_the_block(lanes, bench_clock, monkeypatch: pytest.MonkeyPatch):
    def faults(*_):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(bench_ffn.trial, "run_program", faults)
    cells = run(lanes, CASES).cells
    assert [(c.status, c.reason) for c in cells] == [
        ("crashed", "RuntimeError: illegal address"),
        ("not run", ""),
        ("not run", ""),
    ]


def test_a_form_that_an_arm_does_not_serve_is_refused(lanes):
    h200 = lanes.targets["h200"]
    with pytest.raises(RouteError, match="arm lanes_unfused fuses no activation"):
        bench_ffn.Blocks([replace(FIRST, gate_up="lanes_unfused")], measuring(lanes), h200)
    said = "M=17: found nvfp4_wgmma, nvfp4_wgmma, nvfp4_wgmma, expected lanes_joined, lanes_joined, lanes"
    with pytest.raises(RouteError, match=said):
        bench_ffn.Blocks([FIRST, replace(FIRST, m=17)], measuring(lanes), h200)
