"""Families by their config.json: names, shapes and heads of releases, tied and fused tensors, what is refused."""

import re
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.checkpoint import CheckpointError, Store, model, new, open_checkpoint, presets, show, sizes
from atlas_lab.checkpoint.checkpoint import BUILT_IN
from atlas_lab.checkpoint.files import Group, write_files, write_json
from atlas_lab.checkpoint.gemma import GEMMA
from atlas_lab.checkpoint.layout import Attention, DeltaNet
from atlas_lab.checkpoint.naming import CONVENTIONS, convention
from atlas_lab.checkpoint.parameter import read_parameter
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.sizes import Sizes
from atlas_lab.checkpoint.transformer import LLAMA, QWEN3
from atlas_lab.core.registry import load_registry
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get

FFN = ("mlp.gate_proj", "mlp.up_proj")


def shapes(name):
    """Shapes of every projection's weight of a model in BF16, by name."""
    family, config = model(name)
    layout = family.layout(config)
    root = layout.prefixes[0]
    out = {layout.module(root, i, w): (w.n, w.k) for i, layer in enumerate(layout.layers) for w in layer.weights}
    return layout, out


def test_the_registry_provides_the_families():
    assert load_registry().models == BUILT_IN == {m.family: m for m in (QWEN35, QWEN3, LLAMA, GEMMA)}


@pytest.mark.parametrize(
    ("name", "hidden", "inter", "layers", "q", "kv", "tied"),
    [
        ("llama-3-8b", 4096, 14336, 32, 4096, 1024, False),
        ("llama-3-70b", 8192, 28672, 80, 8192, 1024, False),
        ("qwen3-8b", 4096, 12288, 36, 4096, 1024, False),
        ("qwen3-4b", 2560, 9728, 36, 4096, 1024, True),
        ("qwen3-1.7b", 2048, 6144, 28, 2048, 1024, True),
    ],
)
def test_plain_transformers(name, hidden, inter, layers, q, kv, tied):
    layout, found = shapes(name)
    wanted = {}
    for i in range(layers):
        wanted |= {f"model.layers.{i}.{m}": (inter, hidden) for m in FFN}
        wanted[f"model.layers.{i}.mlp.down_proj"] = (hidden, inter)
        for m, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            wanted[f"model.layers.{i}.self_attn.{m}_proj"] = shape
    assert found == wanted
    norms = {o.name for o in layout.layers[0].others}
    assert ("self_attn.q_norm.weight" in norms) == name.startswith("qwen3")
    assert not any(o.centred for o in layout.layers[0].others)
    assert layout.tied == tied
    d = layout.dims
    assert (d.hidden, d.intermediate, d.layers, d.attention_layers, d.activation) == (
        hidden, inter, layers, layers, "silu")  # fmt: skip
    assert d.kv_bytes_per_token(2) == 2 * 2 * layers * kv


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "tiny-gemma"])
def test_the_limit_of_a_gated_product(name):
    family, config = model(name)
    text = config.get("text_config", config)
    for found, limit in ((None, 0.0), (0, 0.0), (7, 7.0), (10.5, 10.5)):
        text["swiglu_limit"] = found
        assert family.layout(config).dims.activation_limit == limit


def test_sizes_with_a_limit_say_it_in_their_config():
    made = sizes("tiny", activation_limit=7.0)
    assert made.config()["text_config"]["swiglu_limit"] == 7.0
    assert Sizes.of(made.config()) == replace(made, layer_types=Sizes.of(made.config()).layer_types)
    assert "swiglu_limit" not in sizes("tiny").config()["text_config"]
    with pytest.raises(CheckpointError, match=re.escape("swiglu_limit: found -1, expected a number from 0 to 1e+38")):
        sizes("tiny", activation_limit=-1)


def test_gemma_4_31b():
    layout, found = shapes("gemma-4-31b")
    P = "model.language_model.layers."
    assert found[f"{P}0.mlp.gate_proj"] == (21504, 5376)
    assert [found[f"{P}0.self_attn.{m}_proj"] for m in "qkvo"] == [
        (8192, 5376),
        (4096, 5376),
        (4096, 5376),
        (5376, 8192),
    ]
    assert [found[f"{P}5.self_attn.{m}_proj"] for m in "qko"] == [(16384, 5376), (2048, 5376), (5376, 16384)]
    assert f"{P}5.self_attn.v_proj" not in found
    assert Counter(layer.kind for layer in layout.layers) == {"sliding_attention": 50, "full_attention": 10}
    assert [layout.layers[i].mixer for i in (0, 5)] == [
        Attention(32, 16, 256, window=1024),
        Attention(32, 4, 512),
    ]
    assert layout.dims.activation == "gelu_tanh"
    assert layout.dims.kv_bytes_per_token(1) == 2 * (50 * 16 * 256 + 10 * 4 * 512)
    ffn = sum(n * k for name, (n, k) in found.items() if ".mlp." in name)
    assert ffn == 3 * 5376 * 21504 * 60


