"""`tune`, with the interpreter in a GPU's place and a clock of our own; and what `doctor` and `plan` say of tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_lab import cli
from atlas_lab.cli import tune as verb
from atlas_lab.core import tuned_file
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments.tune import READ
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.driver import missing_gpu

ARMS = str(Path(__file__).parents[1] / "experiments" / "tunable_arms.py")
Run = Callable[..., tuple[int, str, str]]
SHAPES = ("--shapes", "16x64,8x64")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line in an empty folder, with the tunable arms and tables of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned_file, "shipped_path", lambda target: tmp_path / "tuned" / f"{target}.yaml")
    monkeypatch.setattr(verb, "shipped_path", tuned_file.shipped_path)
    Path("registry.yaml").write_text(
        f"plugins: [{ARMS}]\nexperiments:\n  x:\n    model: {{family: qwen3.5, hidden: 64, intermediate: 16}}\n"
        "    m: [1]\n    roles: [ffn.gate]\n    baseline: a\n    variants: {a: {pins: {'*': tunable}}}\n"
    )

    def command(*argv: str) -> tuple[int, str, str]:
        shipped_table.cache_clear()
        status = cli.run(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    yield command
    shipped_table.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that runs like the interpreter and is fastest with 16 lanes."""

    def clock(device, runs, nbytes, seed):
        lanes = {r.name: dict(r.step.program.launches[0].kernel.spec.parameters)["lanes"] for r in runs}
        return {READ: 1e-6, **{name: 3e-6 if x == 16 else 4e-6 for name, x in lanes.items()}}

    monkeypatch.setattr(verb, "require_gpu", lambda name, said: None)
    monkeypatch.setattr(verb, "open_device", lambda kind: open_device("interpreter"))
    monkeypatch.setattr(verb, "by_graphs", clock)


def test_refused_without_a_gpu(run: Run) -> None:
    assert run("tune", "--device", "interpreter")[2] == (
        "atlas-lab: tune: found --device interpreter, expected a GPU: the interpreter's times mean nothing\n"
    )
    if missing_gpu():
        status, _, err = run("tune")
        assert status == 2
        assert err.startswith("atlas-lab: tune: no speed is measured without a GPU: no CUDA: ")
    assert not Path("tuned").exists()


def test_a_table_is_written_and_every_later_run_reads_it(run: Run, gpu: None) -> None:
    _, before, _ = run("plan", "-e", "x", "--json", "-")
    status, out, err = run("tune", "tunable", *SHAPES, "--json", "t.json")
    assert (status, err) == (0, "")
    assert "2 measured now" in " ".join(out.split())
    assert "lanes=16" in out
    result = json.loads(Path("t.json").read_text())
    assert result["schema"] == "atlas-lab.tune/1"
    assert [c["status"] for c in result["cells"]] == ["tuned", "tuned"]
    text = Path("tuned/h200.yaml").read_text()
    assert f"command: 'atlas-lab tune tunable {' '.join(SHAPES)} --top 8 --seed 20'" in text
    _, after, _ = run("plan", "-e", "x", "--json", "-")
    routes = [json.loads(x)["plans"][0]["routes"][0]["hash"] for x in (before, after)]
    assert routes[0] != routes[1]
    rows = doctor(run)
    assert rows["tuned table h200"] == ("ok", "2 settings, all of which their arms know")
    assert run("tune", "copied", "--shapes", "16x64", "--to", "mine.yaml")[0] == 0
    assert Path("tuned/h200.yaml").read_text() == text
    assert "arm: copied" in Path("mine.yaml").read_text()


def test_several_projections_in_one_call(run: Run, gpu: None) -> None:
    status, out, err = run("tune", "pair", "fixed", "--shapes", "16+8x64,16x64", "--json", "t.json")
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    assert "one setting: fixed 16x64: nothing to choose, its times are kept" in said
    assert "skipped: fixed 16+8x64: arm fixed serves *" in said
    found = [(c["arm"], c["shape"], c["status"]) for c in json.loads(Path("t.json").read_text())["cells"]]
    assert found == [("fixed", "16x64", "tuned"), ("fixed", "16+8x64", "skipped"), ("pair", "16+8x64", "tuned")]
    assert "{arm: pair, format: bf16, n: 24, k: 64, run: 0, setting: {lanes: 16}" in Path("tuned/h200.yaml").read_text()


def doctor(run: Run) -> dict[str, tuple[str, str]]:
    run("doctor", "--json", "d.json")
    return {r["what"]: (r["state"], r["found"]) for r in json.loads(Path("d.json").read_text())["rows"]}


def test_a_choice_that_no_arm_knows_is_refused_aloud(run: Run, gpu: None) -> None:
    assert doctor(run)["tuned tables"][0] == "missing"
    run("tune", "tunable", "--shapes", "16x64")
    path = Path("tuned/h200.yaml")
    path.write_text(path.read_text().replace("setting: {lanes: 16}", "setting: {lanes: 15}"))
    sentence = (
        "tuned tunable 16x64: found lanes=15, expected one of the arm's 3 settings on h200; measure again: atlas-lab "
        "tune tunable --shapes 16x64"
    )
    assert doctor(run)["tuned table h200"] == ("fault", sentence)
    status, _, err = run("plan", "-e", "x")
    assert status == 2
    assert sentence in err
    assert run("tune", "tunable", "--shapes", "16x64")[0] == 0
    assert run("plan", "-e", "x")[0] == 0
    path.write_text("schema: x\n")
    assert doctor(run)["tuned table h200"][0] == "fault"
    for argv in (["plan", "-e", "x"], ["tune", "tunable", "--shapes", "16x64"]):
        status, _, err = run(*argv)
        assert (status, err.count("\n")) == (2, 1)
        assert err.startswith("atlas-lab: h200.yaml: ")


def test_a_setting_that_is_wrong_is_exit_1(run: Run, gpu: None) -> None:
    status, out, _ = run("tune", "faulty", "plain", "--shapes", "16x64")
    assert status == 1
    assert "FAILED: faulty 16x64: M=1: " in out
    assert "skipped: plain 16x64: arm plain has no settings" in out
    assert "setting: {lanes: 32}" in Path("tuned/h200.yaml").read_text()


def test_interrupted_keeps_what_was_done(run: Run, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = verb.by_graphs, []

    def once(*given):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(verb, "by_graphs", once)
    status, out, err = run("tune", "tunable", *SHAPES)
    assert (status, err) == (130, "atlas-lab: interrupted; what was done so far is kept\n")
    assert "left: tunable 8x64: not reached" in out
    assert Path("tuned/h200.yaml").read_text().count("arm: ") == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nobody"], "unknown arm 'nobody', expected one of"),
        (["--shapes", "1x"], "--shapes 1x: expected NxK, N+NxK or one of qwen3.5-27b"),
        (["--format", "fp9"], "--format fp9: expected one of"),
        (["--budget", "0"], "--budget 0: expected more than 0 seconds"),
        (["--to", "no/t.yaml"], "--to no/t.yaml: found no directory no, expected one that exists"),
    ],
)
def test_bad_input(run: Run, gpu: None, argv: list[str], sentence: str) -> None:
    status, _, err = run("tune", *argv)
    assert status == 2
    assert err.startswith(f"atlas-lab: {sentence}")
    assert err.count("\n") == 1
