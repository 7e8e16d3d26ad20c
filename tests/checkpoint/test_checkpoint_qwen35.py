"""The dense Qwen3.5 family: sizes, names and shapes of real releases, and what is refused by name."""

import re

import pytest

from atlas_lab.checkpoint import SIZES, CheckpointError, Sizes, sizes, synthetic_sites
from atlas_lab.checkpoint.qwen35 import PART, QWEN35, auxiliary, selected
from atlas_lab.core.tensor import Tensor

P = "model.language_model.layers."

# Tensors of a layer of each kind in the BF16 release of the 27B, by their published names.
FFN_27B = {"mlp.gate_proj": (17408, 5120), "mlp.up_proj": (17408, 5120), "mlp.down_proj": (5120, 17408)}
GDN_27B = {
    "linear_attn.in_proj_qkv": (10240, 5120),
    "linear_attn.in_proj_z": (6144, 5120),
    "linear_attn.in_proj_b": (48, 5120),
    "linear_attn.in_proj_a": (48, 5120),
    "linear_attn.out_proj": (5120, 6144),
}
ATTENTION_27B = {
    "self_attn.q_proj": (12288, 5120),
    "self_attn.k_proj": (1024, 5120),
    "self_attn.v_proj": (1024, 5120),
    "self_attn.o_proj": (5120, 6144),
}
NORMS_27B = {"input_layernorm.weight": (5120,), "post_attention_layernorm.weight": (5120,)}


def tensors_of(sites):
    return {t.name: t for s in sites for p in s.projections for t in p.weight.tensors.values()}


def test_names_and_shapes_of_the_27b():
    found = {name: t.shape for name, t in tensors_of(synthetic_sites(SIZES["qwen3.5-27b"], "bf16")).items()}
    wanted = {}
    for i in range(64):
        modules = FFN_27B | (GDN_27B if (i + 1) % 4 else ATTENTION_27B)
        wanted |= {f"{P}{i}.{m}.weight": shape for m, shape in modules.items()}
    wanted["lm_head.weight"] = (248320, 5120)
    assert found == wanted
    assert sum(f"{P}{i}.self_attn.q_proj.weight" in found for i in range(64)) == 16


def test_other_tensors_of_the_27b():
    s = SIZES["qwen3.6-27b"]
    assert auxiliary(s, 0) == NORMS_27B | {
        "linear_attn.conv1d.weight": (10240, 1, 4),
        "linear_attn.A_log": (48,),
        "linear_attn.dt_bias": (48,),
        "linear_attn.norm.weight": (128,),
    }
    assert auxiliary(s, 3) == NORMS_27B | {"self_attn.q_norm.weight": (256,), "self_attn.k_norm.weight": (256,)}
    # 851 in the text part of the release: these, the embedding and the last norm.
    total = len(tensors_of(synthetic_sites(s, "bf16"))) + sum(len(auxiliary(s, i)) for i in range(64))
    assert total == 851 - 2


def test_an_fp8_release_stores_bf16_scales():
    t = tensors_of(synthetic_sites(SIZES["qwen3.5-27b"], "fp8", [0]))
    name = f"{P}0.linear_attn.in_proj_qkv.weight"
    assert (t[name], t[f"{name}_scale_inv"]) == (
        Tensor("e4m3", (10240, 5120), name),
        Tensor("bf16", (80, 40), f"{name}_scale_inv"),
    )
    assert t[f"{P}0.linear_attn.in_proj_a.weight"].dtype == "bf16"


def test_modules_quantized_in_the_nvfp4_release():
    sites = synthetic_sites(SIZES["qwen3.6-27b"], "nvfp4")
    quantized = [p for s in sites for p in s.projections if p.weight.format == "nvfp4"]
    assert len(quantized) == 401 - 1  # all of them but the output head
    gate = sites[2].projections[0].weight
    assert [str(t) for t in gate.tensors.values()] == [
        f"{P}0.mlp.gate_proj.weight: u8[17408, 2560]",
        f"{P}0.mlp.gate_proj.weight_scale: e4m3[17408, 320]",
        f"{P}0.mlp.gate_proj.weight_scale_2: f32[]",
    ]
    ffn = [p for s in sites for p in s.projections if p.role.startswith("ffn")]
    assert round(sum(p.weight.bytes for p in ffn) / 1e9, 2) == 9.63


