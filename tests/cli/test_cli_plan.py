"""`plan`: whole checkpoints from headers, gaps, budgets, explanations and differences; bad input in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas_lab import checkpoint, cli
from atlas_lab.checkpoint.files import Group, write_headers
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.writer import write_checkpoint, write_model
from atlas_lab.core.registry import Registry
from atlas_lab.experiments import settings as settings_module
from atlas_lab.experiments.plan_results import read_plan

ARMS = Path(__file__).parents[1] / "experiments" / "whole_model_arms.py"
PLAIN = ("bf16_gemv", "bf16_gemm", "fp8_gemv", "fp8_gemm", "nvfp4_gemv", "nvfp4_gemm")
Run = Callable[..., tuple[int, str, str]]

SETTINGS = f"""
plugins: [{ARMS}]
experiments:
  prefill:
    model: {{family: qwen3.5, hidden: 256, intermediate: 512}}
    m: [1, 64]
    roles: ['ffn.*']
    baseline: plain
    variants:
      plain: {{weights: nvfp4}}
      hybrid:
        weights: nvfp4
        arms:
          ffn.down: {{prefill: [fake_w4a8_int8]}}
          'ffn.*': {{prefill: [fake_q4k_mmq]}}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Header-only checkpoints of eight small layers, and one that no arm reads whole."""
    folder = tmp_path_factory.mktemp("models")
    config = checkpoint.sizes("tiny", layers=8, intermediate=512, prediction=1).config()
    for spelled in ("bf16", "nvfp4", "nvfp4+fp8", "fp8_row"):
        write_model(folder / spelled, QWEN35, config, spelled, headers_only=True)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Path) -> Run:
    """Runs a command line beside the models, with six built-in arms: exit status, stdout with its spaces joined,
    stderr."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("COLUMNS", "160")
    real = settings_module.registry_for

    def plain(*given: Any) -> Registry:
        made = real(*given)
        made.entries = [e for e in made.entries if e.arm.name in PLAIN or e.arm.name.startswith("fake_")]
        return made

    monkeypatch.setattr(settings_module, "registry_for", plain)

    def command(*argv: str) -> tuple[int, str, str]:
        status = cli.run(list(argv))
        out, err = capsys.readouterr()
        return status, out if "--json" in argv else " ".join(out.split()), err

    return command


@pytest.fixture
def settings(models: Path) -> None:
    (models / "r.yaml").write_text(SETTINGS)


def test_a_whole_checkpoint(run: Run):
    status, out, err = run("plan", "nvfp4")
    assert (status, err) == (0, "")
    assert "0-2, 4-6 (6) gdn.qkv gdn.z gdn.out 1 to 3 nvfp4_gemv built-in order nvfp4 in place" in out
    assert "4 to 16384 nvfp4_gemm built-in order nvfp4 in place" in out
    assert "3, 7 (2) attn.q attn.k attn.v attn.o 1 to 3 nvfp4_gemv" in out
    assert "start from formats that are not here: fp8_gemv, fp8_gemm" in out
    assert "multi-token prediction, not used" in out
    assert "not loaded" in out
    assert "tokens of 1,024 bytes (bf16, pages of 16) for 1 sequence: of 150,754.8 MB" in out
    assert "pruned: nothing, every stored weight stays" in out


def test_tensors_that_a_checkpoint_lacks(run: Run, models: Path):
    folder = models / "lacking"
    folder.mkdir()
    (folder / "config.json").write_text((models / "bf16" / "config.json").read_text())
    names = ["model.language_model.norm.weight", "lm_head.weight"]
    held = [t for t in checkpoint.Store.open(models / "bf16").tensors.values() if t.name not in names]
    write_headers(folder, [Group((t,), dict) for t in held], {})
    assert f"missing from the checkpoint, and counted nowhere: {', '.join(names)}" in run("plan", "lacking")[1]
    (planned,) = json.loads(run("plan", "lacking", "--json", "-")[1])["plans"]
    assert planned["missing"] == names


