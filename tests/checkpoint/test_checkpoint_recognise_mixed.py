"""Every convention in one file: each weight is what its own tensors say, and nothing in the file goes unreported."""

from __future__ import annotations

import re

import numpy as np
import pytest
from mixed_files import CONVENTIONS, PREFIX, SHAPES, write_mixed

from atlas_lab.checkpoint import CheckpointError, Store, check_values, describe, open_checkpoint
from atlas_lab.formats import get

MODULES = list(SHAPES)


def cycled(start: int) -> dict[str, str]:
    """A convention for each module, in turn."""
    names = list(CONVENTIONS)
    return {m: names[(start + i) % len(names)] for i, m in enumerate(MODULES)}


@pytest.mark.parametrize("start", [0, 7])
def test_every_convention_in_one_file(tmp_path, start):
    held = cycled(start)
    assert set(held.values()) == set(CONVENTIONS)
    arrays = write_mixed(tmp_path / "m", held)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert len(checkpoint.projections) == len(held)
    for p in checkpoint.projections:
        module = re.sub(r"\.weight(_packed)?$", "", p.weight["weight"].name)
        form = CONVENTIONS[held[module]][0]
        assert p.weight.format == form, held[module]
        read = {f: checkpoint.store.read(t.name) for f, t in p.weight.fields}
        assert {f: a.shape for f, a in read.items()} == {f: t.shape for f, t in p.weight.fields}
        same = {f: arrays[t.name].reshape(t.shape) for f, t in p.weight.fields}
        for f, a in read.items():
            assert a.tobytes() == same[f].tobytes()
        np.testing.assert_array_equal(get(form).dequantize(read), get(form).dequantize(same))
        check_values(checkpoint.store, p.weight, p.label)
        beside = {n for n in arrays if n.startswith(f"{module}.")} - {t.name for t in p.weight.tensors.values()}
        assert {t.name for _, t in p.weight.activation} == beside
    rows = describe(checkpoint)
    assert sorted(r.tensor.name for r in rows) == sorted(arrays)
    inputs = [r for r in rows if r.note]
    assert {r.tensor.name for r in inputs} == {n for n in arrays if re.search(r"\.(input|activation)_\w+$", n)}
    assert all(re.fullmatch(r"scale of the input of layers\.\d\.\w+\.\w+", r.note) for r in inputs)


@pytest.mark.parametrize("convention", ["modelopt block, rank 4", "modelopt block, rank 4, inv"])
def test_a_grid_of_four_dimensions_is_read_in_place(tmp_path, convention):
    module = f"{PREFIX}0.mlp.down_proj"
    arrays = write_mixed(tmp_path, {m: convention if m == module else "bf16" for m in MODULES})
    checkpoint = open_checkpoint(tmp_path)
    scale = next(p for p in checkpoint.projections if p.label == "layers.0.ffn.down").weight["scale"]
    assert scale.shape == (2, 3)
    values = checkpoint.store.read(scale.name)
    assert arrays[scale.name].shape == (2, 1, 3, 1)
    np.testing.assert_array_equal(values, arrays[scale.name][:, 0, :, 0])
    assert not values.flags.owndata and np.shares_memory(values, checkpoint.store.read(scale.name))
    assert checkpoint.store.tensors[scale.name] == scale


def test_other_tensors_of_four_dimensions_stay_as_they_are(tmp_path):
    extra = {"model.visual.weight_scale": np.ones((2, 1, 3, 2), np.float32), "conv": np.ones((2, 1, 3, 1), np.float32)}
    write_mixed(tmp_path, dict.fromkeys(MODULES, "bf16"), extra)
    assert {n: Store.open(tmp_path).tensors[n].shape for n in extra} == {n: a.shape for n, a in extra.items()}


def test_every_tensor_that_nothing_reads_is_reported_with_what_it_is(tmp_path):
    one = np.ones(1, np.float32)
    notes = {
        f"{PREFIX}1.self_attn.k_proj.k_scale": "scale of the KV cache",
        f"{PREFIX}1.self_attn.v_scale": "scale of the KV cache",
        f"{PREFIX}1.self_attn.q_scale": "scale of attention queries",
        f"{PREFIX}0.mlp.up_proj.input_scale": "scale of the input of layers.0.ffn.up",
        f"{PREFIX}0.other.input_scale": "scale of activations",
        f"{PREFIX}0.other.weight_scale": "part of a quantized weight that no projection reads",
        f"{PREFIX}0.input_layernorm.weight": "norm",
        "model.visual.blocks.0.weight_scale": "vision tower, not used",
        "mystery": "unknown",
    }  # fmt: skip
    extra = {n: np.ones(256, np.float32) if note == "norm" else one for n, note in notes.items()}
    write_mixed(tmp_path, dict.fromkeys(MODULES, "bf16"), extra)
    rows = describe(open_checkpoint(tmp_path))
    assert {r.tensor.name: r.note for r in rows if r.note} == notes


def test_a_disagreement_names_checkpoint_tensor_and_entry(tmp_path):
    held = dict.fromkeys(MODULES, "modelopt nvfp4") | {MODULES[5]: "ct nvfp4"}
    write_mixed(tmp_path / "m", held, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    n, k = SHAPES[MODULES[5]]
    sentence = (
        f"{tmp_path / 'm'}: {MODULES[5]}.weight_packed: found compressed-tensors NVFP4 (u8[{n}, {k // 2}] with "
        f"e4m3[{n}, {k // 16}] weight_scale and f32[1] weight_global_scale), expected ModelOpt NVFP4 by config.json: "
        "quantization_config.quant_algo ('NVFP4')"
    )
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        open_checkpoint(tmp_path / "m")


def test_the_quant_config_beside_a_file_is_read_too(tmp_path):
    write_mixed(tmp_path / "m", dict.fromkeys(MODULES, "modelopt nvfp4"))
    (tmp_path / "m" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    for path in (tmp_path / "m", tmp_path / "m" / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"expected FP8 under one scale by hf_quant_config\.json: "):
            open_checkpoint(path)