def test_sites_in_order():
    s = SIZES["tiny"]
    assert [site.label for site in synthetic_sites(s, "bf16", [0, 3])] == [
        "layers.0.gdn.qkv+gdn.z+gdn.b+gdn.a",
        "layers.0.gdn.out",
        "layers.0.ffn.gate+ffn.up",
        "layers.0.ffn.down",
        "layers.3.attn.q+attn.k+attn.v",
        "layers.3.attn.o",
        "layers.3.ffn.gate+ffn.up",
        "layers.3.ffn.down",
    ]


@pytest.mark.parametrize(
    ("name", "hidden", "intermediate", "layers", "attention", "q", "qkv", "kv_bytes"),
    [
        ("qwen3.5-27b", 5120, 17408, 64, 16, 12288, 10240, 65536),
        ("qwen3.5-9b", 4096, 12288, 32, 8, 8192, 8192, 32768),
        ("qwen3.5-4b", 2560, 9216, 32, 8, 8192, 8192, 32768),
        ("qwen3.5-2b", 2048, 6144, 24, 6, 4096, 6144, 12288),
        ("qwen3.5-0.8b", 1024, 3584, 24, 6, 4096, 6144, 12288),
    ],
)
def test_sizes_of_releases(name, hidden, intermediate, layers, attention, q, qkv, kv_bytes):
    s = SIZES[name]
    d = s.dims
    assert (d.hidden, d.intermediate, d.layers, d.attention_layers) == (hidden, intermediate, layers, attention)
    assert (s.shapes["attn.q"][0], s.shapes["gdn.qkv"][0]) == (q, qkv)
    assert d.kv_bytes_per_token(2) == kv_bytes
    assert d.family == "qwen3.5"


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text_only", [False, True])
def test_config_and_back(name, text_only):
    s = SIZES[name]
    config = s.config(text_only=text_only)
    assert QWEN35.matches(config)
    assert QWEN35.dims(config) == s.dims
    assert Sizes.of(config).shapes == s.shapes
    assert [Sizes.of(config).kind(i) for i in range(s.layers)] == [s.kind(i) for i in range(s.layers)]


@pytest.mark.parametrize("text_only", [False, True])
def test_sites_are_found_among_tensors(text_only):
    sites = synthetic_sites(SIZES["tiny"], "nvfp4_ct", text_only=text_only)
    tensors = tensors_of(sites)
    assert all(name.startswith("model.layers." if text_only else P) for name in tensors if name != "lm_head.weight")
    others = {n: Tensor("bf16", (1,), n) for n in ("mtp.layers.0.mlp.gate_proj.weight", "model.visual.a", "head.b")}
    assert QWEN35.sites(SIZES["tiny"].config(), tensors | others) == sites


def test_formats_may_be_mixed():
    s = SIZES["tiny"]
    by_format = {f: tensors_of(synthetic_sites(s, f)) for f in ("bf16", "fp8", "nvfp4", "nvfp4_ct")}
    mixed = {}
    for i, tensors in enumerate(by_format.values()):
        mixed |= {n: t for n, t in tensors.items() if n.startswith(f"{P}{i}.")}
    sites = QWEN35.sites(s.config(), mixed)
    assert [next(x for x in sites if x.layer == i)[role].weight.format for i, role in enumerate(
        ("gdn.qkv", "gdn.qkv", "gdn.qkv", "attn.q"))] == list(by_format)  # fmt: skip


def test_without_an_output_gate():
    assert sizes("qwen3.5-27b", output_gate=False).shapes["attn.q"] == (6144, 5120)
    assert Sizes.of(sizes(output_gate=False).config()).shapes["attn.q"] == (6144, 5120)


def test_layer_types_come_before_the_interval():
    config = SIZES["tiny"].config()
    config["text_config"]["layer_types"] = ["full_attention", "linear_attention"] * 2
    assert QWEN35.dims(config).attention_layers == 2
    del config["text_config"]["layer_types"]
    config["text_config"]["full_attention_interval"] = 2
    assert QWEN35.dims(config).attention_layers == 2