def test_part_of_a_model_says_nothing_of_a_cache(run: Run, models: Path):
    write_checkpoint(models / "part", checkpoint.sizes("tiny"), "bf16", [0], ["ffn.*"])
    status, out, _ = run("plan", "part")
    assert status == 0
    assert "KV cache" not in out
    (planned,) = json.loads(run("plan", "part", "--json", "-")[1])["plans"]
    assert (planned["kv_tokens"], planned["missing"]) == (None, [])


def test_gaps_are_listed_with_the_bytes_and_exit_1(run: Run):
    status, out, err = run("plan", "fp8_row")
    assert (status, err) == (1, "")
    assert "cannot run: 50 of 63 projections have rows that no arm serves; their weights are counted as they" in out
    assert "reads a grid of block scales (found row," in out
    assert "checkpoint fp8_row" in out
    status, out, _ = run("plan", "fp8_row", "--json", "-")
    assert status == 1
    (plan,) = json.loads(out)["plans"]
    assert len(plan["gaps"]) == 50
    assert plan["residency"]["steady"] == plan["residency"]["stored"]
    assert [x["arm"] for g in plan["groups"] for x in g["served"] if g["format"] == "fp8_row"] == [None] * 3


def test_the_budget(run: Run):
    status, out, _ = run("plan", "bf16", "--memory", "1GiB", "--reserve", "100 MB", "--kv-dtype", "fp8", "--json", "-")
    assert status == 0
    (plan,) = json.loads(out)["plans"]
    memory, left = plan["memory"], 2**30 - 100_000_000
    assert (memory["budget"], memory["reserve"], memory["kv_dtype"]) == (2**30, 100_000_000, "e4m3")
    left -= plan["residency"]["steady"] + memory["others"] + memory["states"]
    assert plan["kv_tokens"] == plan["kv_tokens_each"] == left // (memory["kv_bytes_per_token"] * 16) * 16
    status, out, _ = run("plan", "bf16", "--memory", "1GiB", "--sequences", "3", "--reserve", "100 MB")
    assert status == 0
    assert " each of 1,024 bytes" in out
    assert "for 3 sequences" in out
    status, out, err = run("plan", "bf16", "--memory", "10MB")
    assert (status, err) == (1, "")
    assert "does not fit: " in out
    assert "more than the budget of 10.0 MB" in out
    held = plan["residency"]["steady"] + memory["others"]
    status, out, _ = run("plan", "bf16", "--memory", str(held + memory["states"] * 2 + 16_384), "--sequences", "2")
    assert status == 1
    assert "does not fit: no page of KV cache is left for each sequence" in out


def test_every_verdict_on_a_projection(run: Run, settings: None):
    status, out, _ = run("plan", "nvfp4", "-c", "r.yaml", "--explain", "3.ffn.down")
    assert status == 0
    assert "nvfp4: layers.3.ffn.down, 256 x 512 in nvfp4" in out
    assert "5 nvfp4_gemv 1 to 3 yes built-in order" in out
    assert "- fake_w4a8_int8 17+ yes nothing: runs only where an order or pin names it" in out
    assert "served: M 1 to 3 by nvfp4_gemv (built-in order); M 4 to 16384 by nvfp4_gemm (built-in order)" in out
    status, out, _ = run("plan", "fp8_row", "--explain", "layers.3.attn.q")
    assert status == 1
    assert "served: M 1 to 16384 by none" in out


def test_two_checkpoints(run: Run):
    status, out, _ = run("plan", "bf16", "--against", "nvfp4")
    assert status == 0
    assert "0-7 (8) ffn.gate ffn.up ffn.down 1 to 3 nvfp4_gemv: nvfp4 in place bf16_gemv: bf16 in place" in out
    assert "bf16 holds " in out
    assert " MB more than nvfp4" in out
    assert "KV cache: " in out
    status, out, _ = run("plan", "bf16", "--against", "bf16")
    assert "no difference: the same arms serve the same rows, in as many bytes" in out


