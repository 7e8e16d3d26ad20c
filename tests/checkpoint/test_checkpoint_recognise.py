"""What a weight is, from names, dtypes and shapes; and the sentence for each that is something else."""

import re

import pytest
from checkpoint_files import handles

from atlas_lab.checkpoint import CheckpointError, recognise
from atlas_lab.checkpoint.recognise import companion
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import BLOCK_128, GROUP_16, GROUP_16_RECIPROCAL, NO_SCALE, PER_ROW, PER_TENSOR

KNOWN = [
    (("m.weight bf16 4 8",), "bf16", "bf16", NO_SCALE),
    (("m.weight e4m3 300 200", "m.weight_scale_inv bf16 3 2"), "fp8", "fp8", BLOCK_128),
    (("m.weight e4m3 300 200", "m.weight_scale_inv f32 3 2"), "fp8", "fp8", BLOCK_128),
    (("m.weight e4m3 300 200", "m.weight_scale f32 3 2"), "fp8", "fp8", BLOCK_128),
    (("m.weight e4m3 300 200", "m.weight_scale bf16 300 1"), "fp8_row", "fp8", PER_ROW),
    (("m.weight e4m3 300 200", "m.weight_scale f32 300"), "fp8_row", "fp8", PER_ROW),
    (("m.weight e4m3 300 200", "m.weight_scale f32"), "fp8_tensor", "fp8", PER_TENSOR),
    (("m.weight e4m3 300 200", "m.weight_scale f32 1"), "fp8_tensor", "fp8", PER_TENSOR),
    (("m.weight e4m3 300 200", "m.weight_scale_inv f32"), "fp8_tensor", "fp8", PER_TENSOR),
    (("m.weight e4m3 100 100", "m.weight_scale f32 1 1"), "fp8", "fp8", BLOCK_128),
    (("m.weight e4m3 1 300", "m.weight_scale f32 1 1"), "fp8_row", "fp8", PER_ROW),
    (("m.weight e4m3 1 300", "m.weight_scale f32 1 3"), "fp8", "fp8", BLOCK_128),
    (("m.weight u8 4 16", "m.weight_scale e4m3 4 2", "m.weight_scale_2 f32"), "nvfp4", "nvfp4", GROUP_16),
    (("m.weight u8 4 16", "m.weight_scale e4m3 4 2", "m.weight_scale_2 f32 1"), "nvfp4", "nvfp4", GROUP_16),
    (
        ("m.weight_packed u8 4 16", "m.weight_scale e4m3 4 2", "m.weight_global_scale f32 1"),
        "nvfp4_ct",
        "nvfp4",
        GROUP_16_RECIPROCAL,
    ),
]


@pytest.mark.parametrize(("tensors", "name", "family", "geometry"), KNOWN)
def test_known(tensors, name, family, geometry):
    held = handles(*tensors)
    noise = handles("m.bias bf16 4", "m2.weight i32 4 4", "m.k_scale f32", "m.weight_scale_3 f32", "m.weights bf16 4 8")
    w = recognise({**noise, **held}, "m")
    assert (w.format, w.family, w.geometry) == (name, family, geometry)
    assert [t for _, t in w.fields] == list(held.values())
    assert [f for f, _ in w.fields] == ["weight", "scale", "global_scale"][: len(held)]
    assert w.activation == ()


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_a_grid_of_four_dimensions_is_a_matrix(suffix):
    held = handles("m.weight e4m3 300 200", f"m.{suffix} f32 3 1 2 1")
    w = recognise(held, "m")
    assert (w.format, w.geometry) == ("fp8", BLOCK_128)
    assert w["scale"] == Tensor("f32", (3, 2), f"m.{suffix}")


@pytest.mark.parametrize(("tensors", "names"), [
    (("m.weight u8 4 16", "m.weight_scale e4m3 4 2", "m.weight_scale_2 f32", "m.input_scale f32"), ["input_scale"]),
    (("m.weight_packed u8 4 16", "m.weight_scale e4m3 4 2", "m.weight_global_scale f32", "m.input_global_scale f32"),
     ["input_global_scale"]),
    (("m.weight e4m3 4 8", "m.weight_scale_inv f32", "m.activation_scale f32"), ["activation_scale"]),
    (("m.weight bf16 4 8", "m.input_scale f32", "m.activation_scale f32"), ["input_scale", "activation_scale"]),
])  # fmt: skip
def test_scales_of_the_input_are_facts_of_a_weight(tensors, names):
    held = handles(*tensors)
    w = recognise(held, "m")
    assert w.activation == tuple((n, held[f"m.{n}"]) for n in names)
    assert not {t for _, t in w.activation} & set(w.tensors.values())
    assert w.bytes == sum(t.bytes for t in w.tensors.values())


