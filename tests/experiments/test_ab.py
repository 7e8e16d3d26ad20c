"""The main job end to end, on tiny models through the real interpreter."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from atlas_lab.experiments import ab, compare, config, isolate, numbers, report, results, session
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import AbResult, Cell
from atlas_lab.experiments.settings import Said
from atlas_lab.kernels.lang.compile import compiler_missing
from atlas_lab.runtime.device import open_device

INTERPRETER = Said(device="interpreter")
TOYS = Path(__file__).parent / "toy_arms.py"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is another test's business."""
    monkeypatch.setattr("atlas_lab.experiments.cells.compiler_missing", lambda: "no compiler in this test")


def load(tmp_path: Path, variants: str, *, more: str = "", m: str = "[1]", roles: str = "[ffn.gate]") -> config.Loaded:
    text = (
        "experiments:\n  x:\n    model: {family: qwen3.5, hidden: 64, intermediate: 48}\n"
        f"    m: {m}\n    roles: {roles}\n    baseline: a\n    variants: {{{variants}}}\n{more}"
    )
    (tmp_path / "r.yaml").write_text(text)
    return config.load(tmp_path / "r.yaml")


def run(registry, loaded: config.Loaded, **more) -> AbResult:
    return ab.run_ab(loaded, registry, INTERPRETER, **more)


def cell(result: AbResult, variant: str, m: int = 1) -> Cell:
    return next(c for c in result.experiments[0].cells if c.variant == variant and c.m == m)


def text_of(result: AbResult) -> str:
    console = Console(width=100, record=True, file=StringIO())
    report.print_ab(result, console)
    return console.export_text()


def test_built_in_formats(registry, tmp_path: Path):
    loaded = load(
        tmp_path,
        "a: {weights: bf16}, b: {weights: fp8}, c: {weights: nvfp4}",
        m="[1, 3]",
        more="    require: {b: {min_snr_db: 25, max_time_ratio: 0.7, max_bytes_ratio: 0.6}, c: {min_snr_db: 99}}\n",
    )
    result = run(registry, loaded)
    x = result.experiments[0]
    assert result.status == "complete"
    assert [(c.variant, c.m, c.arm, c.status) for c in x.cells] == [
        ("a", 1, "bf16_gemv", "passed"),
        ("a", 3, "bf16_gemv", "passed"),
        ("b", 1, "fp8_gemv", "passed"),
        ("b", 3, "fp8_gemv", "passed"),
        ("c", 1, "nvfp4_gemv", "passed"),
        ("c", 3, "nvfp4_gemv", "passed"),
    ]
    snr = {c.variant: c.accuracy.snr_db for c in x.cells}
    assert snr["a"] > 45 > snr["b"] > 25 > snr["c"] > 15
    assert all(c.time is None and c.floor_us for c in x.cells)
    assert all(c.verdict == "not compared" and c.reason == "no speed was measured: no GPU" for c in x.comparisons)
    assert x.variants["b"].residency.steady < x.variants["a"].residency.steady
    bounds = {(b.variant, b.name): b.passed for b in x.require}
    assert bounds == {
        ("b", "min_snr_db"): True,
        ("b", "max_time_ratio"): None,
        ("b", "max_bytes_ratio"): True,
        ("c", "min_snr_db"): False,
    }
    assert compare.says_no(x)
    assert results.AbResult.model_validate_json(results.dumps(result)).experiments[0].cells[0].arm == "bf16_gemv"
    text = text_of(result)
    text, lines = " ".join(text.split()), text.splitlines()
    for words in (
        "6 of 6 cells within the bound",
        "not proven: no speed was measured: no GPU",
        f"next: atlas-lab ab x -c {tmp_path}/r.yaml --device cuda",
        "forecast",
        "not compiled: no compiler in this test",
        "require c.min_snr_db 99: NOT MET",
        "require b.max_time_ratio 0.7: not measured: no speed was measured: no GPU",
    ):
        assert words in text
    assert max(map(len, lines)) <= 100


def test_a_wrong_kernel_fails_and_is_not_timed(registry, tmp_path: Path):
    result = run(registry, load(tmp_path, "a: {}, b: {pins: {'*': toy_wrong}}"))
    bad = cell(result, "b")
    assert bad.status == "failed"
    assert bad.parity is not None
    assert bad.parity.worst > 1
    assert "outputs are outside the tolerance" in bad.reason
    x = result.experiments[0]
    assert x.comparisons[0].reason == "b failed parity for layers.0.ffn.gate M=1"
    assert compare.says_no(x)
    text = text_of(result)
    assert "FAILED" in text
    assert "next: atlas-lab parity toy_wrong" in text


def test_a_kernel_that_writes_outside_is_its_cells_result(registry, tmp_path: Path):
    result = run(registry, load(tmp_path, "a: {}, b: {pins: {'*': toy_outside}}, c: {pins: {'*': toy}}"))
    assert cell(result, "b").status == "crashed"
    assert cell(result, "b").reason.startswith("OutOfBounds: kernel toy_outside")
    assert cell(result, "c").status == "passed"


def test_exact_to_another_arm(registry, tmp_path: Path):
    result = run(registry, load(tmp_path, "a: {}, b: {pins: {'*': toy_exact}}, c: {pins: {'*': toy_not_exact}}"))
    assert cell(result, "b").status == "passed"
    assert cell(result, "c").status == "failed"


def test_an_arm_that_changes_numbers(registry, tmp_path: Path):
    result = run(registry, load(tmp_path, "a: {}, b: {pins: {'*': toy_grid}}"))
    grid = cell(result, "b")
    assert grid.status == "passed"
    assert 15 < grid.accuracy.snr_db < 40
    residency = result.experiments[0].variants["b"].residency
    assert residency.labels == {"derived toy_grid": 48 * 64 * 2}


