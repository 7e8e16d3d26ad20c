"""Quantization configs of every producer against tensors: which agree, and the sentence for each that does not."""

from __future__ import annotations

import json
import re

import pytest
from checkpoint_files import handles

from atlas_lab.checkpoint import CheckpointError, quantization, recognise

P = "model.language_model.layers.3."
TEXT = "model.layers.3."

# What follows a module's name, with dtypes and shapes, for a weight [256, 512].
STORED = {
    "bf16": (".weight bf16 256 512",),
    "fp8": (".weight e4m3 256 512", ".weight_scale_inv bf16 2 4"),
    "fp8_row": (".weight e4m3 256 512", ".weight_scale f32 256 1"),
    "fp8_tensor": (".weight e4m3 256 512", ".weight_scale f32", ".input_scale f32"),
    "nvfp4": (".weight u8 256 256", ".weight_scale e4m3 256 32", ".weight_scale_2 f32", ".input_scale f32"),
    "nvfp4_ct": (".weight_packed u8 256 256", ".weight_scale e4m3 256 32", ".weight_global_scale f32 1"),
}


def weight(module, form):
    w = recognise(handles(*(module + after for after in STORED[form])), module)
    assert w.format == form
    return w


def check(config, forms, prefix=P, shape=(256, 512), hf=None, tmp_path=None):
    """Read a config and hold it against weights: `forms` by module's end; the others are not there."""
    if hf is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf))
    weights = {prefix + m: weight(prefix + m, form) for m, form in forms.items()}
    names = [t.name for w in weights.values() for t in w.tensors.values()]
    configs = quantization.read(config, tmp_path, names)
    for w in weights.values():
        quantization.agree(configs, w, shape)


def ct(*groups, ignore=(), **more):
    """A compressed-tensors config: groups as (targets, weights)."""
    return {"quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{i}": {"targets": list(t), "weights": w, "input_activations": None}
                          for i, (t, w) in enumerate(groups)},
        "ignore": list(ignore), **more,
    }}  # fmt: skip


def opt(**fields):
    return {"quantization_config": {"quant_method": "modelopt", **fields}}


def fine(skip=None, **more):
    return {"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": skip, **more,
    }}  # fmt: skip


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj")
GDN = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")


def each(**forms):
    named = {"mlp": MLP, "attn": ATTN, "gdn": GDN, "b": ("linear_attn.in_proj_b",), "q": ATTN[:1], "gate": MLP[:1],
             "down": MLP[2:], "k": ATTN[1:2], "up": MLP[1:2], "o": ATTN[2:], "z": GDN[1:]}  # fmt: skip
    return {m: form for name, form in forms.items() for m in named[name]}