def test_gemma_4_layers_that_share_kv():
    config = {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    }  # fmt: skip
    layout = GEMMA.layout(config)
    own, shared = layout.layers[0], layout.layers[20]
    assert [w.role for w in own.sites[0]] == ["attn.q", "attn.k", "attn.v"]
    assert [w.role for w in shared.sites[0]] == ["attn.q"]
    assert (own.intermediate, shared.intermediate) == (6144, 12288)
    assert layout.weight(20, "ffn.down").k == 12288
    full = [i for i, layer in enumerate(layout.layers) if layer.kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29]
    assert layout.weight(5, "attn.k").n == 512
    assert layout.dims.attention_layers == 15
    assert layout.dims.kv_bytes_per_token(1) == 2 * (13 * 256 + 2 * 512)


def test_gemma_3_multiplies_by_one_more_than_its_norms():
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "sliding_window": 1024,
        },
    }  # fmt: skip
    layout = GEMMA.layout(config)
    names = {o.name: o for o in layout.layers[0].others}
    assert set(names) == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    assert all(o.centred for o in names.values())
    assert layout.layers[5].mixer == Attention(8, 4, 256)
    assert layout.dims.kv_width == 0
    assert layout.tied
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        tensors = {f"{prefix}layers.0.x": Tensor("bf16", (1,), f"{prefix}layers.0.x")}
        with pytest.raises(CheckpointError, match=re.escape(f"{prefix}layers.0.self_attn.q_proj.weight: missing")):
            GEMMA.sites(config, tensors)


def test_the_mixers_of_qwen35():
    _, config = model("qwen3.6-27b")
    layout = QWEN35.layout(config)
    assert layout.layers[0].mixer == DeltaNet(16, 48, 128, 128, 4)
    assert layout.layers[3].mixer == Attention(24, 4, 256, gated=True)
    assert layout.head.n == 248320
    assert not layout.tied
    extra = {o.name: o.shape for o in layout.extra}
    assert len(extra) == 15
    assert extra["mtp.fc.weight"] == (5120, 10240)
    assert extra["mtp.layers.0.self_attn.q_proj.weight"] == (12288, 5120)


@pytest.mark.parametrize("c", CONVENTIONS, ids=lambda c: f"{c.producer}-{c.format}")
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-gemma", "tiny"])
def test_whole_models_in_every_convention(tmp_path, name, c):
    new(tmp_path / "c", c.format, name, producer=c.producer, layers=6 if name == "tiny-gemma" else 1)
    shown = show(tmp_path / "c", verify=True)
    assert shown.faults == ()
    held = shown.checkpoint
    assert held.missing == held.unused == ()
    assert {p.weight.format for p in held.projections if p.role.startswith("ffn")} == {c.format}
    head = held.projections[-1]
    assert (head.label, head.layer, head.weight.format) == ("lm_head", held.dims.layers, "bf16")
    tied = head.weight["weight"].name.endswith("embed_tokens.weight")
    assert tied == (name in ("tiny-qwen3", "tiny-gemma")) == held.layout.tied
    embed = next(p for p in held.parameters if p.role == "embed")
    assert embed.tensor.shape == (512, 256) == (head.n, head.k)
    assert {"norm", "norm.input"} <= {p.role for p in held.parameters}


def test_gates_are_promoted_by_value(tmp_path):
    new(tmp_path / "c", layers=1)
    held = open_checkpoint(tmp_path / "c")
    by_role = {p.role: p for p in held.parameters}
    for role in ("gdn.A_log", "gdn.dt_bias"):
        p = by_role[role]
        assert (p.tensor.dtype, p.dtype, p.label) == ("bf16", "f32", f"layers.0.{role}")
        values = read_parameter(held.store, p)
        assert values.dtype == np.float32
        assert np.array_equal(values, held.store.read(p.tensor.name).astype(np.float64))
    assert read_parameter(held.store, by_role["gdn.norm"]).dtype == ml_dtypes.bfloat16
    assert {r for r, p in by_role.items() if p.centred} == {"norm", "norm.input", "norm.post_attention"}


