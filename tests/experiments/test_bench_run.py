"""What `bench` does around the clock, on the interpreter: weights loaded once, peers checked, faults kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_lab.experiments import bench, bench_peer, numbers, oracle, peers
from atlas_lab.experiments import bench_projection as projection
from atlas_lab.experiments.bench_case import BenchCase
from atlas_lab.experiments.bench_results import BenchResult
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.peer_graph import Peer, Stored
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime import timing
from atlas_lab.runtime.device import open_device

CASES = (
    BenchCase("bf16_gemv", "bf16", 48, 64, 1, "half", of_peer=0.85, of_floor=0.5),
    BenchCase("nvfp4_gemm", "nvfp4", 48, 64, 1, "half", used=("m ffn.up",)),
    BenchCase("nvfp4_gemm", "nvfp4", 48, 64, 3, "both", of_peer=0.85, of_one_row=0.8),
)


def half(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """A peer that is exact."""
    return Peer("half", "1", stored.format, timing.Timed("half", lambda: None, 1, None), stored.product(x), ("k",))


def doubled(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    return replace(half(stored, x, sets), output=2 * stored.product(x))


@pytest.fixture
def clock(bench_clock, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """With peers that need no package."""
    kinds = {"half": peers.Kind(("bf16",), half), "both": peers.Kind(("nvfp4", "fp8"), half)}
    monkeypatch.setattr(peers, "PEERS", kinds)
    return bench_clock


def run(registry, cases, with_peers: bool = True) -> BenchResult:
    result = BenchResult()
    with open_device("interpreter") as device:
        with_ = projection.Measuring(registry, Said(), with_peers, 5, 0, bench_peer.Products())
        try:
            bench.measure(cases, with_, device, result, lambda *_: None)
        finally:
            device.ledger.check_empty()
    return result


def test_cases_of_one_weight_are_loaded_once(registry, clock, monkeypatch: pytest.MonkeyPatch):
    loads, arrays = [], []
    execute, declared = numbers.execute, numbers.arrays
    monkeypatch.setattr(numbers, "execute", lambda *a: loads.append(a) or execute(*a))
    monkeypatch.setattr(numbers, "arrays", lambda *a: arrays.append(a) or declared(*a))
    cells = run(registry, CASES).cells
    assert [(c.name, c.status) for c in cells] == [(c.name, "passed") for c in CASES]
    assert len(loads) == len(arrays) == 2
    assert clock == [["ours", "read", "read ahead", "peer"]] * 3
    assert [c.peer.weights for c in cells] == ["bf16", "bf16", "nvfp4"]
    assert all(c.peer.rel_l2 < 1e-12 and not c.peer.wrong for c in cells)
    assert [len(c.ours.blocks) for c in cells] == [5, 5, 5]
    assert [c.used for c in cells] == [[], ["m ffn.up"], []]
    assert [[(m.name, round(m.found, 3), m.passed) for m in c.must] for c in cells] == [
        [("of_peer", 0.9, True), ("of_floor", 0.7, True)],
        [],
        [("of_peer", 0.9, True), ("of_one_row", 1.0, True)],
    ]


def test_each_file_is_written_once_and_before_anything_is_timed(registry, clock, tmp_path: Path):
    with_ = projection.Measuring(registry, Said(), True, 5, 0, bench_peer.Products())
    target = registry.targets["h200"]
    groups = [projection.Projections(g, with_, target) for g in (CASES[:1], CASES[1:])]
    first, second = (set(g.files()) for g in groups)
    assert [f for f, _ in first] == ["bf16"]
    assert sorted(f for f, _ in second) == ["bf16", "nvfp4"]
    assert len(first | second) == 2
    without = projection.Projections(CASES[:2][1:], replace(with_, with_peers=False), target)
    assert [f for f, _ in without.files()] == ["nvfp4"]
    run(registry, CASES)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_without_peers(registry, clock):
    cells = run(registry, CASES, with_peers=False).cells
    assert clock == [["ours", "read", "read ahead"]] * 3
    assert [[m.name for m in c.must] for c in cells] == [["of_floor"], [], ["of_one_row"]]


def test_a_peer_that_computes_something_else_is_no_yardstick(registry, clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(peers.PEERS, "half", peers.Kind(("bf16",), doubled))
    result = run(registry, CASES[:1])
    (cell,) = result.cells
    assert cell.status == "passed"
    assert cell.peer is not None
    assert cell.peer.wrong == (
        "found a relative error of 1.00e+00 against the float64 product of the bf16 weights it read, expected at most "
        "0.01"
    )
    assert [m.passed for m in cell.must] == [False, True]
    assert bench.says_no(result)


def test_a_peer_that_does_not_run_costs_ours_nothing(registry, clock, monkeypatch: pytest.MonkeyPatch):
    def fails(*_):
        raise RuntimeError("no kernel\nimage")

    def lacks(*_):
        raise ModuleNotFoundError("No module named 'humming'", name="humming")

    monkeypatch.setitem(peers.PEERS, "half", peers.Kind(("bf16",), fails))
    result = run(registry, CASES[:1])
    (cell,) = result.cells
    assert (cell.status, cell.peer, cell.peer_failed) == (
        *("passed", None),
        "peer half: RuntimeError: no kernel image",
    )
    assert cell.ours is not None
    assert bench.says_no(result)
    monkeypatch.setitem(peers.PEERS, "half", peers.Kind(("bf16",), lacks))
    with pytest.raises(ConfigError, match=r"^peer half: humming is not installed; pip install 'atlas-lab\[peers\]'$"):
        run(registry, CASES[:1])


def test_a_budget_ends_before_another_weight_and_what_there_is_was_kept(registry, clock):
    """Each group's cells are there when it is kept; those that were not begun say why."""
    result, seen = BenchResult(), []
    with open_device("interpreter") as device:
        with_ = projection.Measuring(registry, Said(), False, 5, 0, bench_peer.Products())

        def kept() -> None:
            seen.append([c.status for c in result.cells])
            time.sleep(0.01)

        assert not bench.measure(CASES, with_, device, result, lambda *_: None, budget=1e-3, kept=kept)
    assert len(seen) == 1
    assert set(seen[0]) == {"passed"}
    rest = result.cells[len(seen[0]) :]
    assert rest
    assert {(c.status, c.reason, c.ours) for c in rest} == {("not run", "the budget was spent", None)}


