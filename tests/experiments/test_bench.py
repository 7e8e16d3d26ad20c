"""`bench`: its suites can be planned, it refuses without a GPU, its page says what its JSON says."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.experiments import bench, performance, suites
from atlas_lab.experiments.bench_results import BenchCell, BenchResult, PeerResult, read_bench
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.peers import PEERS
from atlas_lab.experiments.results import dumps, write
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime.driver import missing_gpu

CASE = suites.BenchCase("bf16_gemv", "bf16", 64, 48, 1, "torch.mv", of_peer=0.85, of_floor=0.5)


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_case_of_a_suite_can_be_planned(registry, name: str):
    cases = suites.suite(name)
    assert len({c.name for c in cases}) == len(cases)
    for case in cases:
        assert case.peer in PEERS
        plan = bench.plan_of(case, registry, Said(), registry.targets["h200"])
        (step,) = plan.steps
        assert (step.assignment.arm, step.call.n, step.call.k, step.call.m) == (case.arm, case.n, case.k, case.m)


def test_what_the_foundation_must_reach():
    must = {(c.arm, c.m): (c.of_peer, c.of_floor) for c in suites.suite("foundation") if c.of_peer or c.of_floor}
    assert must == {
        ("bf16_gemv", 1): (0.85, 0),
        ("fp8_gemv", 1): (0, 0.75),
        ("nvfp4_gemv", 1): (0, 0.55),
        ("bf16_gemm", 4096): (0.5, 0),
    }
    with pytest.raises(ConfigError) as e:
        suites.suite("fundation")
    assert str(e.value) == (
        "--suite fundation: found no such suite, expected one of foundation, load, did you mean 'foundation'?"
    )


def test_refused_without_a_gpu(registry):
    def run(said: Said) -> None:
        bench.run_bench(
            "x", [], registry, said, with_peers=False, seed=0, command="", result=BenchResult()
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"^bench: found --device interpreter, expected a GPU"):
        run(Said(device="interpreter"))
    if missing_gpu():
        with pytest.raises(ConfigError, match=r"^bench: no speed is measured without a GPU: no CUDA: "):
            run(Said())


@pytest.fixture
def cell(registry) -> BenchCell:
    """A case measured at 10 us beside a read of 7 us and a peer of 9 us."""
    made = BenchCell(name=CASE.name, arm=CASE.arm, format="bf16", n=64, k=48, m=1, status="passed")
    (step,) = bench.plan_of(CASE, registry, Said(), registry.targets["h200"]).steps
    blocks = {"ours": [10.0] * 8, "read": [7.0] * 8}
    bench.fill(made, step, blocks, registry.targets["h200"], 0)
    made.peer = PeerResult(
        name="torch.mv",
        version="torch 2.11",
        kernels=["gemv2T", "void ns::reduce<32, float>(int*)"],
        time=bench.measured([9.0] * 8, 0),
        rel_l2=1e-3,
        ours=bench.relative([9.0] * 8, [10.0] * 8, 0),
    )
    made.must = bench.musts(CASE, made)
    return made


def test_shares_and_musts(cell: BenchCell):
    assert (cell.floor_us, cell.bound_by, cell.share) == (7.0, "read", 0.7)
    assert cell.peer is not None
    assert cell.peer.ours.speed == 0.9
    assert [(m.name, m.found, m.passed) for m in cell.must] == [("of_peer", 0.9, True), ("of_floor", 0.7, True)]
    slow = BenchCell(name="", arm="", format="", n=1, k=1, m=1, peer=cell.peer.model_copy())
    slow.peer.ours = bench.relative([9.0] * 8, [20.0] * 8, 0)
    assert [m.passed for m in bench.musts(CASE, slow)] == [False]
    assert bench.says_no(BenchResult(cells=[slow.model_copy(update={"must": bench.musts(CASE, slow)})]))
    assert not bench.says_no(BenchResult(cells=[cell]))


def test_arithmetic_bounds_the_floor_of_large_products(registry):
    case = suites.BenchCase("bf16_gemm", "bf16", 17408, 5120, 4096)
    made = BenchCell(name="", arm="", format="", n=1, k=1, m=1)
    (step,) = bench.plan_of(case, registry, Said(), registry.targets["h200"]).steps
    bench.fill(made, step, {"ours": [1500.0] * 8, "read": [80.0] * 8}, registry.targets["h200"], 0)
    assert made.bound_by == "mma_bf16"
    assert made.floor_us == pytest.approx(2 * 4096 * 17408 * 5120 / 790e12 * 1e6)


def test_the_page_is_made_of_the_json(cell: BenchCell, tmp_path: Path):
    failed = BenchCell(name="b", arm="b", format="bf16", n=1, k=1, m=1, status="failed", reason="3 of 4 outputs")
    result = BenchResult(
        status="complete",
        suite="foundation",
        command="atlas-lab bench --suite foundation --peers",
        tool={"name": "atlas-lab", "version": "0.1.0", "numba-cuda": "0.30.4"},
        device={"name": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"},
        cells=[cell, failed],
    )
    path = tmp_path / "foundation.json"
    write(path, dumps(result))
    assert read_bench(path) == result
    page = performance.render(read_bench(path), Path("benchmarks/foundation.json"))
    row = "| bf16_gemv | 64 | 48 | 1 | 10.00 | 7.00 | 7.00 (read) | 0.700 | torch.mv | 9.00 | 0.900 [0.900, 0.900] |"
    for line in (
        row,
        "<!-- generated from benchmarks/foundation.json by `atlas-lab bench --render`; do not edit -->",
        "NVIDIA H200, driver 580.1, CUDA 13.0; numba-cuda 0.30.4; atlas-lab 0.1.0, one run, seed 0.",
        "    atlas-lab bench --suite foundation --peers",
        "- bf16_gemv N=64 K=48 M=1: at least 0.85 of its peer's speed: met, 0.900",
        "- torch.mv N=64 K=48 M=1: torch 2.11; relative error 1.00e-03; `gemv2T`, `ns::reduce`",
    ):
        assert line in page.splitlines()
    assert "| b | 1 | 1 | 1 | failed: 3 of 4 outputs |" in page
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {12}


@pytest.mark.parametrize(("source", "page"), [("foundation", "performance"), ("load", "loading")])
def test_the_page_in_docs_is_its_jsons(source: str, page: str):
    root = Path(__file__).parents[2]
    file = root / f"benchmarks/{source}.json"
    rendered = performance.render(read_bench(file), file.relative_to(root))
    assert (root / f"docs/{page}.md").read_text(encoding="utf-8") == rendered


def test_bad_files(tmp_path: Path):
    (tmp_path / "x.json").write_text("{}x")
    with pytest.raises(ConfigError, match=r"x\.json: no result of schema atlas-lab\.bench/1"):
        read_bench(tmp_path / "x.json")
