"""References: sizes from YAML, handles that files agree with, conversion cached by content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas_lab import checkpoint
from atlas_lab.experiments import config
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.reference import References, Weights, references, variant_weights
from atlas_lab.experiments.yaml_source import parse


def experiment(body: str, base: Path = Path()) -> tuple[config.Loaded, str, config.Experiment]:
    text = f"experiments:\n  x:\n    {body}\n    m: [1]\n    baseline: a\n    variants: {{a: {{}}}}\n"
    loaded = config.check(parse(text, "r.yaml", base / "r.yaml"))
    return loaded, *loaded.experiment("x")


def make(body: str, small: bool = True, base: Path = Path()) -> References:
    return references(*experiment(body, base), small=small, models={})


FULL = "model: {family: qwen3.5, hidden: 5120, intermediate: 17408, seed: 3}"


def test_full_and_small():
    r = make(FULL + "\n    interpreter: {hidden: 64, intermediate: 96}")
    assert not r.same
    assert [(p.role, p.n, p.k) for s in r.full.sites() for p in s.projections] == [
        ("ffn.gate", 17408, 5120),
        ("ffn.up", 17408, 5120),
        ("ffn.down", 5120, 17408),
    ]
    assert [(p.n, p.k) for s in r.numbers.sites("fp8") for p in s.projections] == [(96, 64), (96, 64), (64, 96)]
    assert make(FULL, small=False).same
    assert make(FULL).numbers.dims.hidden == 256
    assert make("model: {family: qwen3.5, hidden: 64, intermediate: 96}").same


def test_a_preset():
    assert make("model: qwen3.5-9b").full.dims.hidden == 4096
    assert make("model: {preset: qwen3.5-9b, seed: 2}").full.label == (
        "qwen3.5-9b, hidden 4096, intermediate 12288, seed 2"
    )


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4", "nvfp4_ct", "fp8_row"])
def test_files_hold_what_the_handles_say(tmp_path: Path, weights: str):
    r = make("model: {family: qwen3.5, hidden: 64, intermediate: 96}").numbers
    held = r.file(weights, tmp_path)
    assert [p for s in held.sites for p in s.projections] == [p for s in r.sites(weights) for p in s.projections]


def test_files_are_made_once(tmp_path: Path):
    r = make("model: {family: qwen3.5, hidden: 64, intermediate: 96}").numbers
    path = r.file("fp8", tmp_path).path
    stamp = path.stat().st_mtime_ns
    assert r.file("fp8", tmp_path).path == path
    assert path.stat().st_mtime_ns == stamp
    other = make("model: {family: qwen3.5, hidden: 64, intermediate: 96, seed: 1}").numbers
    assert other.file("fp8", tmp_path).path != path


def test_a_checkpoint_as_reference(tmp_path: Path):
    checkpoint.new(tmp_path / "model", "bf16", "tiny", layers=4)
    r = make("checkpoint: model", base=tmp_path)
    assert r.same
    assert r.numbers.file("bf16", tmp_path).path == tmp_path / "model"
    held = r.numbers.file("nvfp4", tmp_path / "cache")
    assert [p for s in held.sites for p in s.projections] == [p for s in r.full.sites("nvfp4") for p in s.projections]
    small = make("checkpoint: model\n    interpreter: {hidden: 64, intermediate: 96}", base=tmp_path)
    assert not small.same
    assert small.numbers.dims.hidden == 64
    # Equal content under another path is found again.
    (tmp_path / "model").rename(tmp_path / "moved")
    again = make("checkpoint: moved", base=tmp_path).numbers.file("nvfp4", tmp_path / "cache")
    assert again.path == held.path


def test_a_checkpoint_of_another_family(tmp_path: Path):
    checkpoint.new(tmp_path / "model", "bf16", "tiny-llama")
    r = make("checkpoint: model", base=tmp_path)
    held = r.numbers.file("nvfp4", tmp_path / "cache")
    assert held.family == "llama"
    assert [p.role for p in held.projections] == [p.role for s in r.full.sites() for p in s.projections]
    with pytest.raises(ConfigError) as e:
        make("checkpoint: model\n    interpreter: {hidden: 64, intermediate: 96}", base=tmp_path)
    said = "found dimensions for a llama checkpoint, expected none: small models are of qwen3.5"
    assert str(e.value).endswith(f"interpreter: {said}")


def test_converted_weights_are_of_the_reference(tmp_path: Path):
    r = make("model: {family: qwen3.5, hidden: 64, intermediate: 96}").numbers
    bf16 = r.file("bf16", tmp_path).store.read("model.language_model.layers.0.mlp.up_proj.weight").astype(np.float64)
    fp8 = r.file("fp8", tmp_path)
    p = next(p for p in fp8.projections if p.role == "ffn.up")
    from atlas_lab import formats

    values = formats.get("fp8").dequantize({f: fp8.store.read(t.name) for f, t in p.weight.fields})
    assert np.abs(values - bf16).max() < 0.07 * np.abs(bf16).max()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("model: {family: llama, hidden: 64, intermediate: 96}", "r.yaml:3: experiments.x.model.family: found 'llama', "
         "expected qwen3.5"),
        ("model: qwen3.5-27", "r.yaml:3: experiments.x.model: size: found 'qwen3.5-27', expected one of"),
        (FULL + "\n    layers: [64]", "r.yaml:4: experiments.x.layers: found 64, expected 0 to 63"),
        (FULL + "\n    roles: [ffn.gat]", "r.yaml:4: experiments.x.roles: found 'ffn.gat', expected some of"),
        ("checkpoint: none", "r.yaml:3: experiments.x.checkpoint: none"),
    ],
)  # fmt: skip
def test_refusals(body, sentence):
    with pytest.raises(ConfigError) as e:
        make(body)
    assert str(e.value).startswith(sentence)
    assert "\n" not in str(e.value)


def test_a_reference_is_bf16(tmp_path: Path):
    checkpoint.new(tmp_path / "model", "fp8", "tiny")
    with pytest.raises(ConfigError) as e:
        make("checkpoint: model", base=tmp_path)
    assert str(e.value).endswith("mlp.gate_proj.weight: found fp8, expected bf16")


def test_a_variant_of_its_own_checkpoint(tmp_path: Path):
    checkpoint.new(tmp_path / "model", "bf16", "tiny")
    checkpoint.new(tmp_path / "quant", "nvfp4", "tiny")
    checkpoint.new(tmp_path / "other", "nvfp4", "tiny", hidden=512)
    loaded, name, x = experiment("checkpoint: model", tmp_path)
    r = references(loaded, name, x, small=True, models={})
    own = variant_weights(loaded, name, "a", config.Variant(checkpoint="quant"), r.full, {})
    assert own.format == "nvfp4"
    assert own.file(r, tmp_path).path == tmp_path / "quant"
    with pytest.raises(ConfigError, match=r"layers\.0\.ffn\.gate: found a weight \[384, 512\], expected the reference"):
        variant_weights(loaded, name, "a", config.Variant(checkpoint="other"), r.full, {})
    assert variant_weights(loaded, name, "a", config.Variant(), r.full, {}) == Weights("bf16")