def test_the_width_of_a_config_that_names_an_expert_s():
    config = SIZES["tiny"].config()
    config["text_config"]["moe_intermediate_size"] = 512
    assert Sizes.of(config).intermediate == 384
    del config["text_config"]["intermediate_size"]
    assert Sizes.of(config).intermediate == 512


def test_other_families():
    assert not QWEN35.matches({"model_type": "qwen3_5_moe"})
    assert not QWEN35.matches({})


CONFIGS = [
    ({"hidden_size": None}, "config.json: hidden_size: missing, expected an integer of 1 or more"),
    ({"hidden_size": "5120"}, "config.json: hidden_size: found '5120', expected an integer of 1 or more"),
    ({"intermediate_size": 0}, "config.json: intermediate_size: found 0, expected an integer of 1 or more"),
    ({"head_dim": True}, "config.json: head_dim: found True, expected an integer of 1 or more"),
    ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers: found 1000000000, expected at most 10000"),
    (
        {"num_attention_heads": 5},
        "config.json: num_attention_heads: found 5, expected a multiple of the 2 of num_key_value_heads",
    ),
    ({"attn_output_gate": 0}, "config.json: attn_output_gate: found 0, expected true or false"),
    ({"layer_types": ["full_attention"]}, "config.json: layer_types: found 1 entries, expected 4"),
    (
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        "config.json: layer_types[3]: found 'sliding_attention', expected full_attention or linear_attention",
    ),
    ({"layer_types": "full_attention"}, "config.json: layer_types: found 'full_attention', expected a list"),
    (
        {"layer_types": [], "full_attention_interval": 0},
        "config.json: full_attention_interval: found 0, expected an integer of 1 or more",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), CONFIGS)
def test_config_refused(changes, sentence):
    config = SIZES["tiny"].config()
    config["text_config"] |= changes
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        QWEN35.dims(config)


def test_text_config_that_is_no_object():
    with pytest.raises(CheckpointError, match=r"^config\.json: text_config: found 3, expected an object$"):
        QWEN35.dims({"text_config": 3})


def sites_of(changed, drop=(), config=None):
    tensors = tensors_of(synthetic_sites(SIZES["tiny"], "bf16"))
    tensors |= {t.name: t for t in changed}
    return QWEN35.sites(config or SIZES["tiny"].config(), {n: t for n, t in tensors.items() if n not in drop})


GATE = f"{P}0.mlp.gate_proj"

TENSORS = [
    ([], [f"{GATE}.weight"], f"{GATE}.weight: missing, expected the [384, 256] weight of layers.0.ffn.gate"),
    (
        [],
        [f"{P}3.self_attn.q_proj.weight"],
        f"{P}3.self_attn.q_proj.weight: missing, expected the [512, 256] weight of layers.3.attn.q of a "
        "full_attention layer",
    ),
    (
        [Tensor("bf16", (384, 128), f"{GATE}.weight")],
        [],
        f"{GATE}.weight: found a weight [384, 128], expected [384, 256] by config.json for layers.0.ffn.gate",
    ),
    (
        [Tensor("bf16", (384,), f"{GATE}.bias")],
        [],
        f"{GATE}.bias: found a bias, expected none in this family",
    ),
    (
        [Tensor("i32", (384, 32), f"{GATE}.weight")],
        [],
        f"{GATE}.weight: found dtype i32, expected one of bf16, e4m3, u8",
    ),
    (
        [Tensor("bf16", (4, 4), "model.layers.0.mlp.gate_proj.weight")],
        [],
        f"found {P}* and model.layers.*, expected tensors named {P}* or model.layers.*",
    ),
]