AGREE = {
    "no config": ({}, each(mlp="nvfp4", attn="fp8", gdn="bf16")),
    "null": ({"quantization_config": None}, each(mlp="nvfp4_ct")),
    "ct, one scheme": (ct((["Linear"], NVFP4), ignore=["lm_head", P + "linear_attn.in_proj_b"]),
                       each(mlp="nvfp4_ct", attn="nvfp4_ct", gdn="nvfp4_ct", b="bf16")),
    "ct, block": (ct((["Linear"], BLOCK)), each(mlp="fp8")),
    "ct, block as text": (ct((["Linear"], {**BLOCK, "block_structure": "128x128"})), each(mlp="fp8")),
    "ct, channel": (ct((["Linear"], CHANNEL)), each(mlp="fp8_row")),
    "ct, tensor": (ct((["Linear"], TENSOR)), each(mlp="fp8_tensor")),
    "ct, strategies by default": (
        ct((["re:.*gate_proj"], {"num_bits": 8, "type": "float"}),
           (["re:.*up_proj"], {"num_bits": 8, "type": "float", "group_size": -1}),
           (["re:.*down_proj"], {"num_bits": 4, "type": "float", "group_size": 16})),
        each(gate="fp8_tensor", up="fp8_row", down="nvfp4_ct")),
    "ct, groups by expression": (
        ct((["re:.*mlp.*"], NVFP4), (["re:.*self_attn\\.(q|k|v|o)_proj$", "re:.*in_proj_z"], CHANNEL),
           (["re:.*in_proj_qkv$"], BLOCK)),
        {**each(mlp="nvfp4_ct", attn="fp8_row", z="fp8_row", b="bf16"), GDN[0]: "fp8"}),
    "ct, a name before an expression before a class": (
        ct((["Linear"], NVFP4), (["re:.*proj"], BLOCK), ([P + "mlp.up_proj"], CHANNEL)),
        each(gate="fp8", up="fp8_row")),
    "ct, two expressions": (ct((["re:.*up_proj"], NVFP4), (["re:.*mlp.*"], BLOCK)), each(up="nvfp4_ct", gate="fp8")),
    "ct, ignored by expression": (ct((["Linear"], NVFP4), ignore=["re:.*linear_attn.*", "re:.*\\.q_proj$"]),
                                  each(mlp="nvfp4_ct", gdn="bf16", b="bf16", q="bf16", k="nvfp4_ct")),
    "ct, ignored by names without the prefix": (ct((["Linear"], NVFP4), ignore=["model.layers.3.mlp.down_proj"]),
                                                each(gate="nvfp4_ct", down="bf16")),
    "ct, ignored by fused names": (
        ct((["Linear"], NVFP4), ignore=["model.layers.3.self_attn.qkv_proj", P + "linear_attn.in_proj_qkvz",
                                        "re:.*gate_up_proj"]),
        each(q="bf16", k="bf16", o="nvfp4_ct", gdn="bf16", gate="bf16", up="bf16", down="nvfp4_ct")),
    "ct, targets with another prefix": (ct((["re:^language_model\\.model\\.layers\\.\\d+\\.mlp"], NVFP4)),
                                        each(mlp="nvfp4_ct", attn="bf16")),
    "ct, an expression of its own names is tried on no other": (
        ct((["re:^(?!model\\.language_model\\.layers\\.3\\.mlp).*"], NVFP4)), each(mlp="bf16", attn="nvfp4_ct")),
    "ct, a group of activations alone": (ct((["re:.*self_attn$"], None), (["Linear"], BLOCK)), each(attn="fp8")),
    "ct, a preset": ({"quantization_config": {"quant_method": "compressed-tensors",
                                              "config_groups": {"NVFP4A16": ["re:.*mlp"], "FP8_DYNAMIC": ["Linear"]}}},
                     each(mlp="nvfp4_ct", attn="fp8_row")),
    "ct, Linear ignored": (ct((["Linear"], NVFP4), ignore=["Linear"]), each(mlp="bf16")),
    "ct, nested": ({"text_config": ct((["Linear"], NVFP4))}, each(mlp="nvfp4_ct")),
    "ct, without its method": ({"quantization_config": {"config_groups": {"FP8_BLOCK": ["Linear"]}}}, each(mlp="fp8")),
    "ct, sparsity and transforms that are empty": (ct((["Linear"], BLOCK), sparsity_config={}, transform_config={}),
                                                   each(mlp="fp8")),
    "modelopt": (opt(quant_algo="NVFP4", group_size=16, ignore=["lm_head", P + "linear_attn*"]),
                 each(mlp="nvfp4", attn="nvfp4", gdn="bf16")),
    "modelopt, weights only": (opt(quant_algo="W4A16_NVFP4", ignore=[]), each(mlp="nvfp4")),
    "modelopt, fp8": (opt(quant_algo="FP8"), each(mlp="fp8_tensor")),
    "modelopt, fp8 by channel": (opt(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), each(mlp="fp8_row")),
    "modelopt, fp8 by block": (opt(quant_algo="fp8_pb_wo"), each(mlp="fp8")),
    "modelopt, mixed": (
        opt(quant_algo="MIXED_PRECISION", ignore=["lm_head"], quantized_layers={
            P + "mlp.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "model.layers.3.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.*.self_attn.qkv_proj": {"quant_algo": "FP8"},
            P + "linear_attn.in_proj_qkvz": {"quant_algo": "FP8_PB_WO"}}),
        each(gate="nvfp4", up="bf16", down="nvfp4", q="fp8_tensor", k="fp8_tensor", o="bf16", gdn="fp8", b="bf16")),
    "modelopt, mixed by groups": (
        opt(quant_algo="MIXED_PRECISION", ignore=[], config_groups={
            "group_0": {"targets": [P + m for m in MLP], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
            "group_1": {"targets": [P + m for m in ATTN], "weights": {"num_bits": 8, "type": "float"}}}),
        each(mlp="nvfp4", attn="fp8_tensor", gdn="bf16")),
    "modelopt, exclusion goes before a layer": (
        opt(quantized_layers={P + "mlp.gate_proj": {"quant_algo": "NVFP4"}}, exclude_modules=["*.gate_proj"]),
        each(gate="bf16")),
    "modelopt, part of a name may be excluded": (opt(quant_algo="NVFP4", ignore=["linear_attn", P + "self_attn"]),
                                                 each(gdn="bf16", b="nvfp4", q="bf16", k="nvfp4", mlp="nvfp4")),
    "modelopt, only its cache": (opt(quant_algo=None, kv_cache_quant_algo="FP8"), each(mlp="bf16", attn="bf16")),
    "modelopt, by another name": ({"quantization_config": {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}},
                                  each(mlp="nvfp4")),
    "modelopt, nested and without its method": (
        {"quantization_config": {"quantization": {"quant_algo": "FP8", "exclude_modules": [P + "mlp.up_proj"]}}},
        each(gate="fp8_tensor", up="bf16")),
    "fp8": (fine([P + "linear_attn.in_proj_b", "lm_head"]), each(mlp="fp8", attn="fp8", b="bf16")),
    "fp8, a parent is skipped": (fine(["model.layers.3.self_attn", "visual"]), each(mlp="fp8", attn="bf16")),
    "fp8, an end is skipped": (fine(["gate_proj", "k_proj"]), each(gate="bf16", up="fp8", k="bf16", q="fp8")),
    "fp8, an expression is skipped": (fine(["model.language_model.layers.*.(mlp|self_attn).(gate|q)_proj"]),
                                      each(gate="bf16", up="fp8", q="bf16", k="fp8")),
    "fp8, no part of a name is skipped": (fine(["model.language_model.layers.3.mlp.gate", "layers.3.ml"]),
                                          each(mlp="fp8")),
    "fp8, one scale": (fine(weight_block_size=None), each(mlp="fp8_tensor")),
    "fp8, no word on its scales": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["q_proj"]}},
        each(mlp="fp8_tensor", q="bf16", k="fp8")),
    "fp8 by row": ({"quantization_config": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["o_proj"]}},
                   each(mlp="fp8_row", o="bf16")),
}  # fmt: skip


