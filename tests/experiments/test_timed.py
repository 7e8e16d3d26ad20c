"""What happens around the clock: rotation, shares, outputs checked again. The clock itself is the runtime's."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from atlas_lab.experiments import ab, compare, config, numbers, report, timed
from atlas_lab.experiments.results import AbResult, ExperimentResult
from atlas_lab.experiments.session import Session, open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Device, open_device

INTERPRETER = Said(device="interpreter")
Opened = tuple[Session, ExperimentResult, Device, numbers.Products, timed.Digests]
US = {"a": 10.0, "b": 6.0, "c": 8.0}


@pytest.fixture
def opened(registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A session whose cells passed parity, its result, its device, and a clock that says what `US` says."""
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "r.yaml").write_text(
        "experiments:\n  x:\n    model: {family: qwen3.5, hidden: 32, intermediate: 24}\n    m: [1, 3]\n"
        "    roles: [ffn.gate, ffn.down]\n    baseline: a\n    require: {b: {max_time_ratio: 0.5}, c: "
        "{max_time_ratio: 0.9}}\n    variants: {a: {pins: {'*': toy}}, b: {pins: {'*': toy_same}}, c: {pins: {'*': "
        "toy_grid}}}\n"
    )
    session = open_session(config.load(tmp_path / "r.yaml"), INTERPRETER, registry, "x")
    x = ab.described(session)
    with open_device("interpreter") as device:
        products = numbers.Products(session.reference_file(), 20)
        judged = ab._numbers(session, x, device, products, ab.silent)
        assert {c.status for c in x.cells} == {"passed"}
        yield session, x, device, products, judged
        device.ledger.check_empty()


def clock(monkeypatch: pytest.MonkeyPatch, device: Device) -> list[list[str]]:
    """Stands in for the runtime's timing; returns the groups that were alternated."""
    groups: list[list[str]] = []

    def rotate(name, programs, *, factor):
        assert factor == 4
        programs[-1].run()
        assert len(programs) == timing.rotations(programs[0].program.persistent[0].bytes, device.target.l2)
        return SimpleNamespace(name=name, keep=SimpleNamespace(close=lambda: None))

    def measure(device, timed, *, rounds, seed):
        groups.append([t.name for t in timed])
        rng = np.random.default_rng(seed)
        noise = {t.name: 1 + 0.01 * rng.standard_normal(rounds) for t in timed}
        return SimpleNamespace(
            blocks=lambda name: US[name[0]] * 1e-6 * noise[name], starved=("c layers.0.ffn.gate M=1",)
        )

    monkeypatch.setattr(timing, "rotate", rotate)
    monkeypatch.setattr(timing, "rotations", lambda nbytes, l2: 3)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(probe, "ceilings", lambda device: SimpleNamespace(read_rate=1e9))
    return groups


def test_times_and_comparisons(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    session, x, device, products, judged = opened
    groups = clock(monkeypatch, device)
    timed.run(session, x, device, products, judged, ab.silent)
    assert [len(g) for g in groups] == [6, 6]  # every variant and role of one M together
    cell = next(c for c in x.cells if (c.variant, c.role, c.m) == ("b", "ffn.gate", 3))
    assert cell.time.median_us == pytest.approx(6, rel=0.02)
    assert cell.time.ci95[0] < cell.time.median_us < cell.time.ci95[1]
    assert len(cell.time.blocks) == timed.ROUNDS
    assert cell.time.floor_us == pytest.approx((24 * 32 * 2 + 3 * (24 + 32) * 2) / 1e9 * 1e6)
    assert cell.time.share == pytest.approx(cell.time.floor_us / cell.time.median_us)
    assert cell.time.bound_by == "read"
    assert next(c for c in x.cells if (c.variant, c.role, c.m) == ("c", "ffn.gate", 1)).time.bound_by == "the host"
    x.comparisons = compare.comparisons(session, x, 20)
    total = {(c.b, c.m): c for c in x.comparisons if c.role is None}
    assert total["b", 3].ratio == pytest.approx(0.6, rel=0.02)
    assert total["b", 3].verdict == "faster"
    assert len(x.comparisons) == 2 * 2 * 3
    console = Console(width=100, record=True, file=StringIO())
    device_name = {"kind": "cuda", "name": "NVIDIA H200"}
    report.print_ab(AbResult(status="complete", device=device_name, target={"name": "h200"}, experiments=[x]), console)
    text = console.export_text()
    assert "measured on NVIDIA H200: medians of 20 blocks" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.startswith(" b ") and "ffn.gate" in line]
    ratio = next(c for c in x.comparisons if (c.b, c.role, c.m) == ("b", "ffn.gate", 1))
    low, high = ratio.ci95
    assert rows[0][8:10] == [f"{ratio.ratio:.3f}", f"{low:.3f}-{high:.3f}"]
    assert max(map(len, text.splitlines())) <= 100
    bounds = {b.variant: (b.passed, b.where) for b in compare.bounds(session, x)}
    assert bounds["b"][0] is False
    assert bounds["c"][0] is True


