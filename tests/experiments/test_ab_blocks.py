"""Whole feed-forward blocks as cells of `ab`: parity by stage, what is compared, levers that no arm serves."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from atlas_lab.experiments import ab, compare, config, isolate, numbers, report, timed, trial
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import AbResult
from atlas_lab.experiments.session import Session, open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import open_device

INTERPRETER = Said(device="interpreter")
HIDDEN, INTERMEDIATE = 32, 64  # of a small block
APART = "pins: {'ffn.*': nvfp4_mma_repacked}"
JOINED = "pins: {ffn.down: nvfp4_mma_repacked, ffn.gate: nvfp4_mma_repacked_joined, ffn.up: nvfp4_mma_repacked_joined}"
VARIANTS = {
    "apart": f"{{weights: nvfp4, {APART}}}",
    "joined": f"{{weights: nvfp4, {JOINED}}}",
    "launch": f"{{weights: nvfp4, {JOINED}, levers: {{gated: launch}}}}",
    "input": f"{{weights: nvfp4, {JOINED}, levers: {{gated: input}}}}",
    "same": f"{{weights: nvfp4, {APART}, levers: {{gated: launch}}}}",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("atlas_lab.experiments.cells.compiler_missing", lambda: "no compiler in this test")


def load(
    tmp_path: Path,
    *names: str,
    roles: str = "[ffn.*, attn.o]",
    blocks: str = "[ffn]",
    of: dict[str, str] = VARIANTS,
    hidden: int = 128,
    intermediate: int = 128,
) -> config.Loaded:
    variants = "".join(f"      {n}: {of[n]}\n" for n in names)
    model = f"{{family: qwen3.5, hidden: {hidden}, intermediate: {intermediate}, layers: 4}}"
    text = (
        f"experiments:\n  x:\n    model: {model}\n    layers: [3]\n"
        f"    m: [2]\n    roles: {roles}\n    blocks: {blocks}\n    baseline: {names[0]}\n    variants:\n{variants}"
    )
    (tmp_path / "r.yaml").write_text(text)
    return config.load(tmp_path / "r.yaml")


def text_of(result: AbResult) -> str:
    console = Console(width=100, record=True, file=StringIO())
    report.print_ab(result, console)
    return console.export_text()


def test_configurations_of_a_block(registry, tmp_path: Path):
    loaded = load(tmp_path, *VARIANTS, roles="[ffn.*]")
    result = ab.run_ab(loaded, registry, INTERPRETER)
    x = result.experiments[0]
    both = "nvfp4_mma_repacked_joined, nvfp4_mma_repacked"
    assert [(c.variant, c.role, c.arm, c.gated, len(c.launches), c.status, c.reason) for c in x.cells] == [
        ("apart", "ffn", "nvfp4_mma_repacked", "launch", 4, "passed", ""),
        ("joined", "ffn", both, "epilogue", 2, "passed", ""),
        ("launch", "ffn", both, "launch", 3, "passed", ""),
        ("input", "ffn", both, "input", 2, "passed", ""),
        ("same", "ffn", "nvfp4_mma_repacked", "launch", 4, "passed", ""),
    ]
    said = "layers.3.ffn M=2: gated=epilogue: nvfp4_mma_repacked serves ffn.gate and ffn.up in calls of their own"
    assert [c.notes for c in x.cells] == [[f"{said}: a launch makes the gated product"], [], [], [], []]
    assert len({c.bytes for c in x.cells}) == 1
    assert all(12 < c.accuracy.snr_db < 30 for c in x.cells)
    assert len({c.accuracy.snr_db for c in x.cells}) == 1  # equal bits
    reasons = {c.b: c.reason for c in x.comparisons if c.role == "ffn"}
    assert reasons.pop("same") == "same route: nvfp4_mma_repacked over the same layout"
    assert set(reasons.values()) == {"no speed was measured: no GPU"}
    text = text_of(result)
    assert max(map(len, text.splitlines())) <= 100
    assert "nvfp4_mma_repacked_joined,\n" not in text  # in a cell of the table
    assert f"apart: {said}" in " ".join(text.split())
    assert [line for line in text.splitlines() if line.split()[:1] == ["epilogue"]]  # under the role


def test_other_roles_stay_cells_of_their_own(registry, tmp_path: Path):
    x = ab.described(open_session(load(tmp_path, "joined"), INTERPRETER, registry, "x"))
    assert [(c.role, c.gated) for c in x.cells] == [("attn.o", ""), ("ffn", "epilogue")]
    x = ab.described(open_session(load(tmp_path, "joined", blocks="[]"), INTERPRETER, registry, "x"))
    assert [c.role for c in x.cells] == ["attn.o", "ffn.gate+ffn.up", "ffn.down"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"roles": "[ffn.gate, ffn.up]"}, "layers.3.ffn: found roles ffn.gate, ffn.up, expected ffn.gate, ffn.up and"),
        ({"roles": "[ffn.gate, ffn.down]"}, "layers.3.ffn: found roles ffn.gate, expected ffn.gate, ffn.up and"),
        ({"blocks": "[attn]"}, "experiments.x.blocks[0]: found 'attn', expected one of ffn"),
        ({"blocks": "[ffn, ffn]"}, "experiments.x.blocks[1]: found 'ffn' twice, expected each once"),
    ],
)
def test_refusals(registry, tmp_path: Path, more: dict[str, str], sentence: str):
    with pytest.raises(ConfigError) as e:
        open_session(load(tmp_path, "apart", **more), INTERPRETER, registry, "x")
    assert sentence in str(e.value)


@pytest.fixture
def opened(registry, tmp_path: Path) -> Session:
    """Of BF16, whose units are small enough for a small block."""
    made = {n: v.replace("nvfp4_mma_repacked", "bf16_mma").replace("nvfp4", "bf16") for n, v in VARIANTS.items()}
    loaded = load(tmp_path, "apart", "launch", roles="[ffn.*]", of=made, hidden=HIDDEN, intermediate=INTERMEDIATE)
    return open_session(loaded, INTERPRETER, registry, "x")


@pytest.mark.parametrize("stage", ["gu", "h", "y"])
def test_a_stage_that_is_wrong_fails_its_cell(opened: Session, monkeypatch: pytest.MonkeyPatch, stage: str):
    run = trial.run_program

    def off(program, call, weights, device, x, arrays, stages=()):
        made = run(program, call, weights, device, x, arrays, stages)
        names = [t.name.rpartition("/")[2] for t in (call.y.data, *stages)]
        if stage in names:
            made[0, sum(t.shape[1] for t in (call.y.data, *stages)[: names.index(stage)])] = np.nan
        return made

    monkeypatch.setattr(trial, "run_program", off)
    x = ab.described(opened)
    with open_device("interpreter") as device:
        ab._numbers(opened, x, device, numbers.Products(opened.reference_file(), 20), ab.silent)
    found = {c.variant: c for c in x.cells}
    assert found["launch"].status == "failed"
    assert f"outputs of {'gate and up' if stage == 'gu' else stage} are outside the tolerance" in found["launch"].reason
    assert found["apart"].status == ("passed" if stage == "gu" else "failed")
    assert compare.says_no(x)


def test_children_give_the_same_outputs(opened: Session):
    keys, held = [(3, "ffn", 2)], opened.file("launch")
    with open_device("interpreter") as device:
        ((step, expected),) = numbers.outputs(opened.numbers_plan("launch", held), held, device, keys, 20)
    assert [t.name for t in step.stages] == ["layers.3.ffn/gu", "layers.3.ffn/h"]
    assert expected.shape == (2, HIDDEN + 2 * INTERMEDIATE + INTERMEDIATE)
    ((_, found),) = isolate.run(opened, "launch", keys, 20, "interpreter")
    assert numbers.digest(found) == numbers.digest(expected)


def test_blocks_are_timed_together_and_checked_again(opened: Session, monkeypatch: pytest.MonkeyPatch):
    """The clock stands in; a stage that changed while it ran fails the cell."""
    x, groups = ab.described(opened), []

    def rotate(name, programs, *, factor):
        programs[-1].run()
        return SimpleNamespace(name=name, keep=SimpleNamespace(close=lambda: None))

    def measure(device, timed_, *, rounds, seed):
        groups.append([t.name for t in timed_])
        us = {"apart layers.3.ffn M=2": 10.0, "launch layers.3.ffn M=2": 8.0}
        return SimpleNamespace(blocks=lambda name: np.full(rounds, us[name] / 1e6), starved=())

    monkeypatch.setattr(timing, "rotate", rotate)
    monkeypatch.setattr(timing, "rotations", lambda nbytes, l2: 2)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(probe, "ceilings", lambda device: SimpleNamespace(read_rate=1e9))
    with open_device("interpreter") as device:
        products = numbers.Products(opened.reference_file(), 20)
        judged = ab._numbers(opened, x, device, products, ab.silent)
        timed.run(opened, x, device, products, judged, ab.silent)
        assert groups == [["apart layers.3.ffn M=2", "launch layers.3.ffn M=2"]]
        assert [c.status for c in x.cells] == ["passed", "passed"]
        (one, total) = compare.comparisons(opened, x, 20)
        assert (one.role, one.ratio, total.role, total.ratio) == ("ffn", pytest.approx(0.8), None, pytest.approx(0.8))
        monkeypatch.setattr(
            trial, "downloaded", lambda device, ports, tensors: np.zeros((2, HIDDEN + 3 * INTERMEDIATE), np.float32)
        )
        timed.run(opened, x, device, products, judged, ab.silent)
        assert x.cells[1].reason.startswith("after the timed loop: ")
        device.ledger.check_empty()


def test_the_benchmarks_experiment(registry):
    """Every form of the block that it names is one that its arms serve."""
    loaded = config.load(Path(__file__).parents[2] / "benchmarks" / "ffn-block.yaml")
    x = ab.described(open_session(loaded, INTERPRETER, registry, None))
    forms = {"apart": ("launch", 4), "launch": ("launch", 3), "fused": ("epilogue", 2), "pdl": ("epilogue", 2)}
    expected = {**forms, "input": ("input", 2)}
    assert {(c.variant, c.m): (c.gated, len(c.launches)) for c in x.cells} == {
        (v, m): form for v, form in expected.items() for m in (1, 4, 16)
    }
    assert not any(c.notes for c in x.cells)