@pytest.mark.parametrize("case", AGREE)
def test_agree(case):
    check(*AGREE[case])


# These two say what they say of names under `model.language_model.` alone.
@pytest.mark.parametrize("case", [c for c in AGREE if "own names" not in c and "expression is skipped" not in c])
def test_agree_on_a_text_only_export(case):
    """Whose names have not the prefix that the config's have, or some of them."""
    check(*AGREE[case], TEXT)


def test_what_engines_take_for_no_linear_module_may_be_bf16():
    for config in (ct((["Linear"], NVFP4)), opt(quant_algo="NVFP4"), fine()):
        for module in ("lm_head", "model.language_model.embed_tokens", "mtp.layers.0.mlp.up_proj"):
            check(config, {module: "bf16"}, prefix="")
    with pytest.raises(CheckpointError, match=r"^lm_head\.weight: found FP8 "):
        check(ct((["Linear"], NVFP4)), {"lm_head": "fp8"}, prefix="")


def test_weights_that_tiles_do_not_divide_stay_as_they_were():
    check(fine(), each(b="bf16"), shape=(48, 512))
    check(fine(), each(b="fp8"), shape=(48, 512))
    with pytest.raises(CheckpointError):
        check(fine(), each(b="bf16"))


def test_one_scale_is_tile_row_and_tensor_alike():
    def agree(config, shape, *scale):
        n, k = shape
        w = recognise(handles(f"m.weight e4m3 {n} {k}", " ".join(map(str, ("m.weight_scale f32", *scale)))), "m")
        quantization.agree(quantization.read(config, None, ["m.weight"]), w, shape)

    for strategy in (BLOCK, TENSOR):
        for scale in ((1, 1), (1,), ()):
            agree(ct((["Linear"], strategy)), (64, 128), *scale)
    for strategy in (BLOCK, CHANNEL, TENSOR):
        agree(ct((["Linear"], strategy)), (1, 128), 1, 1)
    for config, shape, scale in (
        (ct((["Linear"], CHANNEL)), (64, 128), (1, 1)),
        (ct((["Linear"], BLOCK)), (64, 256), (1,)),
        (ct((["Linear"], TENSOR)), (64, 256), (1, 2)),
        (ct((["Linear"], TENSOR)), (300, 128), (300, 1)),
    ):
        with pytest.raises(CheckpointError):
            agree(config, shape, *scale)