def test_same_routes_are_not_compared(registry, tmp_path: Path):
    loaded = load(tmp_path, "a: {arms: {'*': [toy]}}, b: {pins: {'*': toy}}, c: {pins: {'*': toy_same}}")
    result = run(registry, loaded)
    reasons = {(c.b, c.role): c.reason for c in result.experiments[0].comparisons}
    assert reasons == {
        ("b", "ffn.gate"): "same route: toy over the same layout",
        ("b", None): "same route for every role",
        ("c", "ffn.gate"): "no speed was measured: no GPU",
        ("c", None): "no speed was measured: no GPU",
    }
    assert "not compared: b and a resolve to the same route for ffn.gate M=1" in text_of(result)


def test_interrupted(registry, tmp_path: Path):
    loaded = load(tmp_path, "a: {pins: {'*': toy}}, b: {pins: {'*': toy_same}}")
    result = AbResult()

    def stop(what: str, done: int, of: int) -> None:
        if what.startswith("b: weights"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(registry, loaded, result=result, notify=stop)
    assert result.status == "partial"
    assert cell(result, "a").status == "passed"
    assert cell(result, "b").status == "not run"
    assert "the run was interrupted" in text_of(result)


def test_small_sizes_and_full_plans(registry, tmp_path: Path):
    text = (
        "experiments:\n  x:\n    model: {family: qwen3.5, hidden: 5120, intermediate: 17408}\n"
        "    interpreter: {hidden: 64, intermediate: 48}\n    m: [1]\n    roles: [ffn.gate]\n    baseline: a\n"
        "    variants: {a: {pins: {'*': toy}}}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    result = run(registry, config.load(tmp_path / "r.yaml"))
    c = cell(result, "a")
    assert (c.dims.n, c.dims.k, c.dims.numbers_n, c.dims.numbers_k) == (17408, 5120, 48, 64)
    assert c.bytes == 17408 * 5120 * 2 + 5120 * 2 + 17408 * 2
    assert math.isclose(c.floor_us, c.bytes / 4.26e12 * 1e6)
    assert "on small weights; bytes, registers and floors are of the full model" in " ".join(text_of(result).split())


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("{pins: {ffn.gate: fp8_gemv}}", "r.yaml:7: experiments.x.variants.b: layers.0.ffn.gate: pins of variant b: "
         "ffn.gate = fp8_gemv, which is not eligible: starts from fp8 weights"),
        ("{weights: q8_0}", "r.yaml:7: experiments.x.variants.b: layers.0.ffn.gate: no arm serves M 1 of its "),
        ("{checkpoint: none}", "r.yaml:7: experiments.x.variants.b.checkpoint: "),
    ],
)  # fmt: skip
def test_refusals_before_anything_runs(registry, tmp_path: Path, variant: str, sentence: str):
    loaded = load(tmp_path, f"a: {{}}, b: {variant}")
    with pytest.raises(ConfigError) as e:
        run(registry, loaded)
    assert str(e.value).startswith(f"{tmp_path}/{sentence}")


def test_children_give_the_same_outputs(registry, tmp_path: Path):
    keys = [(0, "ffn.gate", 1), (0, "ffn.gate", 3)]
    said = Said(plugins=(str(TOYS),), device="interpreter")

    def opened(arm: str) -> session.Session:
        loaded = load(tmp_path, f"a: {{pins: {{'*': {arm}}}}}", m="[1, 3]")
        return session.open_session(loaded, said, registry, "x")

    def found(arm: str) -> list[np.ndarray | str]:
        return [y for _, y in isolate.run(opened(arm), "a", keys, 20, "interpreter")]

    assert all(str(y).startswith("OutOfBounds: kernel toy_outside") for y in found("toy_outside"))
    here = opened("toy_grid")
    held = here.file("a")
    with open_device("interpreter") as device:
        expected = [y for _, y in numbers.outputs(here.numbers_plan("a", held), held, device, keys, 20)]
    for theirs, ours in zip(found("toy_grid"), expected, strict=True):
        assert theirs.dtype == ours.dtype
        assert numbers.digest(theirs) == numbers.digest(ours)


def test_a_child_that_dies_costs_one_cell(registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from atlas_lab.runtime import child

    loaded = load(tmp_path, "a: {pins: {'*': toy}}", m="[1, 3, 5]")
    opened = session.open_session(loaded, INTERPRETER, registry, "x")
    asked = []

    def call(function, arguments, timeout):
        asked.append([m for _, _, m in arguments["keys"]])
        with Path(arguments["folder"], isolate.FOUND).open("w") as lines:
            for _, _, m in arguments["keys"]:
                if m == 3:
                    return child.Crash("timeout", "it never ended")
                print('{"sentence": "as it was"}', file=lines, flush=True)
        return None

    monkeypatch.setattr(child, "call", call)
    keys = [(0, "ffn.gate", m) for m in (1, 3, 5)]
    assert [found for _, found in isolate.run(opened, "a", keys, 0)] == ["as it was", "it never ended", "as it was"]
    assert asked == [[1, 3, 5], [5]]


def test_a_kernel_that_compiles_with_a_fault_is_told(registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = compiler_missing()
    if missing:
        pytest.skip(missing)
    monkeypatch.setattr("atlas_lab.experiments.cells.compiler_missing", lambda: None)
    result = run(registry, load(tmp_path, "a: {pins: {'*': toy}}, b: {pins: {'*': toy_double}}"))
    assert cell(result, "a").launches[0].problems == []
    assert any("uses 64-bit float" in p for p in cell(result, "b").launches[0].problems)
    assert "compiles with a fault: kernel toy_double" in text_of(result)
