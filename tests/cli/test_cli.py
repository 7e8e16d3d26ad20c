"""The command: sentences and exit status for bad input, JSON alone on stdout, interruption, every verb once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_lab import cli
from atlas_lab.experiments import results

TOYS = str(Path(__file__).parents[1] / "experiments" / "toy_arms.py")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line in an empty folder: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("atlas_lab.experiments.cells.compiler_missing", lambda: "no compiler in this test")

    def command(*argv: str) -> tuple[int, str, str]:
        status = cli.run(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    return command


def settings(variants: str = "a: {pins: {'*': toy}}", *, m: str = "[1]", more: str = "", top: str = "") -> None:
    Path("registry.yaml").write_text(
        f"plugins: [{TOYS}]\n{top}experiments:\n  x:\n    model: {{family: qwen3.5, hidden: 64, intermediate: 48}}\n"
        f"    m: {m}\n    roles: [ffn.gate]\n    baseline: a\n    variants: {{{variants}}}\n{more}"
    )


def test_ab_and_its_json(run: Run):
    settings("a: {pins: {'*': toy}}, b: {pins: {'*': toy_grid}}")
    status, out, err = run("ab", "--json", "r.json")
    assert (status, err) == (0, "")
    assert out.startswith("settings: registry.yaml (./registry.yaml)\nexperiment x: 2 variants over M [1]\n")
    assert "no speed was measured: no GPU" in out
    assert out.endswith("written: r.json\n")
    written = results.read_ab(Path("r.json"))
    assert written.status == "complete"
    assert [c.arm for c in written.experiments[0].cells] == ["toy", "toy_grid"]


def test_stdout_is_json_alone(run: Run):
    settings()
    for argv in (["ab", "--json", "-"], ["--json", "-", "ab"], ["--json=-", "ab", "x"]):
        status, out, err = run(*argv)
        assert (status, err) == (0, "")
        assert json.loads(out)["schema"] == "atlas-lab.ab/1"


def test_parity_that_fails_is_exit_1(run: Run):
    settings("a: {}, b: {pins: {'*': toy_wrong}}")
    status, out, err = run("ab", "--json", "r.json")
    assert (status, err) == (1, "")
    assert "FAILED" in out
    assert results.read_ab(Path("r.json")).experiments[0].cells[1].status == "failed"


def test_require_that_is_not_met_is_exit_1(run: Run):
    settings("a: {}, b: {pins: {'*': toy_grid}}", more="    require: {b: {min_snr_db: 90}}\n")
    status, out, _ = run("ab")
    assert status == 1
    assert "require b.min_snr_db 90: NOT MET" in out


def test_interrupted_is_130_with_the_partial_result(run: Run, monkeypatch: pytest.MonkeyPatch):
    settings("a: {}, b: {pins: {'*': toy}}")
    from atlas_lab.experiments import ab

    real = ab.outputs

    def stop_at_b(plan, *more):
        if plan.name == "b":
            raise KeyboardInterrupt
        return real(plan, *more)

    monkeypatch.setattr(ab, "outputs", stop_at_b)
    status, out, err = run("ab", "--json", "r.json")
    assert status == 130
    assert err == "atlas-lab: interrupted; what was done so far is in r.json, marked partial\n"
    assert "the run was interrupted" in out
    partial = results.read_ab(Path("r.json"))
    assert partial.status == "partial"
    assert [c.status for c in partial.experiments[0].cells] == ["passed", "not run"]


BAD = [
    (["ab", "y"], "registry.yaml: unknown experiment 'y', expected one of x"),
    (["ab", "-c", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
    (["ab", "--set", "grahp=1"], "--set grahp=1: unknown lever 'grahp', expected one of stream_weights, graph, "
     "row_invariant, gated, pdl, lora, did you mean 'graph'?"),
    (["ab", "--device", "gpu"], "found device 'gpu', expected one of auto, cuda, interpreter"),
    (["ab", "--json", "no/r.json"], "--json no/r.json: found no directory no, expected one that exists"),
    (["ab", "--plugin", "nowhere"], "--plugin: plugin nowhere: ModuleNotFoundError: No module named 'nowhere'"),
    (["ab", "--sed", "1"], "No such option: --sed"),
    (["nothing"], "No such command 'nothing'"),
    (["plan"], "plan: found neither or both of CHECKPOINT and --experiment, expected one of them"),
    (["plan", "none"], "none: "),
    (["plan", "-e", "x", "--explain", "0.ffn.gat"], "--explain 0.ffn.gat: found no such projection, expected one of "
     "0.ffn.gate, did you mean '0.ffn.gate'?"),
    (["inspect", "toyy"], "unknown arm 'toyy', expected one of bf16_gemv"),
    (["checkpoint", "show", "none"], "none: "),
    (["checkpoint", "new", "c", "--format", "fp9"], "format: found 'fp9', expected one of bf16"),
    (["checkpoint", "new", "c", "--size", "tinny"], "model: found 'tinny', expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "sentence"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_one_sentence_and_exit_2(run: Run, argv: list[str], sentence: str, tmp_path: Path):
    settings()
    before = {p.name for p in tmp_path.iterdir()}
    status, _, err = run(*argv)
    assert status == 2
    assert err.startswith(f"atlas-lab: {sentence}")
    assert err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} - {"cache"} == before


CONFIGS = [
    ({"m": "[1, 0]"}, "registry.yaml:5: experiments.x.m[1]: found 0, expected an integer of 1 or more"),
    ({"more": "    baselin: a\n"}, "registry.yaml:9: experiments.x.baselin: unknown key, expected one of model, "
     "checkpoint, interpreter, layers, roles, blocks, m, baseline, variants, require, did you mean 'baseline'?"),
    ({"more": "    m: [3]\n"}, "registry.yaml:9: experiments.x.m: duplicate key, first on line 5"),
    ({"top": "levers: {streem_weights: off}\n"}, "registry.yaml:2: levers.streem_weights: unknown lever "
     "'streem_weights', expected one of stream_weights, graph, row_invariant, gated, pdl, lora, did you mean "
     "'stream_weights'?"),
    ({"variants": "a: {pins: {ffn.gate: fp8_gemv}}"}, "registry.yaml:8: experiments.x.variants.a: layers.0.ffn.gate: "
     "pins of variant a: ffn.gate = fp8_gemv, which is not eligible: starts from fp8 weights (found bf16, expected "),
    ({"variants": "a: {pins: {ffn.gate: toy_two}}"}, "registry.yaml:8: experiments.x.variants.a.pins['ffn.gate']: "
     "unknown arm 'toy_two', expected one of"),
    ({"variants": "a: {pins: {ffn.gate: toy_one}}", "m": "[3]"}, "registry.yaml:8: experiments.x.variants.a: "
     "layers.0.ffn.gate: pins of variant a: ffn.gate = toy_one, which serves M 1, none of M 3"),
    ({"variants": "a: {weights: q8_0}", "m": "[37]"}, "registry.yaml:8: experiments.x.variants.a: "
     "layers.0.ffn.gate: no arm serves M 37 of its q8_0 weight"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), CONFIGS, ids=[s.partition(": ")[2][:40] for _, s in CONFIGS])
def test_bad_settings_are_one_sentence_and_exit_2(run: Run, given: dict[str, str], sentence: str):
    settings(**given)
    status, _, err = run("ab", "--json", "r.json")
    assert status == 2
    assert err.startswith(f"atlas-lab: {sentence}")
    assert err.count("\n") == 1
    assert not Path("r.json").exists()


def test_no_gpu_with_device_cuda(run: Run):
    from atlas_lab.runtime.driver import missing_gpu

    if not missing_gpu():
        pytest.skip("needs a machine with no GPU")
    settings()
    status, _, err = run("ab", "--device", "cuda")
    assert status == 2
    assert err == f"atlas-lab: {missing_gpu()}\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("def atlas_arms(): return [3]", "TypeError: atlas_arms returned 3, expected instances of Arm"),
        (
            "from toy_arms_copy import Toy\ndef atlas_arms(): return [Toy('bf16_gemv')]",
            "ValueError: atlas_arms: the name 'bf16_gemv' is taken by atlas-lab",
        ),
    ],
)
def test_a_named_plugin_that_is_faulty(run: Run, monkeypatch: pytest.MonkeyPatch, body: str, why: str):
    settings()
    Path("toy_arms_copy.py").write_text(Path(TOYS).read_text())
    monkeypatch.syspath_prepend(os.getcwd())
    hook = "from atlas_lab import hookimpl\n" + body.replace("def atlas", "@hookimpl\ndef atlas")
    Path("bad.py").write_text(hook + "\n")
    status, _, err = run("arms", "--plugin", "./bad.py")
    assert status == 2
    assert f"bad.py: {why}" in err
    assert err.count("\n") == 1


def test_an_installed_plugin_that_is_faulty_is_a_row(run: Run, monkeypatch: pytest.MonkeyPatch):
    settings()
    from importlib.metadata import entry_points

    from atlas_lab.core import registry

    class Point:
        name, value, module, dist = "broken", "broken.arms", "broken.arms", None

        def load(self) -> None:
            raise ImportError("it is broken")

    points = [*entry_points(group="atlas_lab"), Point()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    status, out, _ = run("arms")
    assert status == 0
    assert "ImportError: it is broken" in " ".join(out.split())
    assert run("ab")[0] == 0
    status, out, _ = run("doctor")
    assert status == 1
    assert "plugin broken" in " ".join(out.split())
    status, _, err = run("inspect", "theirs")
    assert status == 2
    assert "left out: plugin broken: ImportError: it is broken" in err


def test_arms(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    settings()
    status, out, _ = run("arms", "--json", "arms.json")
    assert status == 0
    answer = json.loads(Path("arms.json").read_text())
    assert [a["name"] for a in answer["arms"]][:3] == ["bf16_gemv", "bf16_mma", "bf16_wgmma"]
    toy = next(a for a in answer["arms"] if a["name"] == "toy_grid")
    assert toy["where"] == TOYS
    assert toy["min_snr_db"] == 15
    assert "15 dB" in out


def test_plan_of_an_experiment(run: Run):
    settings("a: {pins: {'*': toy}}, b: {pins: {'*': toy_grid}}", m="[1, 3]")
    status, out, _ = run("plan", "-e", "x", "--json", "p.json")
    assert status == 0
    assert "x:b on h200 (sm_90a)" in out
    assert "pruned: 1 stored tensors, 0.006 MB, do not stay on the device" in out
    b = json.loads(Path("p.json").read_text())["plans"][1]
    assert [a["arm"] for a in b["routes"][0]["assignments"]] == ["toy_grid", "toy_grid"]
    assert b["residency"]["steady"] == 48 * 64 * 2
    status, out, _ = run("plan", "-e", "x", "--explain", "layers.0.ffn.gate")
    assert status == 0
    assert "nothing: runs only where an order or pin names it" in " ".join(out.split())


def test_checkpoint_and_its_plan(run: Run):
    assert run("checkpoint", "new", "model", "--layers", "4")[0] == 0
    assert run("checkpoint", "convert", "model", "quant", "--format", "nvfp4")[0] == 0
    status, out, _ = run("checkpoint", "show", "quant", "--verify", "--json", "s.json")
    assert status == 0
    assert "all values checked" in out
    assert json.loads(Path("s.json").read_text())["faults"] == []
    status, out, _ = run("plan", "quant")
    assert status == 0
    assert "packaged: no ./registry.yaml here" in " ".join(out.split())
    assert "nvfp4_mma_repacked" in out
    assert "KV cache:" in out
    status, _, err = run("checkpoint", "new", "model")
    assert status == 2
    assert err == "atlas-lab: model: exists, expected a new path for a checkpoint\n"


def test_values_that_no_kernel_may_read_are_exit_1(run: Run):
    import numpy as np

    assert run("checkpoint", "new", "quant", "--format", "nvfp4")[0] == 0
    file = Path("quant/model.safetensors")
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    name = next(n for n in header if n.endswith("gate_proj.weight_scale_2"))
    at = 8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]
    raw[at : at + 4] = np.float32(np.nan).tobytes()
    file.write_bytes(raw)
    status, out, _ = run("checkpoint", "show", "quant", "--verify")
    assert status == 1
    assert "weight_scale_2" in " ".join(out.split())


def test_doctor(run: Run):
    status, out, _ = run("doctor", "--json", "d.json")
    rows = {r["what"]: r for r in json.loads(Path("d.json").read_text())["rows"]}
    assert status == (1 if any(r["state"] == "fault" for r in rows.values()) else 0)
    assert {"python", "numpy", "numba-cuda", "CUDA compiler", "GPU", "cache", "settings", "arms"} <= set(rows)
    assert rows["cache"]["found"].startswith(os.environ["ATLAS_LAB_CACHE"])
    assert "python" in out


def test_parity(run: Run, monkeypatch: pytest.MonkeyPatch):
    settings()
    from atlas_lab.cli import parity

    real = parity.checks_of
    monkeypatch.setattr(parity, "checks_of", lambda *given: [c for c in real(*given) if c.kind != "compile"][:4])
    status, out, _ = run("parity", "toy", "toy_gri*", "-v", "--json", "p.json")
    assert status == 0
    checks = json.loads(Path("p.json").read_text())["checks"]
    assert {c["arm"] for c in checks} == {"toy", "toy_grid"}
    assert all(c["result"]["ok"] for c in checks)
    assert "toy_grid 4 4 0 0" in " ".join(out.split())
    status, out, _ = run("parity", "toy_wrong")
    assert status == 1
    assert "outputs are outside the tolerance" in " ".join(out.split())
    status, _, err = run("parity", "toy", "nobody*")
    assert status == 2
    assert err.startswith("atlas-lab: unknown arm 'nobody*', expected one of")


def test_inspect(run: Run):
    from atlas_lab.kernels.lang.compile import compiler_missing

    settings()
    status, out, err = run("inspect", "toy", "--arch", "sm_90a", "-m", "3", "--json", "i.json")
    if compiler_missing():
        assert status == 2
        assert err == f"atlas-lab: inspect toy: {compiler_missing()}\n"
        return
    assert status == 0
    (kernel,) = json.loads(Path("i.json").read_text())["kernels"]
    assert kernel["registers"] > 0
    assert kernel["spill_stores"] == 0
    assert kernel["problems"] == []
    assert kernel["occupancy"]["blocks"] == 32
    assert kernel["occupancy"]["limit"] == "blocks"
    assert "sm_90a" in out
    Path("odd.py").write_text(
        "from atlas_lab import Arm, Bind, Launch, Rounded, hookimpl, rows\n"
        "from atlas_lab.kernels import lang as L\n\n\n"
        "@L.kernel\ndef k(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32):\n"
        "    L.stg_bf16(y, 0, L.f32(n * 0.1))\n\n\n"
        "class Odd(Arm):\n    name, roles, rows, source, kernels = 'odd', ('*',), rows(1), 'bf16', (k,)\n"
        "    tolerance = Rounded('f32', 'bf16')\n    finalize = lambda self, p, ctx: [Bind(p.weight)]\n"
        "    lower = lambda self, c: [Launch(k, 1, 32, (c.weights['weight'].weight, c.x, c.y, c.n))]\n\n\n"
        "@hookimpl\ndef atlas_arms():\n    return [Odd()]\n"
    )
    status, out, err = run("inspect", "odd", "--arch", "sm_90a", "--plugin", "./odd.py")
    assert (status, err) == (0, "")
    assert "uses 64-bit floating point" in " ".join(out.split())
    status, out, _ = run("inspect", "toy", "--arch", "sm_90a", "--ptx")
    assert status == 0
    assert ".visible .entry" in out
    assert run("inspect", "toy", "--arch", "sm_70")[2] == (
        "atlas-lab: --arch sm_70: found no target of it, expected one of sm_90a, sm_80, sm_121a, sm_120a, sm_100a\n"
    )
    assert run("inspect", "toy", "-k", "12")[0] == 2
    assert run("inspect", "toy_one", "-m", "4")[2] == "atlas-lab: inspect toy_one: found M 4, expected 1\n"
    status, out, err = run("inspect", "toy", "toy_one", "--arch", "sm_90a", "-m", "4", "--page", "k.md")
    assert (status, err) == (0, "")
    said = "toy_one: inspect toy_one: found M 4, expected 1"
    assert out.endswith(f"{said}\nwritten: k.md\n")
    lines = Path("k.md").read_text().splitlines()
    command = "atlas-lab inspect 'toy' 'toy_one' --arch sm_90a -n 17408 -k 5120 --page"
    assert lines[2] == f"<!-- written by `{command}`; do not edit -->"
    (row,) = [line for line in lines if line.startswith("| toy ")]
    assert f"| 4 | `{kernel['kernel']}` | {kernel['threads']} | {kernel['registers']} | 0 |" in row
    assert row.endswith("| 0 | 32 (blocks) |")
    assert lines[-1] == f"- {said}"


def test_bench(run: Run):
    from atlas_lab.experiments.bench_results import BenchResult
    from atlas_lab.runtime.driver import missing_gpu

    if missing_gpu():
        status, _, err = run("bench")
        assert status == 2
        assert err.startswith("atlas-lab: bench: no speed is measured without a GPU: no CUDA: ")
        assert not Path("benchmarks").exists()
    Path("b.json").write_text(results.dumps(BenchResult(status="complete", suite="foundation", command="atlas-lab x")))
    status, out, _ = run("bench", "--render", "b.json", "--to", "page.md")
    assert (status, out) == (0, "written: page.md\n")
    assert "    atlas-lab x" in Path("page.md").read_text().splitlines()
    assert run("bench", "--render", "b.json")[2] == (
        "atlas-lab: --to docs/performance.md: found no directory docs, expected one that exists\n"
    )
    assert run("bench", "--suite", "x")[0] == 2
    assert run("bench", "--only", "x")[2].startswith("atlas-lab: --only x: found no case, expected a pattern of the 18")


def test_bench_writes_a_plot_beside_the_page_of_rows(run: Run):
    from atlas_lab.experiments.bench_results import BenchCell, BenchResult, measured
    from atlas_lab.experiments.results import dumps

    cell = BenchCell(name="a", arm="a", format="bf16", n=1, k=1, m=16, status="passed", ours=measured([9.0] * 8, 0))
    Path("rows.json").write_text(dumps(BenchResult(suite="rows", cells=[cell])))
    status, out, _ = run("bench", "--render", "rows.json", "--to", "rows.md")
    assert (status, out) == (0, "written: rows.svg\nwritten: rows.md\n")
    assert "![Time against rows](rows.svg)" in Path("rows.md").read_text()
    assert "</svg>" in Path("rows.svg").read_text()


def test_bench_of_a_part_of_a_suite(run: Run, monkeypatch: pytest.MonkeyPatch):
    from atlas_lab.cli import bench
    from atlas_lab.experiments.bench_results import BenchCell

    asked = []

    def measured(suite, cases, registry, said, *, result, command, rounds, **_):
        asked.append(([c.name for c in cases], rounds))
        result.command, result.cells = command, [BenchCell(name="a", arm="a", format="bf16", n=1, k=1, m=1)]

    monkeypatch.setattr(bench, "run_bench", measured)
    part = ("bench", "--only", "bf16_gemv*K=5120*", "--rounds", "7", "--peers")
    status, out, _ = run(*part)
    assert status == 0
    assert "written" not in out
    assert not Path("benchmarks").exists()
    assert run(*part, "--json", "b.json")[0] == 0
    assert asked == [(["bf16_gemv N=17408 K=5120 M=1"], 7)] * 2
    command = "atlas-lab bench --suite foundation --only 'bf16_gemv*K=5120*' --rounds 7 --peers --seed 20"
    assert json.loads(Path("b.json").read_text())["command"] == command
    assert "written: benchmarks/foundation.json" in run("bench", "--peers")[1]
    command = "atlas-lab bench --suite foundation --peers --seed 20"
    assert json.loads(Path("benchmarks/foundation.json").read_text())["command"] == command
    assert run("bench", "--rounds", "4")[0] == 2


def test_a_bug_of_ours_is_exit_3_with_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    settings()
    from atlas_lab.experiments import ab

    monkeypatch.setattr(ab, "described", lambda session: 1 // 0)
    status, _, err = run("ab", "--json", "r.json")
    assert status == 3
    assert "Traceback" in err
    assert err.endswith("atlas-lab: this is a bug of ours (ZeroDivisionError); please report the lines above\n")
    assert not Path("r.json").exists()


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m atlas_lab arms --json - | head -c 1"],
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stderr == b""
    assert done.stdout == b"{"


def test_help_names_every_verb(run: Run):
    status, out, _ = run("--help")
    assert status == 0
    for verb in ("ab", "arms", "plan", "parity", "inspect", "bench", "tune", "checkpoint", "doctor"):
        assert f"  {verb} " in out