Q = "config.json: quantization_config"
G0, G1 = (f"{Q}.config_groups.group_{i}.targets[0]" for i in range(2))
METHODS = "expected one of compressed-tensors, fp8, fbgemm_fp8, modelopt"
GRAMMAR = "expected a regular expression of characters, classes, groups and repeats"
FOUND = {
    "bf16": "weight: found BF16 (bf16[256, 512])",
    "fp8": "weight: found FP8 under 128x128 tiles (e4m3[256, 512] with bf16[2, 4] weight_scale_inv)",
    "fp8_row": "weight: found FP8 under a scale a row (e4m3[256, 512] with f32[256, 1] weight_scale)",
    "fp8_tensor": "weight: found FP8 under one scale (e4m3[256, 512] with f32[] weight_scale)",
    "nvfp4": "weight: found ModelOpt NVFP4 (u8[256, 256] with e4m3[256, 32] weight_scale and f32[] weight_scale_2)",
    "nvfp4_ct": "weight_packed: found compressed-tensors NVFP4 (u8[256, 256] with e4m3[256, 32] weight_scale and "
    "f32[1] weight_global_scale)",
}
DISAGREE = [
    (ct((["Linear"], NVFP4)), each(gate="bf16"),
     f"compressed-tensors NVFP4 by {G0} ('Linear')"),
    (ct((["Linear"], NVFP4), ignore=["x", "re:.*gate.*"]), each(gate="nvfp4_ct"),
     f"BF16 by {Q}.ignore[1] ('re:.*gate.*')"),
    (ct((["Linear"], NVFP4), ignore=["model.layers.3.mlp.gate_up_proj"]), each(gate="nvfp4_ct"),
     f"BF16 by {Q}.ignore[0] ('model.layers.3.mlp.gate_up_proj')"),
    (ct((["Linear"], NVFP4)), each(gate="nvfp4"),
     f"compressed-tensors NVFP4 by {G0} ('Linear')"),
    (ct((["Linear"], CHANNEL)), each(gate="fp8"),
     f"FP8 under a scale a row by {G0} ('Linear')"),
    (ct((["Linear"], {**BLOCK, "block_structure": [64, 64]})), each(gate="fp8"),
     f"float8, block [64, 64] by {G0} ('Linear')"),
    (ct((["Linear"], INT4)), each(gate="bf16"), f"int4, group of 128 by {G0} ('Linear')"),
    (ct((["Linear"], {"num_bits": 4, "type": "float", "group_size": 32})), each(gate="nvfp4_ct"),
     f"MXFP4 by {G0} ('Linear')"),
    (ct((["re:.*q_proj"], NVFP4)), each(gate="nvfp4_ct"), f"BF16 by {Q}.config_groups (no target is this module)"),
    (ct((["re:.*gate_proj"], NVFP4), (["re:.*mlp"], BLOCK), (["re:.*"], BLOCK)), each(gate="bf16"),
     f"compressed-tensors NVFP4 by {G0} ('re:.*gate_proj') or FP8 under "
     f"128x128 tiles by {G1} ('re:.*mlp')"),
    (opt(quant_algo="NVFP4", ignore=["*.gate_proj"]), each(gate="nvfp4"), f"BF16 by {Q}.ignore[0] ('*.gate_proj')"),
    (opt(quant_algo="NVFP4", ignore=["mlp"]), each(gate="fp8"),
     f"ModelOpt NVFP4 by {Q}.quant_algo ('NVFP4') or BF16 by {Q}.ignore[0] ('mlp')"),
    (opt(quant_algo="NVFP4", group_size=32), each(gate="nvfp4"),
     f"NVFP4 in groups of 32 by {Q}.quant_algo ('NVFP4')"),
    (opt(quant_algo="W4A16_AWQ"), each(gate="nvfp4"), f"W4A16_AWQ by {Q}.quant_algo ('W4A16_AWQ')"),
    (opt(quant_algo="FP8"), each(gate="fp8_row"), f"FP8 under one scale by {Q}.quant_algo ('FP8')"),
    (opt(quantized_layers={P + "mlp.gate_proj": {"quant_algo": "FP8"}}), each(gate="nvfp4"),
     f"FP8 under one scale by {Q}.quantized_layers.{P}mlp.gate_proj"),
    (opt(quantized_layers={P + "mlp.up_proj": {"quant_algo": "FP8"}}), each(gate="fp8_tensor"),
     f"BF16 by {Q}.quantized_layers (this module is not there)"),
    (fine(), each(gate="bf16"), f"FP8 under 128x128 tiles by {Q}.weight_block_size"),
    (fine(["mlp.gate_proj"]), each(gate="fp8"), f"BF16 by {Q}.modules_to_not_convert[0] ('mlp.gate_proj')"),
    (fine(weight_block_size=None), each(gate="fp8"), f"FP8 under one scale by {Q}.weight_block_size (null)"),
    (fine(weight_block_size=[128, 64]), each(gate="fp8"), f"FP8 under 128x64 tiles by {Q}.weight_block_size"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "forms", "expected"), DISAGREE)