def test_no_weight_is_none():
    assert recognise(handles("m.bias bf16 4", "other.weight bf16 4 4"), "m") is None


REFUSED = [
    (
        ("m.weight u8 4 64", "m.weight_scale e4m3 4 4", "m.weight_scale_2 f32"),
        "m.weight_scale: found e4m3[4, 4], expected e4m3[4, 8] for the u8[4, 64] codes of m.weight",
        "block scales of half the width",
    ),
    (
        ("m.weight_packed u8 4 64", "m.weight_scale e4m3 4 4", "m.weight_global_scale f32 1"),
        "m.weight_scale: found e4m3[4, 4], expected e4m3[4, 8] for the u8[4, 64] codes of m.weight_packed",
        "block scales of half the width, packed",
    ),
    (
        ("m.weight u8 4 64", "m.weight_scale e4m3 4 8"),
        "m.weight_scale_2: missing, found u8 weight, e4m3 weight_scale, expected it in ModelOpt NVFP4 weights",
        "no global scale",
    ),
    (
        ("m.weight_packed u8 4 64", "m.weight_scale e4m3 4 8"),
        "m.weight_global_scale: missing, found u8 weight_packed, e4m3 weight_scale, expected it in "
        "compressed-tensors NVFP4 weights",
        "no global scale, packed",
    ),
    (
        ("m.weight_packed u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 f32"),
        "m.weight_global_scale: missing, found u8 weight_packed, e4m3 weight_scale, f32 weight_scale_2, expected it "
        "in compressed-tensors NVFP4 weights",
        "the other convention's global scale",
    ),
    (
        ("m.weight u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 f32", "m.weight_global_scale f32"),
        "m.weight_global_scale: found with ModelOpt NVFP4 weights, expected only weight, weight_scale, weight_scale_2",
        "global scales of both conventions",
    ),
    (
        ("m.weight u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 f32 4"),
        "m.weight_scale_2: found f32[4], expected f32[] or f32[1] for the u8[4, 64] codes of m.weight",
        "a global scale a row",
    ),
    (
        ("m.weight u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 bf16"),
        "m.weight_scale_2: found bf16[], expected f32[] or f32[1] for the u8[4, 64] codes of m.weight",
        "a global scale of another dtype",
    ),
    (
        ("m.weight u8 4 12", "m.weight_scale e4m3 4 2", "m.weight_scale_2 f32"),
        "m.weight: nvfp4: found K = 24 in a weight [4, 24], expected a multiple of 16",
        "K no multiple of 16",
    ),
    (
        ("m.weight e4m3 300 200",),
        "m.weight_scale_inv or m.weight_scale: missing, found e4m3 weight, expected it in FP8 weights",
        "FP8 without a scale",
    ),
    (
        ("m.weight e4m3 300 200", "m.weight_scale f32 1", "m.weight_scale_inv f32 3 2"),
        "m: found weight_scale_inv and weight_scale, expected one of them in FP8 weights",
        "two FP8 scales",
    ),
    (
        ("m.weight e4m3 300 200", "m.weight_scale_inv f32 3 1"),
        "m.weight_scale_inv: found shape [3, 1], expected [3, 2] (128x128 tiles), [300, 1] or [300] (rows), [] or [1] "
        "(tensor) for a weight [300, 200]",
        "a grid of half the width",
    ),
    (
        ("m.weight e4m3 256 256", "m.weight_scale f32 2 1 3 1"),
        "m.weight_scale: found shape [2, 3], expected [2, 2] (128x128 tiles), [256, 1] or [256] (rows), [] or "
        "[1] (tensor) for a weight [256, 256]",
        "a grid of four dimensions, too wide",
    ),
    (
        ("m.weight e4m3 256 256", "m.weight_scale f32 2 2 1 1"),
        "m.weight_scale: found shape [2, 2, 1, 1], expected [2, 2] (128x128 tiles), [256, 1] or [256] (rows), [] or "
        "[1] (tensor) for a weight [256, 256]",
        "four dimensions in another order",
    ),
    (
        ("m.weight e4m3 300 200", "m.weight_scale f16 300 1"),
        "m.weight_scale: found dtype f16, expected f32 or bf16",
        "an FP8 scale of another dtype",
    ),
    (
        ("m.weight bf16 4 8", "m.weight_scale f32 1"),
        "m.weight_scale: found with BF16 weights, expected only weight",
        "BF16 with a scale",
    ),
    (("m.weight f16 4 8",), "m.weight: found dtype f16, expected one of bf16, e4m3, u8", "F16"),
    (("m.weight bf16 2 4 8",), "m.weight: found shape [2, 4, 8], expected two dimensions of 1 or more", "3-D"),
    (("m.weight bf16 0 8",), "m.weight: found shape [0, 8], expected two dimensions of 1 or more", "empty"),
    (
        ("m.weight bf16 4 8", "m.weight_packed u8 4 4", "m.weight_scale e4m3 4 1"),
        "m: found weight, weight_packed, weight_scale, expected one of m.weight or m.weight_packed",
        "two sets of codes",
    ),
]


