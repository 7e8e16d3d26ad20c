"""`bench`: it refuses without a GPU, reckons shares and musts, and its page says what its JSON says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atlas_lab.experiments import bench, bench_results, performance, rows_plot
from atlas_lab.experiments import bench_projection as projection
from atlas_lab.experiments.bench_case import BenchCase
from atlas_lab.experiments.bench_results import SPENT, BenchCell, BenchResult, PeerResult, read_bench
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import dumps, write
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime.driver import missing_gpu

CASE = BenchCase("bf16_gemv", "bf16", 64, 48, 1, "torch.mv", of_peer=0.85, of_floor=0.5)


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
    (step,) = projection.plan_of([CASE], registry, Said(), registry.targets["h200"]).steps
    blocks = {"ours": [10.0] * 8, "read": [7.0] * 8}
    projection.fill(made, step, blocks, registry.targets["h200"], 0)
    made.peer = PeerResult(
        name="torch.mv",
        version="torch 2.11",
        kernels=["gemv2T", "void ns::reduce<32, float>(int*)"],
        time=bench_results.measured([9.0] * 8, 0),
        rel_l2=1e-3,
        ours=bench_results.relative([9.0] * 8, [10.0] * 8, 0),
    )
    made.must = projection.musts(CASE, made)
    return made


def test_shares_and_musts(cell: BenchCell):
    assert (cell.floor_us, cell.bound_by, cell.share) == (7.0, "read", 0.7)
    assert cell.peer is not None
    assert cell.peer.ours.speed == 0.9
    assert [(m.name, m.found, m.passed) for m in cell.must] == [("of_peer", 0.9, True), ("of_floor", 0.7, True)]
    slow = BenchCell(name="", arm="", format="", n=1, k=1, m=1, peer=cell.peer.model_copy())
    slow.peer.ours = bench_results.relative([9.0] * 8, [20.0] * 8, 0)
    assert [m.passed for m in projection.musts(CASE, slow)] == [False]
    assert bench.says_no(BenchResult(cells=[slow.model_copy(update={"must": projection.musts(CASE, slow)})]))
    assert not bench.says_no(BenchResult(cells=[cell]))


def test_shapes_are_held_to_their_mean(cell: BenchCell):
    """0.9 of the peer here and 0.45 there are 0.636 in the geometric mean."""
    case = replace(CASE, of_peers=0.6)
    half = cell.model_copy(deep=True, update={"n": 128})
    half.peer.ours = bench_results.relative([9.0] * 8, [20.0] * 8, 0)
    other = half.model_copy(update={"m": 2})
    assert projection.of_peers(case, cell, [cell, other]) == []
    (must,) = projection.of_peers(case, cell, [cell, half, other])
    assert (must.name, must.limit, round(must.found, 3), must.passed) == ("of_peers", 0.6, 0.636, True)
    assert not projection.of_peers(replace(case, of_peers=0.7), cell, [cell, half])[0].passed
    half.peer.wrong = "found another product"
    assert not projection.of_peers(case, cell, [cell, half])[0].passed


def test_more_rows_are_no_faster(cell: BenchCell):
    """10 us here and 9.4 for more rows are 0.94 of their speed; fewer rows and other formats do not count."""
    case = replace(CASE, of_more_rows=0.95)
    wide, fewer, other = (cell.model_copy(deep=True, update=u) for u in ({"m": 8}, {"m": 0}, {"m": 9, "format": "fp8"}))
    assert projection.of_more_rows(case, cell, [cell, fewer, other]) == []
    for c in (wide, fewer, other):
        c.ours = bench_results.measured([9.4 if c is wide else 1.0] * 8, 0)
    (must,) = projection.of_more_rows(case, cell, [cell, wide, fewer, other])
    assert (must.name, must.limit, round(must.found, 3), must.passed) == ("of_more_rows", 0.95, 0.94, False)
    assert projection.of_more_rows(replace(case, of_more_rows=0.9), cell, [cell, wide])[0].passed


def test_arithmetic_bounds_the_floor_of_large_products(registry):
    case = BenchCase("bf16_gemm", "bf16", 17408, 5120, 4096)
    made = BenchCell(name="", arm="", format="", n=1, k=1, m=1)
    (step,) = projection.plan_of([case], registry, Said(), registry.targets["h200"]).steps
    projection.fill(made, step, {"ours": [1500.0] * 8, "read": [80.0] * 8}, registry.targets["h200"], 0)
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
        "- torch.mv N=64 K=48 M=1: torch 2.11; read the unquantized BF16 weights; relative error 1.00e-03; `gemv2T`, "
        "`ns::reduce`",
    ):
        assert line in page.splitlines()
    assert "| b | 1 | 1 | 1 | failed: 3 of 4 outputs |" in page
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {12}


def timed(cell: BenchCell, m: int, us: float) -> BenchCell:
    """The cell as if it had been for `m` rows and taken `us`."""
    ours = bench_results.measured([us] * 8, 0)
    return cell.model_copy(
        update={"m": m, "name": f"bf16_gemv N=64 K=48 M={m}", "ours": ours, "must": [], "peer": None}
    )


def test_rows_against_one_row(cell: BenchCell):
    case = replace(CASE, m=16, of_one_row=0.8)

    def must(one: float, sixteen: float) -> tuple[float, bool]:
        cells = [timed(cell, 1, one), timed(cell, 16, sixteen)]
        (found,) = projection.of_one_row(case, cells[1], cells)
        assert (found.name, found.limit) == ("of_one_row", 0.8)
        return round(found.found, 3), found.passed

    assert must(10, 12.5) == (0.8, True)
    assert must(10, 12.6) == (0.794, False)
    assert must(7, 12.2) == (0.803, True)  # 1.4 floors of 7 us take longer than one row
    alone = timed(cell, 16, 12.0)
    assert projection.of_one_row(case, alone, [alone]) == []
    assert projection.of_one_row(replace(case, of_one_row=0.0), alone, [timed(cell, 1, 10), alone]) == []
    cells = [timed(cell, 1, 10), timed(cell, 16, 12.5)]
    cells[1].must = projection.of_one_row(case, cells[1], cells)
    lines = performance.render(BenchResult(suite="decode", cells=cells), Path("x.json")).splitlines()
    assert lines[0] == "# Decode: 1 to 16 rows"
    assert "| bf16_gemv | 64 | 48 | 16 | 10.00 | 12.50 | 1.250 | 1.250 |" in lines
    assert (
        "- bf16_gemv N=64 K=48 M=16: at least 0.8 of the speed of one row, or of 1.4 floors where those take longer: "
        "met, 0.800" in lines
    )


def test_the_page_names_what_each_peer_read_and_which_is_wrong(cell: BenchCell):
    assert cell.peer is not None
    read = {"name": "humming", "version": "humming-kernels 0.1.20", "weights": "nvfp4", "kernels": ["h"]}
    right = cell.model_copy(update={"peer": cell.peer.model_copy(update=read), "used": ["a ffn.up", "b attn.o"]})
    wrong = right.model_copy(update={"m": 2, "peer": right.peer.model_copy(update={"wrong": "found 1"})})
    none = cell.model_copy(update={"m": 3, "peer": None, "peer_failed": "peer humming: RuntimeError: no"})
    lines = performance.render(BenchResult(cells=[right, wrong, none]), Path("x.json")).splitlines()
    said = "humming-kernels 0.1.20; read the nvfp4 weights; relative error 1.00e-03"
    assert f"- humming N=64 K=48 M=1: {said}; `h`" in lines
    assert f"- humming N=64 K=48 M=2: {said} (**wrong**: found 1); `h`" in lines
    assert "- N=64 K=48 M=3: **peer humming: RuntimeError: no**" in lines
    assert "- N=64 K=48: a ffn.up, b attn.o" in lines
    assert not bench.says_no(BenchResult(cells=[right]))
    assert bench.says_no(BenchResult(cells=[wrong]))
    assert bench.says_no(BenchResult(cells=[none]))
    assert [m.passed for m in projection.musts(replace(CASE, of_peer=0.5, of_floor=0), wrong)] == [False]


def test_the_page_says_why_the_run_ended_early(cell: BenchCell):
    left = BenchCell(name="b", arm="a", format="f", n=1, k=1, m=1, reason=SPENT)
    for cells, said in (
        ([cell, left], "Its budget of seconds was spent before the last 1 of 2 cases."),
        ([cell], "The run was interrupted."),
    ):
        assert f" **{said}**" in performance.render(BenchResult(cells=cells), Path("x.json"))
    assert (
        "**" not in performance.render(BenchResult(status="complete", cells=[cell]), Path("x.json")).partition("|")[0]
    )


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("foundation", "performance"),
        ("load", "loading"),
        ("rows", "rows"),
        ("prefill", "prefill"),
        ("decode", "decode"),
    ],
)
def test_the_page_in_docs_is_its_jsons(source: str, page: str):
    root = Path(__file__).parents[2]
    file = root / f"benchmarks/{source}.json"
    plot = root / f"docs/{page}.svg"
    rendered = performance.render(read_bench(file), file.relative_to(root), plot.name if plot.exists() else "")
    assert (root / f"docs/{page}.md").read_text(encoding="utf-8") == rendered


def test_the_plot_of_time_against_rows(cell: BenchCell, monkeypatch):
    """A curve of each arm, peer and floor, in a file that is the same each time, beside the page that shows it."""
    more = cell.model_copy(deep=True, update={"m": 64, "arm": "bf16_wgmma"})
    other = cell.model_copy(deep=True, update={"m": 17, "format": "fp8", "arm": "fp8_wgmma_w8a8", "peer": None})
    result = BenchResult(suite="rows", status="complete", cells=[more, cell, other])
    svg = rows_plot.plot(result)
    assert svg == rows_plot.plot(result)
    curves = [
        (c.arm, c.format, name)
        for c in (cell, other)
        for name, *_ in rows_plot._curves([c, more] if c is cell else [c])
    ]
    assert [name for *_, name in curves] == [
        *("bf16_gemv and bf16_wgmma", "torch.mv", "floor"),
        *("fp8_wgmma_w8a8", "floor"),
    ]
    assert svg.count('<g id="axes_') == 2
    page = performance.render(result, Path("benchmarks/rows.json"), "rows.svg")
    assert "\n![Time against rows](rows.svg)\n" in page
    with pytest.raises(ConfigError, match=r"found no case that was timed"):
        rows_plot.plot(BenchResult(suite="rows"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed: atlas-lab\[plot\]"):
        rows_plot.plot(result)


def test_bad_files(tmp_path: Path):
    (tmp_path / "x.json").write_text("{}x")
    with pytest.raises(ConfigError, match=r"x\.json: no result of schema atlas-lab\.bench/1"):
        read_bench(tmp_path / "x.json")