def test_a_checkpoint_under_the_settings_of_variants(run: Run, settings: None, models: Path):
    names = ("nvfp4@prefill:hybrid", "nvfp4@prefill:plain")
    status, _, _ = run("plan", names[0], "--against", names[1], "-c", "r.yaml", "--json", "d.json")
    assert status == 0
    made = read_plan(models / "d.json")
    assert [p.name for p in made.plans] == [names[1], names[0]]
    (diff,) = made.diffs
    assert [(c.roles, c.rows, c.arms[1]) for c in diff.changed] == [
        (["ffn.gate", "ffn.up"], [(17, 16384)], "fake_q4k_mmq"),
        (["ffn.down"], [(17, 16384)], "fake_w4a8_int8"),
    ]
    assert diff.more == 8 * (2 * 512 * 256 // 256 * 144 + 512 * 256 * 9 // 8)
    assert diff.more_tokens is not None
    assert diff.more_tokens < 0


def test_variants_of_an_experiment(run: Run, settings: None):
    status, out, _ = run("plan", "-e", "prefill", "--against", "plain", "-c", "r.yaml")
    assert status == 0
    assert "prefill:hybrid against prefill:plain" in out
    assert "0 ffn.down 64 nvfp4_gemm: nvfp4 in place fake_w4a8_int8: int8_32 of nvfp4" in out
    assert "KV cache" not in out
    _, out, _ = run("plan", "prefill:plain", "-c", "r.yaml")
    assert "prefill:plain on h200" in out


BAD = [
    (["nvfp4", "--memory", "12XB"], "--memory 12XB: expected bytes, as a number with one of B, KB, KiB, MB, MiB, "),
    (["nvfp4", "--memory", "0"], "--memory 0: expected 1 byte or more"),
    (["nvfp4", "--reserve", "-1"], "--reserve -1: expected bytes"),
    (["nvfp4", "--kv-dtype", "int4"], "--kv-dtype int4: expected one of bf16, f16, fp8"),
    (["nvfp4", "--kv-dtype", "fp16"], "--kv-dtype fp16: expected one of bf16, f16, fp8, did you mean 'f16'?"),
    (["nvfp4", "--sequences", "0"], "--sequences 0: expected an integer of 1 or more"),
    (["nvfp4", "--against", "none"], "none: "),
    (["nvfp4", "--explain", "lm_heda"], "--explain lm_heda: found no such projection, expected one of 0.gdn.qkv, "),
    (["prefil:plain", "-c", "r.yaml"], "r.yaml: unknown experiment 'prefil', expected one of prefill"),
    (["prefill:plane", "-c", "r.yaml"], "experiment prefill: unknown variant 'plane', expected one of plain, hybrid, "
     "did you mean 'plain'?"),
    (["nvfp4@prefill:hybird", "-c", "r.yaml"], "experiment prefill: unknown variant 'hybird', expected one of plain, "),
    (["none@prefill:hybrid", "-c", "r.yaml"], "none: "),
    (["x" * 300], "x" * 300 + ": cannot be read: File name too long"),
    (["nvfp4", "-e", "prefill"], "plan: found neither or both of CHECKPOINT and --experiment"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "sentence"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_one_sentence_and_exit_2(run: Run, settings: None, argv: list[str], sentence: str):
    status, _, err = run("plan", *argv)
    assert status == 2
    assert err.startswith(f"atlas-lab: {sentence}")
    assert err.count("\n") == 1


def test_a_rank_of_tensor_parallelism(run: Run):
    whole = json.loads(run("plan", "bf16", "--json", "-")[1])["plans"][0]
    ranks = [
        json.loads(run("plan", "bf16", "--tensor-parallel", f"{r}/2", "--json", "-")[1])["plans"][0] for r in (0, 1)
    ]
    assert ranks[0]["residency"]["steady"] == ranks[1]["residency"]["steady"] < whole["residency"]["steady"]
    status, _, err = run("plan", "bf16", "--tensor-parallel", "2/2")
    assert (status, err) == (
        2,
        "atlas-lab: --tensor-parallel 2/2: expected RANK/SIZE with 0 <= RANK < SIZE, such as 0/2\n",
    )
    status, _, err = run("plan", "bf16", "--tensor-parallel", "0/3")
    assert status == 2
    assert err.count("\n") == 1


def test_experiments_are_not_cut(run: Run, settings: None):
    status, _, err = run("plan", "-c", "r.yaml", "-e", "x", "--tensor-parallel", "0/2")
    assert (status, err) == (
        2,
        "atlas-lab: --tensor-parallel: an experiment's layers are whole, expected a CHECKPOINT\n",
    )