@pytest.mark.parametrize(("changed", "drop", "sentence"), TENSORS)
def test_tensors_refused(changed, drop, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        sites_of(changed, drop)


def test_no_tensor_of_a_layer():
    with pytest.raises(CheckpointError, match=r"^found no tensor of a layer, expected tensors named "):
        QWEN35.sites(SIZES["tiny"].config(), {"lm_head.weight": Tensor("bf16", (4, 4), "lm_head.weight")})


def test_a_packed_weight_is_measured_in_weights():
    s = SIZES["tiny"]
    tensors = tensors_of(synthetic_sites(s, "nvfp4"))
    for name, dtype, width in ((".weight", "u8", 64), (".weight_scale", "e4m3", 8)):
        tensors[GATE + name] = Tensor(dtype, (384, width), GATE + name)
    with pytest.raises(CheckpointError, match=re.escape("found a weight [384, 128], expected [384, 256] by config")):
        QWEN35.sites(s.config(), tensors)


def test_part_of_a_model_is_declared():
    s = SIZES["tiny"]
    sites = synthetic_sites(s, "bf16", [1], ["ffn.*"])
    tensors = tensors_of(sites)
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.in_proj_qkv\.weight: missing"):
        QWEN35.sites(s.config(), tensors)
    part = {"layers": [1], "roles": ["ffn.gate", "ffn.up", "ffn.down"]}
    assert QWEN35.sites(s.config() | {PART: part}, tensors) == sites
    for wrong in (3, {}, {"layers": [1], "roles": [4]}, {"layers": "1", "roles": []}):
        with pytest.raises(CheckpointError, match=f"^config.json: {PART}: found .*, expected lists of layers and"):
            QWEN35.sites(s.config() | {PART: wrong}, tensors)


@pytest.mark.parametrize(
    ("layers", "roles", "sentence"),
    [
        ([4], None, "layers: found 4, expected 0 to 3"),
        ([-1], None, "layers: found -1, expected 0 to 3"),
        ([0], ["attn.*"], "roles: found 'attn.*', expected some of ffn.down, ffn.gate, ffn.up, gdn.a, gdn.b, gdn.out, "
         "gdn.qkv, gdn.z"),
        (None, ["ffn.gates"], "roles: found 'ffn.gates', expected some of attn.k, attn.o, attn.q, attn.v, ffn.down, "
         "ffn.gate, ffn.up, gdn.a, gdn.b, gdn.out, gdn.qkv, gdn.z"),
    ],
)  # fmt: skip
def test_selection_refused(layers, roles, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        selected(SIZES["tiny"], layers, roles)


def test_selection():
    s = SIZES["tiny"]
    assert selected(s, [3, 0, 3], ["ffn.gate", "*.o*"]) == [
        (0, ("gdn.out",)),
        (0, ("ffn.gate",)),
        (3, ("attn.o",)),
        (3, ("ffn.gate",)),
    ]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sizes("qwen3.5-72b"), "size: found 'qwen3.5-72b', expected one of qwen3.5-27b, qwen3.6-27b, "
         "qwen3.5-9b, qwen3.5-4b, qwen3.5-2b, qwen3.5-0.8b, tiny; did you mean qwen3.5-2b?"),
        (lambda: sizes(hiden=1), "size: found 'hiden', expected one of hidden, intermediate, layers, heads, kv_heads, "
         "key_heads, value_heads, head_dim, key_head_dim, value_head_dim, conv, interval, output_gate, layer_types, "
         "vocab, tied, prediction, activation_limit; did you mean hidden?"),
        (lambda: sizes(hidden=0), "hidden_size: found 0, expected an integer of 1 or more"),
        (lambda: synthetic_sites(SIZES["tiny"], "int8"), "format: found 'int8', expected one of bf16, fp8, fp8_tensor, "
         "fp8_row, nvfp4, nvfp4_ct, q8_0, q4_k, q6_k, q2_0_g64, q2_0_g128, block_nvfp4"),
        (lambda: synthetic_sites(SIZES["tiny"], "fp8", producer="x"), "producer of fp8: found 'x', expected one of "
         "qwen, deepseek, compressed-tensors"),
        (lambda: synthetic_sites(sizes("tiny", hidden=264), "nvfp4"), f"{P}0.linear_attn.in_proj_qkv: nvfp4: found "
         "K = 264 in a weight [512, 264], expected a multiple of 16"),
    ],
)  # fmt: skip
def test_requests_refused(call, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        call()