def test_a_fault_is_the_result_of_its_case_and_the_rest_goes_on(registry, clock, monkeypatch: pytest.MonkeyPatch):
    checked = projection.trial.run_program

    def faults(program, call, *rest):
        if call.m == 1 and call.weights.get("direct"):
            raise RuntimeError("illegal address")
        return checked(program, call, *rest)

    monkeypatch.setattr(projection.trial, "run_program", faults)
    cells = run(registry, (*CASES[1:], CASES[0])).cells
    assert [(c.status, c.reason) for c in cells] == [
        ("crashed", "RuntimeError: illegal address"),
        ("not run", ""),
        ("passed", ""),
    ]
    monkeypatch.setattr(projection.trial, "run_program", checked)

    def no_clock(*_, **__):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(timing, "measure", no_clock)
    cells = run(registry, CASES).cells
    assert [(c.status, c.reason) for c in cells] == [
        ("crashed", "RuntimeError: launch failed"),
        ("crashed", "RuntimeError: launch failed"),
        ("not run", ""),
    ]


def test_what_outputs_are_compared_with_is_made_before_anything_runs(registry, clock, monkeypatch: pytest.MonkeyPatch):
    product, run_program, seen = oracle.product, projection.trial.run_program, []
    monkeypatch.setattr(oracle, "product", lambda *a: seen.append("product") or product(*a))
    monkeypatch.setattr(projection.trial, "run_program", lambda *a: seen.append("run") or run_program(*a))
    assert {c.status for c in run(registry, CASES).cells} == {"passed"}
    assert seen == ["product"] * 2 + ["run"] * 3

    def fails(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(oracle, "product", fails)
    cells = run(registry, CASES).cells
    assert [(c.status, c.reason) for c in cells] == [
        ("crashed", "RuntimeError: no memory"),
        ("crashed", "RuntimeError: no memory"),
        ("not run", ""),
    ]


def test_products_are_kept_for_the_last_few_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_peer.Products, "MOST", 4)
    known = bench_peer.Products()
    w = np.eye(4, dtype=np.float32)
    made = []
    for n in (*range(1, 7), 6, 1):
        stored = Stored("bf16", n, 4, {"weight": w})
        object.__setattr__(stored, "product", lambda x, n=n: made.append(n) or x)
        known.of(stored, w)
    assert made == [1, 2, 3, 4, 5, 6, 1]


def test_of_many_rows_some_are_compared_the_first_and_the_last_among_them(registry, clock, monkeypatch):
    monkeypatch.setattr(projection, "JUDGED", 8)
    monkeypatch.setattr(bench_peer, "MOST_ROWS", 5)
    case = BenchCase("nvfp4_gemm", "nvfp4", 48, 64, 21, "both")
    compare, run_program, shapes = oracle.compare, projection.trial.run_program, []
    monkeypatch.setattr(oracle, "compare", lambda y, *rest: shapes.append(y.shape) or compare(y, *rest))
    (cell,) = run(registry, [case]).cells
    assert (cell.status, shapes, cell.peer.wrong) == ("passed", [(8, 48)], "")
    assert bench_peer.compared(21).tolist() == [0, 5, 10, 15, 20]
    for row in (0, 20):

        def breaks(*args, row=row):
            y = run_program(*args).copy()
            y[row] *= 2
            return y

        monkeypatch.setattr(projection.trial, "run_program", breaks)
        (cell,) = run(registry, [case]).cells
        assert (cell.status, cell.parity.row) == ("failed", row)