def fused(folder, form, **changes):
    """A tiny Llama in one format, its projections held by fused modules; the values of each by role."""
    family, config = model("tiny-llama", layers=1)
    config |= {"vocab_size": None, **changes}
    layout = family.layout(config)
    rng = np.random.default_rng(5)
    groups = []
    apart = {}
    for module, roles in (*layout.fused, ("self_attn.o_proj", ("attn.o",)), ("mlp.down_proj", ("ffn.down",))):
        weights = [layout.weight(0, r) for r in roles]
        whole = rng.standard_normal((sum(w.n for w in weights), weights[0].k), np.float32)
        name = f"model.layers.0.{module}"
        c = convention(form)
        made = c.encode(name, *whole.shape, lambda rows, whole=whole: whole[rows].astype(ml_dtypes.bfloat16))
        handles = c.tensors(name, *whole.shape)
        groups.append(Group(tuple(handles.values()), lambda made=made: made))
        values = get(form).dequantize({f: made[t.name] for f, t in handles.items()})
        apart |= dict(zip(roles, np.split(values, np.cumsum([w.n for w in weights])[:-1]), strict=True))
    folder.mkdir()
    write_files(folder, groups, {})
    write_json(folder / "config.json", config)
    return apart


def read(held, p):
    return get(p.weight.format).dequantize({f: held.store.read(t.name) for f, t in p.weight.fields})


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_row", "fp8_tensor", "nvfp4", "nvfp4_ct"])
def test_fused_tensors_are_read_by_rows(tmp_path, form):
    apart = fused(tmp_path / "c", form)
    held = open_checkpoint(tmp_path / "c")
    assert held.unread == ()
    assert [p.role for p in held.projections] == list(apart)[:3] + ["attn.o", "ffn.gate", "ffn.up", "ffn.down"]
    for p in held.projections:
        assert np.array_equal(read(held, p), apart[p.role]), p.role


def test_fused_tensors_are_shared_among_ranks(tmp_path):
    apart = fused(tmp_path / "c", "nvfp4")
    halves = [open_checkpoint(tmp_path / "c", tensor_parallel=(rank, 2)) for rank in (0, 1)]
    for mine in zip(*(h.projections for h in halves), strict=True):
        axis = 1 if mine[0].role in ("attn.o", "ffn.down") else 0
        whole = np.concatenate([read(h, p) for h, p in zip(halves, mine, strict=True)], axis)
        assert np.array_equal(whole, apart[mine[0].role])


def test_fused_tensors_that_no_tile_divides(tmp_path):
    fused(tmp_path / "c", "fp8", num_key_value_heads=1)  # 64 rows of k, 64 of v in one tile
    said = (
        "layers.0.attn.k: model.layers.0.self_attn.qkv_proj.weight: found a cut at row 320, expected one at a multiple "
    )
    with pytest.raises(CheckpointError, match=re.escape(said + "of 128, a boundary of the tiles of its scales")):
        open_checkpoint(tmp_path / "c")