def test_an_output_that_changed_while_timed_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    session, x, device, products, judged = opened
    clock(monkeypatch, device)
    real = Device.download
    seen: dict[str, int] = {}

    def download(self, buffer, dtype, shape, offset=0):
        out = real(self, buffer, dtype, shape, offset)
        if buffer.name.endswith("ffn.down/y"):
            seen[buffer.name] = seen.get(buffer.name, 0) + 1
            if seen[buffer.name] == 3:  # the third variant's, after the loop
                out[0, 0] = 1e9
        return out

    monkeypatch.setattr(Device, "download", download)
    timed.run(session, x, device, products, judged, ab.silent)
    failed = [c for c in x.cells if c.status == "failed"]
    assert [(c.variant, c.role, c.m) for c in failed] == [("c", "ffn.down", 1)]
    assert failed[0].reason.startswith("after the timed loop: 1 of 32 outputs are outside the tolerance")
    assert failed[0].time is None
    reason = next(c.reason for c in compare.comparisons(session, x, 0) if (c.b, c.m, c.role) == ("c", 1, None))
    assert reason == "c failed parity for layers.0.ffn.down M=1"


def test_an_output_that_was_never_the_judged_one_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    session, x, device, products, judged = opened
    clock(monkeypatch, device)
    real = Device.upload

    def upload(self, buffer, array, *offset):
        wrong = buffer.name.endswith("ffn.gate/x")
        real(self, buffer, array * array.dtype.type(2) if wrong else array, *offset)

    monkeypatch.setattr(Device, "upload", upload)
    timed.run(session, x, device, products, judged, ab.silent)
    assert {c.role for c in x.cells if c.status == "failed"} == {"ffn.gate"}
    assert all(c.time is None for c in x.cells if c.role == "ffn.gate")


def test_without_the_lever_graph_programs_are_launched(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    session, x, device, products, judged = opened
    clock(monkeypatch, device)
    launched = []

    def measure(device, timed, *, rounds, seed):
        for t in timed:
            t.replay()
            launched.append((t.calls_per_replay, t.keep))
        return SimpleNamespace(blocks=lambda name: np.full(rounds, 1e-6), starved=())

    monkeypatch.setattr(timing, "measure", measure)
    eager = replace(session, said=Said(sets={"graph": "off"}, device="interpreter"))
    timed.run(eager, x, device, products, judged, ab.silent)
    assert launched == [(3, None)] * 12


def test_rotated_weights_are_equal(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    session, _, device, _, _ = opened
    clock(monkeypatch, device)
    held = session.file("c")
    plan = session.numbers_plan("c", held)
    with numbers.Bench.of(plan, held, device) as bench:
        (name,) = (t.name for t in plan.steps[0].program.persistent)
        own, *copies = timed.rotated(bench, plan.steps[0], device.target.l2)
        assert own == {}
        assert len(copies) == 2
        first = device.download(bench.weights[name], "u8", (24 * 32 * 2,))
        for copy in copies:
            assert copy[name] is not bench.weights[name]
            assert np.array_equal(device.download(copy[name], "u8", (24 * 32 * 2,)), first)
