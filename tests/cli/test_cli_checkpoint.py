"""`checkpoint new`, `convert` and `show` from the command line: models by name, headers alone, mixes, verification."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_lab import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `checkpoint ...` in an empty folder: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*argv: str) -> tuple[int, str, str]:
        status = cli.run(["checkpoint", *argv])
        out, err = capsys.readouterr()
        return status, " ".join(out.split()), err

    return command


def test_headers_of_a_release(run: Run):
    model = ("new", "m", "--model", "qwen3.6-27b", "--format", "nvfp4+fp8", "--headers-only")
    status, out, _ = run(*model, "--json", "m.json")
    assert status == 0
    assert "497 projections in fp8_tensor, bf16, nvfp4; 1460 tensors, 21,000.0 MB" in out
    assert "48 layers of linear_attention: 16 key heads of 128, 48 value heads of 128; FFN of 17408" in out
    assert "16 layers of full_attention: 24 query and 4 KV heads of 256, q gated; FFN of 17408" in out
    assert "multi-token prediction, not used: 15 tensors, 849.4 MB" in out
    assert len(json.loads(Path("m.json").read_text())["tensors"]) == 1460
    assert os.stat("m/model.safetensors").st_blocks * 512 < 1 << 20
    status, _, err = run("show", "m", "--verify")
    assert (status, err) == (2, "atlas-lab: m: found headers alone, expected values to verify\n")


def test_a_tied_model_is_converted_and_verified(run: Run):
    assert run("new", "m", "--model", "tiny-gemma", "--vocab", "64", "--layers", "6", "--seed", "3")[0] == 0
    status, out, _ = run("convert", "m", "q", "--format", "fp8", "--producer", "compressed-tensors")
    assert status == 0
    assert "42 projections in fp8, bf16" in out
    assert "5 layers of sliding_attention: 4 query and 4 KV heads of 64; FFN of 384" in out
    assert "output head: the embedding" in out
    status, out, _ = run("show", "q", "--verify")
    assert status == 0
    assert "all values checked" in out
    file = Path("q/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    status, out, _ = run("show", "q", "--verify")
    assert status == 1
    assert out.count("bad value: q: ") == 1


def test_a_model_without_a_vocabulary(run: Run):
    status, out, _ = run("new", "m", "--layers", "1", "--vocab", "0")
    assert status == 0
    assert "8 projections in bf16; 15 tensors" in out
    assert "missing" not in out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["new", "m", "--model", "gemma"], "model: found 'gemma', expected one of "),
        (
            ["new", "m", "--model", "llama-3-8b", "--layers", "0"],
            "config.json: num_hidden_layers: found 0, expected an",
        ),
        (["new", "m", "--format", "nvfp4", "--producer", "qwen"], "producer of nvfp4: found 'qwen', expected one of "),
        (["convert", "m", "q"], "m: "),
    ],
)
def test_refusals(run: Run, argv: list[str], sentence: str):
    status, _, err = run(*argv)
    assert status == 2
    assert err.startswith(f"atlas-lab: {sentence}")
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_equal_layers_are_shown_together(run: Run):
    assert run("new", "m", "--layers", "4", "--format", "nvfp4")[0] == 0
    status, out, _ = run("show", "m")
    assert status == 0
    lines = " ".join(out.split())
    assert "0-2 (3)" in lines
    assert "0-3 (4)" in lines
    assert out.count("gate_proj.weight_scale_2") <= 1


def test_files_beside_a_checkpoint_are_named(run: Run):
    run("new", "m", "--layers", "1")
    assert "not read" not in run("show", "m")[1]
    Path("m/mtp.safetensors").write_bytes(b"")
    assert "not read: mtp.safetensors, a file that is no part of this checkpoint" in run("show", "m")[1]


def test_a_fault_is_told_as_it_is_spelled(run: Run):
    name = "[/bold]m"
    run("new", name, "--layers", "1", "--format", "fp8", "--vocab", "0")
    file = Path(name, "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    status, out, _ = run("show", name, "--verify")
    assert (status, out.count(f"bad value: {name}: layers.0.")) == (1, 1)