CONFIGS = [
    ("tiny-llama", {"num_local_experts": 8}, "num_local_experts: found 8, expected none: no mixture of "
     "experts is supported"),
    ("tiny-qwen3", {"num_experts": 128}, "num_experts: found 128, expected none: no mixture of experts is supported"),
    ("tiny", {"num_experts": 256}, "num_experts: found 256, expected none: no mixture of experts is supported"),
    ("tiny-gemma", {"enable_moe_block": True}, "enable_moe_block: found True, expected false: no mixture of experts is "
     "supported"),
    ("tiny-qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types[1]: found 'linear_attention', "
     "expected full_attention or sliding_attention"),
    ("tiny-llama", {"layer_types": 3}, "layer_types: found 3, expected a list"),
    ("tiny-gemma", {"layer_types": ["full_attention"]}, "layer_types: found 1 entries, expected 6"),
    ("tiny-llama", {"hidden_act": "relu"}, "hidden_act: found 'relu', expected silu or swish or gelu_pytorch_tanh"),
    ("tiny", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: found 'gelu_pytorch_tanh', expected silu"),
    ("tiny", {"swiglu_limit": -7}, "swiglu_limit: found -7, expected a number from 0 to 1e+38"),
    ("tiny-llama", {"swiglu_limit": True}, "swiglu_limit: found True, expected a number from 0 to 1e+38"),
    ("tiny-gemma", {"swiglu_limit": 1e39}, "swiglu_limit: found 1e+39, expected a number from 0 to 1e+38"),
    ("tiny-llama", {"intermediate_size": None}, "intermediate_size: missing, expected an integer of 1 or more"),
    ("tiny-llama", {"num_key_value_heads": 3}, "num_attention_heads: found 4, expected a multiple of the 3 of "
     "num_key_value_heads"),
    ("tiny-llama", {"head_dim": "64"}, "head_dim: found '64', expected an integer of 1 or more"),
    ("tiny-llama", {"num_hidden_layers": 20_000}, "num_hidden_layers: found 20000, expected at most 10000"),
    ("tiny-llama", {"vocab_size": -1}, "vocab_size: found -1, expected an integer of 1 or more"),
    ("tiny-llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: found 1, expected true or false"),
    ("tiny-gemma", {"num_global_key_value_heads": 3}, "num_attention_heads: found 4, expected a multiple of the 3 "
     "KV heads"),
    ("tiny-gemma", {"attention_k_eq_v": 2}, "attention_k_eq_v: found 2, expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "sentence"), CONFIGS)
def test_configs_refused(name, changes, sentence):
    family, config = model(name)
    config = dict(config)
    if "text_config" in config:
        config["text_config"] = config["text_config"] | changes
    else:
        config |= changes
    with pytest.raises(CheckpointError, match="^" + re.escape(f"config.json: {sentence}") + "$"):
        family.layout(config)


def test_sizes_that_are_unset():
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }  # fmt: skip
    layout = LLAMA.layout(config)
    assert layout.layers[0].mixer == Attention(4, 4, 64)
    assert layout.head is None
    assert [o.role for o in layout.others] == ["norm"]


def tensors_of(name, **overrides):
    family, config = model(name, **overrides)
    layout = family.layout(config)
    root = layout.prefixes[0]
    held = {}
    for i, layer in enumerate(layout.layers):
        for w in layer.weights:
            t = f"{layout.module(root, i, w)}.weight"
            held[t] = Tensor("bf16", (w.n, w.k), t)
    held |= {n: Tensor("bf16", o.shape, n) for _, o, n in layout.named_others(root)}
    return family, config, held


def test_experts_where_an_ffn_should_be():
    family, config, held = tensors_of("tiny-llama")
    expert = "model.layers.1.mlp.experts.gate_up_proj"
    held[expert] = held.pop("model.layers.1.mlp.gate_proj.weight")
    sentence = (
        f"{expert}: found an expert, expected model.layers.1.mlp.gate_proj.weight: no layer of experts is supported"
    )
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        family.sites(config, held)


@pytest.mark.parametrize(
    ("name", "t", "sentence"),
    [
        ("self_attn.q_proj.bias", ("bf16", (256,)), "found a bias, expected none in this family"),
        ("mlp.up_proj.weight", ("bf16", (384, 128)), "found a weight [384, 128], expected [384, 256] by config.json "
         "for layers.0.ffn.up"),
        ("input_layernorm.weight", ("bf16", (128,)), "found shape [128], expected [256] by config.json for "
         "layers.0.norm.input"),
        ("input_layernorm.weight", ("i8", (256,)), "found dtype i8, expected one of bf16, f16, f32 for "
         "layers.0.norm.input"),
    ],
)  # fmt: skip
def test_tensors_refused(name, t, sentence):
    family, config, held = tensors_of("tiny-llama")
    full = f"model.layers.0.{name}"
    held[full] = Tensor(*t, full)
    method = family.parameters if "norm" in name else family.sites
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{full}: {sentence}") + "$"):
        method(config, held)


@pytest.mark.parametrize("layer", ["2", "07", "1" * 30, "\u0662"])
def test_a_layer_that_the_model_has_not(layer):
    family, config, held = tensors_of("tiny-llama")
    name = f"model.layers.{layer}.mlp.gate_proj.weight"
    held[name] = Tensor("bf16", (384, 256), name)
    sentence = f"{name}: found a tensor of layer {layer}, expected layers 0 to 1 by config.json: num_hidden_layers"
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        family.sites(config, held)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.weight_packed", "model.embed_tokens.weight"])
def test_a_vocabulary_that_config_does_not_have(name):
    family, config, held = tensors_of("tiny-llama")
    del config["vocab_size"]
    rest = {t: x for t, x in held.items() if ".layers." in t}
    assert len(family.sites(config, rest)) == 8
    sentence = f"config.json: vocab_size: missing, expected the rows of {name}"
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        family.sites(config, rest | {name: Tensor("bf16", (512, 256), name)})


def test_what_is_missing_is_listed():
    family, config, held = tensors_of("tiny-llama")
    assert family.missing(config, held) == ["lm_head.weight"]
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"):
        del held[name]
    assert family.missing(config, held) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "lm_head.weight",
    ]
    assert family.missing(config | {"atlas_lab_part": {"layers": [0], "roles": ["attn.q"]}}, held) == []


def test_a_stored_head_comes_before_the_embedding():
    family, config, held = tensors_of("tiny-qwen3")
    assert family.sites(config, held)[-1].projections[0].weight["weight"].name == "model.embed_tokens.weight"
    held["lm_head.weight"] = Tensor("bf16", (512, 256), "lm_head.weight")
    assert family.sites(config, held)[-1].projections[0].weight["weight"].name == "lm_head.weight"
    held["lm_head.weight"] = Tensor("bf16", (500, 256), "lm_head.weight")
    with pytest.raises(CheckpointError, match=re.escape("expected [512, 256] by config.json for lm_head")):
        family.sites(config, held)


def test_an_embedding_in_a_form_of_its_own():
    family, config, held = tensors_of("tiny-llama")
    name = "model.embed_tokens.weight"
    held[name] = Tensor("e4m3", (512, 256), name)
    assert next(p for p in family.parameters(config, held) if p.role == "embed").tensor.dtype == "e4m3"
    held[f"{name}_scale"] = Tensor("bf16", (4, 2), f"{name}_scale")
    assert [(p.tensor.name, p.dtype) for p in family.parameters(config, held) if p.role == "embed"] == [
        (name, "e4m3"),
        (f"{name}_scale", "bf16"),
    ]
    held[name] = Tensor("e4m3", (500, 256), name)
    with pytest.raises(CheckpointError, match=f"{name}: found 500 rows, expected 512 by config.json for embed"):
        family.parameters(config, held)


class Minimal:
    """A family that says no more than `ModelFamily` asks."""

    family = "minimal"

    def matches(self, config):
        return config["model_type"] == "llama"

    def dims(self, config):
        return LLAMA.dims(config)

    def sites(self, config, tensors):
        return LLAMA.sites(config, tensors)

    def meaning(self, name):
        return "other"


def test_a_family_without_a_layout(tmp_path):
    new(tmp_path / "c", size="tiny-llama")
    held = open_checkpoint(tmp_path / "c", {"minimal": Minimal()})
    assert (held.family, held.layout, held.parameters, held.missing) == ("minimal", None, (), ())
    assert len(held.unused) == len(held.unread) == 6
    half = open_checkpoint(tmp_path / "c", {"minimal": Minimal()}, tensor_parallel=(1, 2))
    assert [(p.n, p.k) for p in half.sites[0].projections] == [(128, 256), (64, 256), (64, 256)]


def test_models_by_name():
    assert {model(n)[0].family for n in presets.NAMES} == {"qwen3.5", "qwen3", "llama", "gemma"}
    assert model("tiny-gemma", layers=8)[1]["text_config"]["layer_types"][5:] == [
        "full_attention", "sliding_attention", "sliding_attention"]  # fmt: skip
    for call, sentence in (
        (lambda: model("lama-3-8b"), "model: found 'lama-3-8b', expected one of .*; did you mean llama-3-8b?"),
        (lambda: model("llama-3-8b", heads=3), "model llama-3-8b: found 'heads', expected one of layers, hidden, "),
        (lambda: model("llama-3-8b", layers=0), "config.json: num_hidden_layers: found 0, expected an integer of 1 "),
        (lambda: model("tiny-gemma", layers="2"), "config.json: num_hidden_layers: found '2', expected an integer of "),
    ):
        with pytest.raises(CheckpointError, match="^" + sentence.replace("?", r"\?")):
            call()


def test_towers_are_reported_as_unused(tmp_path):
    new(tmp_path / "c", layers=1, prediction=1)
    store = Store.open(tmp_path / "c")
    extra = Tensor("bf16", (8, 8), "model.visual.blocks.0.attn.qkv.weight")
    groups = [Group((t,), lambda t=t: {t.name: store.read(t.name)}) for t in store.tensors.values()]
    groups.append(Group((extra,), lambda: {extra.name: np.zeros((8, 8), ml_dtypes.bfloat16)}))
    (tmp_path / "v").mkdir()
    write_files(tmp_path / "v", groups, {})
    write_json(tmp_path / "v" / "config.json", dict(store.config))
    shown = show(tmp_path / "v", verify=True)
    notes = Counter()
    unused = {t.name for t in shown.checkpoint.unused}
    for d in shown.rows:
        if d.tensor.name in unused:
            notes[d.note] += d.tensor.bytes
    assert notes["vision tower, not used"] == 128
    assert set(notes) == {"vision tower, not used", "multi-token prediction, not used"}
    assert shown.faults == ()