def test_disagree(config, forms, expected):
    ((module, form),) = forms.items()
    sentence = f"{P}{module}.{FOUND[form]}, expected {expected}"
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        check(config, forms)


HF = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*.q_proj"]}}


def test_both_files_are_held_against_the_tensors(tmp_path):
    forms = each(mlp="nvfp4", q="bf16")
    check({}, forms, hf=HF, tmp_path=tmp_path)
    check(opt(quant_algo="NVFP4", ignore=["*.q_proj"]), forms, hf=HF, tmp_path=tmp_path)
    with pytest.raises(CheckpointError, match=re.escape("BF16 by hf_quant_config.json: quantization.exclude_")):
        check({}, each(q="nvfp4"), hf=HF, tmp_path=tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"expected FP8 under one scale by {Q}.quant_algo ('FP8')")):
        check(opt(quant_algo="FP8"), forms, hf=HF, tmp_path=tmp_path)


REFUSED = [
    ([], f"{Q}: found [], expected an object"),
    ({"quant_method": "awq"}, f"{Q}.quant_method: found 'awq', {METHODS}"),
    ({}, f"{Q}.quant_method: found null, {METHODS}"),
    ({"quant_method": 4}, f"{Q}.quant_method: found 4, {METHODS}"),
    ({"quant_method": "compressed-tensors"}, f"{Q}.config_groups: found null, expected an object"),
    ({"config_groups": {"g": 1}}, f"{Q}.config_groups.g: found 1, expected an object"),
    ({"config_groups": {"g": {"weights": []}}}, f"{Q}.config_groups.g.weights: found [], expected an object"),
    ({"config_groups": {"g": {"weights": TENSOR, "targets": "Linear"}}},
     f"{Q}.config_groups.g.targets: found 'Linear', expected a list of module names"),
    ({"config_groups": {"g": {"weights": TENSOR, "targets": ["a", 1]}}},
     f"{Q}.config_groups.g.targets[1]: found 1, expected a module name"),
    ({"config_groups": {"g": {"weights": {"num_bits": "8"}, "targets": []}}},
     f"{Q}.config_groups.g.weights.num_bits: found '8', expected an integer from 1 to 64"),
    ({"config_groups": {"g": {"weights": {"type": 8}, "targets": []}}},
     f"{Q}.config_groups.g.weights.type: found 8, expected int or float"),
    ({"config_groups": {"g": {"weights": {"strategy": 8}, "targets": []}}},
     f"{Q}.config_groups.g.weights.strategy: found 8, expected text"),
    ({"config_groups": {"g": {"weights": {"group_size": 1.5}, "targets": []}}},
     f"{Q}.config_groups.g.weights.group_size: found 1.5, expected an integer"),
    ({"config_groups": {"g": {"weights": {"block_structure": 128}, "targets": []}}},
     f"{Q}.config_groups.g.weights.block_structure: found 128, expected two integers"),
    ({"config_groups": {"g": ["re:(a"]}},
     f"{Q}.config_groups.g[0]: found '(a' (missing ), unterminated subpattern at position 0), {GRAMMAR}"),
    ({"config_groups": {}, "ignore": {"a": 1}}, f"{Q}.ignore: found {{'a': 1}}, expected a list of module names"),
    ({"config_groups": {}, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
     f"{Q}.transform_config: found {{'config_groups': {{'R1': {{'type': 'hadamard'}}}}}}, expected none, so "
     "that weights are stored as they multiply"),
    ({"quant_method": "modelopt", "quant_algo": 8}, f"{Q}.quant_algo: found 8, expected text"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": "16"},
     f"{Q}: group_size: found '16', expected an integer"),
    ({"quant_method": "modelopt", "quantization": 1}, f"{Q}.quantization: found 1, expected an object"),
    ({"quant_algo": "MIXED_PRECISION"},
     f"{Q}.quantized_layers: missing, expected one with quant_algo MIXED_PRECISION"),
    ({"quantized_layers": []}, f"{Q}.quantized_layers: found [], expected an object"),
    ({"quantized_layers": {"a": 1}}, f"{Q}.quantized_layers.a: found 1, expected an object"),
    ({"quantized_layers": {"a": {}}}, f"{Q}.quantized_layers.a.quant_algo: found null, expected text"),
    ({"quant_method": "fp8", "weight_block_size": [128]},
     f"{Q}.weight_block_size: found [128], expected two integers of 1 or more"),
    ({"quant_method": "fp8", "modules_to_not_convert": ["*a"]},
     f"{Q}.modules_to_not_convert[0]: found '(?:*a)(?:(?<=\\\\.)|(?=\\\\.|$))' (nothing to repeat at position 3), "
     f"{GRAMMAR}"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "sentence"), REFUSED)
def test_configs_refused(config, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        quantization.read({"quantization_config": config}, None, [])


def test_hf_quant_config_refused(tmp_path):
    for text, sentence in (
        ("{", "hf_quant_config.json: found no valid JSON"),
        ("{}", "hf_quant_config.json: quantization: found null, expected an object"),
    ):
        (tmp_path / "hf_quant_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="^" + re.escape(sentence)):
            quantization.read({}, tmp_path, [])