@pytest.mark.parametrize(("tensors", "sentence"), [pytest.param(t, s, id=i) for t, s, i in REFUSED])
def test_refused(tensors, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
        recognise(handles(*tensors), "m")


NAMED = [
    (("m.weight u8 4 64", "m.weight_scale u8 4 4"), "m.weight_scale", "MXFP4"),
    (("m.weight u8 4 64", "m.weight_scale e8m0 4 4"), "m.weight_scale", "MXFP4"),
    (("m.weight_packed u8 4 64", "m.weight_scale u8 4 4"), "m.weight_scale", "MXFP4"),
    (("m.weight_blocks u8 4 8 16", "m.weight_scales u8 4 8"), "m.weight_blocks", "MXFP4"),
    (("m_blocks u8 4 8 16", "m_scales u8 4 8"), "m_blocks", "MXFP4"),
    (("m.weight e4m3 4 64", "m.weight_scale u8 4 2"), "m.weight_scale", "MXFP8 (or FP8 under UE8M0 scales)"),
    (("m.weight e4m3 4 64", "m.weight_scale_inv e8m0 1 1"), "m.weight_scale_inv", "MXFP8 (or FP8 under UE8M0 scales)"),
    (("m.weight_packed i32 4 16", "m.weight_scale bf16 4 1", "m.weight_shape i64 2"), "m.weight_packed",
     "int4 or int8 pack-quantized"),
    (("m.weight u8 2 64", "m.weight_scale f32 4 1"), "m.weight_scale", "int4"),
    (("m.weight i8 4 64", "m.weight_scale bf16 4 1"), "m.weight", "int8"),
    (("m.weight e5m2 4 64", "m.weight_scale f32 4 1"), "m.weight", "E5M2"),
    (("m.weight e4m3 4 64", "m.weight_scale f32 4 1", "m.weight_zero_point e4m3 4 1"), "m.weight_zero_point",
     "asymmetric"),
    (("m.qweight i32 4 8", "m.qzeros i32 1 1", "m.scales f16 1 8"), "m.qweight", "GPTQ or AWQ"),
    (("m.weight u8 64 1", "m.weight.absmax f32 2", "m.weight.quant_map f32 16"), "m.weight.absmax", "bitsandbytes"),
    (("m.weight u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 f32", "m.pre_quant_scale bf16 128"),
     "m.pre_quant_scale", "AWQ"),
    (("m.weight u8 4 64", "m.weight_scale e4m3 4 8", "m.weight_scale_2 f32", "m.svdquant_lora_a bf16 4 128"),
     "m.svdquant_lora_a", "SVDQuant"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "tensor", "kind"), NAMED)
def test_refused_by_name(tensors, tensor, kind):
    held = handles(*tensors)
    with pytest.raises(CheckpointError) as e:
        recognise(held, "m")
    assert str(e.value).startswith(f"{tensor}: found {kind} weights (")
    assert str(e.value).endswith("), expected BF16, FP8 or NVFP4")
    assert all(f"{t.dtype} {t.name[1:].lstrip('.')}" in str(e.value) for t in held.values())


@pytest.mark.parametrize(("name", "what"), [
    ("a.0.mlp.up_proj.input_scale", "scale of activations"),
    ("a.0.self_attn.k_proj.k_scale", "scale of the KV cache"),
    ("a.0.self_attn.v_scale", "scale of the KV cache"),
    ("lm_head.weight_scale_2", "part of a quantized weight that no projection reads"),
    ("a.0.mlp.experts.down_proj_blocks", "part of a quantized weight that no projection reads"),
    ("a.0.mlp.up_proj.weight", ""),
    ("a.0.norm.weight", ""),
])  # fmt: skip
def test_companions(name, what):
    assert companion(name) == what
