"""Checkpoints that are made: round trips in every convention, equal bytes for equal seeds, nothing half-written."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors

from atlas_lab.checkpoint import (
    SIZES,
    CheckpointError,
    Store,
    describe,
    new,
    open_checkpoint,
    quantize_checkpoint,
    show,
    sizes,
    synthetic,
    synthetic_sites,
    write_checkpoint,
)
from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.checkpoint.naming import CONVENTIONS, KEPT
from atlas_lab.checkpoint.qwen35 import PART, QWEN35
from atlas_lab.core.registry import load_registry
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import BY_SAFETENSORS, DTYPES

S = SIZES["tiny"]
SMALL = sizes("tiny", layers=1, hidden=192, intermediate=208)
P = "model.language_model.layers."
SUFFIX = {
    ("huggingface", "bf16"): {},
    ("qwen", "fp8"): {"weight_scale_inv": ("bf16", (2, 2))},
    ("deepseek", "fp8"): {"weight_scale_inv": ("f32", (2, 2))},
    ("compressed-tensors", "fp8"): {"weight_scale": ("bf16", (2, 2))},
    ("modelopt", "fp8_tensor"): {"weight_scale": ("f32", ())},
    ("compressed-tensors", "fp8_tensor"): {"weight_scale": ("f32", (1,))},
    ("compressed-tensors", "fp8_row"): {"weight_scale": ("f32", (208, 1))},
    ("modelopt", "fp8_row"): {"weight_scale": ("f32", (208,))},
    ("modelopt", "nvfp4"): {"weight_scale": ("e4m3", (208, 12)), "weight_scale_2": ("f32", ())},
    ("compressed-tensors", "nvfp4_ct"): {"weight_scale": ("e4m3", (208, 12)), "weight_global_scale": ("f32", (1,))},
}


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("limit", [None, 150_000])
@pytest.mark.parametrize("c", CONVENTIONS, ids=lambda c: f"{c.producer}-{c.format}")
def test_round_trip(tmp_path, c, limit):
    write_checkpoint(tmp_path / "c", SMALL, c.format, seed=3, producer=c.producer, max_shard_bytes=limit)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert len(checkpoint.store.files) == (1 if limit is None else len(list((tmp_path / "c").glob("*-of-*"))))
    assert (len(checkpoint.store.files) > 1) == (limit is not None)
    assert list(checkpoint.sites) == synthetic_sites(SMALL, c.format, producer=c.producer)
    assert checkpoint.dims == SMALL.dims
    gate = f"{P}0.mlp.gate_proj"
    held = {n.removeprefix(f"{gate}."): t for n, t in checkpoint.store.tensors.items() if n.startswith(gate)}
    codes = held.pop("weight_packed" if c.format == "nvfp4_ct" else "weight")
    assert codes.dtype == {"bf16": "bf16", "nvfp4": "u8", "nvfp4_ct": "u8"}.get(c.format, "e4m3")
    assert {n: (t.dtype, t.shape) for n, t in held.items()} == SUFFIX[c.producer, c.format]
    for p in checkpoint.projections:
        form = get(p.weight.format)
        assert form.name == ("bf16" if p.role in KEPT else c.format)
        reference = synthetic.weight(3, p.label, p.n, p.k)
        stored = {f: checkpoint.store.read(t.name) for f, t in p.weight.fields}
        form.check(stored, p.label)
        made = form.quantize(reference.astype(np.float32))
        if c.scale_dtype and form.name != "bf16":
            made["scale"] = made["scale"].astype(DTYPES[c.scale_dtype].numpy)
        for f, a in stored.items():
            assert a.tobytes() == made[f].tobytes()
        error = form.dequantize(stored) - reference.astype(np.float64)
        bound = {"bf16": 0.0, "fp8": 0.03, "nvfp4": 0.11}[form.family]
        assert np.linalg.norm(error) <= bound * np.linalg.norm(reference.astype(np.float64))


@pytest.mark.parametrize("limit", [None, 150_000])
def test_files_equal_the_package_s(tmp_path, limit):
    write_checkpoint(tmp_path / "c", SMALL, "nvfp4", seed=1, max_shard_bytes=limit)
    read = {}
    for path in (tmp_path / "c").glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as f:
            assert f.metadata() == {"format": "pt"}
        read |= dict(safetensors.deserialize(path.read_bytes()))
    store = Store.open(tmp_path / "c")
    assert set(read) == set(store.tensors)
    for name, t in read.items():
        assert BY_SAFETENSORS[t["dtype"]].name == store.tensors[name].dtype
        assert bytes(t["data"]) == store.read(name).tobytes()


def test_bytes_equal_the_package_s(tmp_path):
    theirs = {
        "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16", "f16": "float16", "f32": "float32",
        "f64": "float64", "bool": "bool", "u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16",
        "u32": "uint32", "i32": "int32", "u64": "uint64", "i64": "int64",
    }  # fmt: skip
    if hasattr(safetensors, "TensorSpec"):  # the first releases have no such type
        theirs["e8m0"] = "float8_e8m0fnu"
    arrays = {f"{name}{i}": np.zeros((2, 3), DTYPES[name].numpy) for name in theirs for i in "ba"}
    arrays['é"\\\n\x01'] = np.zeros((), np.uint8)
    tensors = {n: Tensor(next(d.name for d in DTYPES.values() if d.numpy == a.dtype), a.shape, n)
               for n, a in arrays.items()}  # fmt: skip
    metadata = {"format": "pt"}
    write_files(tmp_path, [Group((t,), lambda: arrays) for t in tensors.values()], metadata)
    specs = {n: _spec(theirs[tensors[n].dtype], a) for n, a in arrays.items()}
    assert (tmp_path / "model.safetensors").read_bytes() == bytes(safetensors.serialize(specs, metadata))


def _spec(spelling, a):
    """A tensor as `safetensors.serialize` wants it; before release 0.8 that was a dict."""
    if not hasattr(safetensors, "TensorSpec"):
        return {"dtype": spelling, "shape": a.shape, "data": a.tobytes()}
    return safetensors.TensorSpec(dtype=spelling, shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)


def test_equal_seeds_give_equal_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_checkpoint(tmp_path / name, SMALL, "fp8", seed=seed, max_shard_bytes=200_000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_one_reference_whatever_is_selected(tmp_path):
    write_checkpoint(tmp_path / "all", S, "bf16", seed=2)
    write_checkpoint(tmp_path / "part", S, "bf16", [3, 1], ["ffn.up", "ffn.down"], seed=2, text_only=True)
    whole, part = Store.open(tmp_path / "all"), Store.open(tmp_path / "part")
    assert len(part.tensors) == 4
    for name in part.tensors:
        assert part.read(name).tobytes() == whole.read(name.replace("model.", "model.language_model.")).tobytes()
    assert part.config[PART] == {"layers": [1, 3], "roles": ["ffn.up", "ffn.down"]}
    assert PART not in whole.config
    assert list(open_checkpoint(tmp_path / "part").sites) == synthetic_sites(
        S, "bf16", [1, 3], ["ffn.up", "ffn.down"], text_only=True
    )


def test_whole_layers_hold_what_no_projection_reads(tmp_path):
    write_checkpoint(tmp_path / "c", S, "fp8_row", [2, 3], seed=2)
    rows = {r.tensor.name: r for r in describe(open_checkpoint(tmp_path / "c"))}
    store = Store.open(tmp_path / "c")
    assert set(rows) == set(store.tensors)
    unread = {n.removeprefix(P): r.note for n, r in rows.items() if not r.used_by}
    assert unread == {
        "2.input_layernorm.weight": "norm",
        "2.post_attention_layernorm.weight": "norm",
        "2.linear_attn.conv1d.weight": "convolution",
        "2.linear_attn.A_log": "gates",
        "2.linear_attn.dt_bias": "gates",
        "2.linear_attn.norm.weight": "norm",
        "3.input_layernorm.weight": "norm",
        "3.post_attention_layernorm.weight": "norm",
        "3.self_attn.q_norm.weight": "norm",
        "3.self_attn.k_norm.weight": "norm",
    }
    assert all(store.tensors[P + n].dtype == "bf16" for n in unread)
    scale = rows[f"{P}3.self_attn.k_proj.weight_scale"]
    assert (scale.used_by, scale.field, scale.format, scale.geometry) == ("layers.3.attn.k", "scale", "fp8_row", "row")
    a_log = store.read(f"{P}2.linear_attn.A_log").astype(np.float64)
    assert np.all((a_log >= 0) & (a_log <= np.log(16) + 0.01))


def test_the_reference_has_heavy_tails():
    w = synthetic.weight(0, "layers.0.ffn.gate", 512, 1024)
    assert w.dtype == ml_dtypes.bfloat16
    x = w.astype(np.float64)
    assert 0.019 < np.std(x[np.abs(x) < 0.1]) < 0.021
    outside = np.count_nonzero(np.abs(x) > 0.12)  # six deviations: of normal values, not one in a hundred million
    assert 30 < outside < 300
    assert np.abs(x).max() < 2


def test_values_do_not_depend_on_how_they_are_chunked(monkeypatch):
    whole = synthetic.weight(0, "w", 40, 64)
    monkeypatch.setattr("atlas_lab.formats.scan.CHUNK", 200)
    assert synthetic.weight(0, "w", 40, 64).tobytes() == whole.tobytes()


@pytest.mark.parametrize("c", CONVENTIONS[1:], ids=lambda c: f"{c.producer}-{c.format}")
def test_quantizing_a_bf16_checkpoint_gives_what_is_written_at_once(tmp_path, c):
    write_checkpoint(tmp_path / "bf16", SMALL, "bf16", seed=3)
    write_checkpoint(tmp_path / "direct", SMALL, c.format, seed=3, producer=c.producer)
    quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), c.format, tmp_path / "copy", producer=c.producer)
    assert contents(tmp_path / "copy") == contents(tmp_path / "direct")


def test_quantizing_some_roles(tmp_path):
    write_checkpoint(tmp_path / "bf16", SMALL, "bf16")
    source = open_checkpoint(tmp_path / "bf16")
    quantize_checkpoint(source, "nvfp4", tmp_path / "ffn", roles=["ffn.*"], keep=["ffn.down"], max_shard_bytes=200_000)
    made = open_checkpoint(tmp_path / "ffn")
    formats = {p.role: p.weight.format for p in made.projections}
    assert [r for r, f in formats.items() if f == "nvfp4"] == ["ffn.gate", "ffn.up"]
    assert made.config["quantization_config"]["ignore"] == [
        f"{P}0.{m}"
        for m in (
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
            "linear_attn.out_proj",
            "mlp.down_proj",
        )
    ] + ["lm_head"]
    assert {t.name for t in made.unread} == {t.name for t in source.unread}


def test_quantizing_what_is_quantized(tmp_path):
    write_checkpoint(tmp_path / "fp8", SMALL, "fp8")
    name = f"{P}0.linear_attn.in_proj_qkv.weight"
    sentence = f"{tmp_path / 'fp8'}: {name}: found fp8, expected bf16 to quantize"
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        quantize_checkpoint(open_checkpoint(tmp_path / "fp8"), "nvfp4", tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["fp8"]


def test_quantizing_a_width_that_the_format_cannot_hold(tmp_path):
    write_checkpoint(tmp_path / "bf16", sizes("tiny", layers=1, hidden=200), "bf16")
    with pytest.raises(CheckpointError, match=re.escape("in_proj_qkv: nvfp4: found K = 200 in a weight [512, 200], ")):
        quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), "nvfp4", tmp_path / "x")


def test_quantizing_values_that_cannot_be(tmp_path):
    write_checkpoint(tmp_path / "bf16", SMALL, "bf16", [0], ["ffn.up"])
    file = tmp_path / "bf16" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\x80\x7f")  # infinity
    sentence = "mlp.up_proj: the weight to quantize as fp8: found infinity at row 207, column 191, expected finite va"
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), "fp8", tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["bf16"]


CONFIGS = {
    "qwen-fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                 "weight_block_size": [128, 128]},
    "modelopt-fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-fp8_row": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "compressed-tensors-nvfp4_ct": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "compressed-tensors-fp8_row": {"quant_method": "compressed-tensors", "format": "float-quantized"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_quantization_config(tmp_path, name):
    c = next(c for c in CONVENTIONS if f"{c.producer}-{c.format}" == name)
    write_checkpoint(tmp_path / "c", SMALL, c.format, producer=c.producer, roles=["gdn.*"])
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    made = config["quantization_config"]
    assert CONFIGS[name].items() <= made.items()
    kept = made["modules_to_not_convert" if "fmt" in made else "ignore"]
    assert kept == [f"{P}0.linear_attn.in_proj_b", f"{P}0.linear_attn.in_proj_a"]
    if name == "compressed-tensors-nvfp4_ct":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        assert weights.items() <= made["config_groups"]["group_0"]["weights"].items()


def test_bf16_has_no_quantization_config(tmp_path):
    new(tmp_path / "c", layers=1)
    assert "quantization_config" not in Store.open(tmp_path / "c").config


def test_new_writes_a_small_whole_model(tmp_path):
    new(tmp_path / "deep" / "c", "nvfp4", seed=4, layers=4)
    shown = show(tmp_path / "deep" / "c", verify=True)
    assert shown.faults == ()
    assert shown.checkpoint.dims == S.dims
    assert shown.checkpoint.family == "qwen3.5"
    assert shown.checkpoint.store.bytes < 3e6
    assert (tmp_path / "deep" / "c").stat().st_mode & 0o777 == (tmp_path / "deep").stat().st_mode & 0o777


def test_an_existing_path_is_left_alone(tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match=r"c: exists, expected a new path for a checkpoint$"):
        new(tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/c: cannot be written \(.*\)$"):
        new(tmp_path / "file" / "c")


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_of_an_unfinished_checkpoint(tmp_path, monkeypatch, fault):
    real = synthetic.weight
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise fault
        return real(*args)

    monkeypatch.setattr(synthetic, "weight", failing)
    expected = CheckpointError if isinstance(fault, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(fault, OSError) else None):
        new(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_made_values_are_checked_against_their_handle(tmp_path):
    t = Tensor("f32", (2,), "t")
    with pytest.raises(ValueError, match=r"^t: f32\[2\]: made float64\[2\]$"):
        write_files(tmp_path, [Group((t,), lambda: {"t": np.zeros(2)})], {})


FAMILIES = "qwen3.5, qwen3, llama, gemma"
OPENED = [
    (None, ": config.json: missing, expected a model's beside its tensors"),
    ({"model_type": "mixtral"}, ": config.json: model_type: found 'mixtral', expected a family of " + FAMILIES),
    ({"model_type": "qwen3_5_moe"}, ": config.json: model_type: found 'qwen3_5_moe', expected a family of " + FAMILIES),
    ({"hidden_size": 4}, ": config.json: model_type: found null, expected a family of " + FAMILIES),
    ({"model_type": "qwen3_5"}, ": config.json: hidden_size: missing, expected an integer of 1 or more"),
    (sizes("tiny", layers=2).config(), f": {P}1.linear_attn.in_proj_qkv.weight: missing, expected the [512, 256] "
     "weight of layers.1.gdn.qkv of a linear_attention layer"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "sentence"), OPENED)
def test_a_model_that_cannot_be_opened(tmp_path, config, sentence):
    new(tmp_path / "c", layers=1)
    (tmp_path / "c" / "config.json").unlink()
    if config is not None:
        (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{tmp_path / 'c'}{sentence}") + "$"):
        open_checkpoint(tmp_path / "c")


def test_models_of_a_registry(tmp_path):
    new(tmp_path / "c", layers=1)
    assert open_checkpoint(tmp_path / "c", load_registry().models).model is QWEN35
    with pytest.raises(CheckpointError, match=r"model_type: found 'qwen3_5', expected a family of $"):
        open_checkpoint(tmp_path / "c", {})


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "vision tower, not used"),
        ("mtp.layers.0.mlp.gate_proj.weight", "multi-token prediction, not used"),
        (f"{P}0.mlp.gate_proj.input_scale", "scale of activations"),
        (f"{P}3.self_attn.k_proj.k_scale", "scale of the KV cache"),
        ("model.language_model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "output head"),
        ("model.language_model.norm.weight", "norm"),
        ("other", "unknown"),
    ],
)
def test_what_unread_tensors_are(name, note):
    assert QWEN35.meaning(name) == note
