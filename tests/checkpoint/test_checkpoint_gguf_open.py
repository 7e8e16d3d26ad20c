"""GGUF files opened as checkpoints: projections and their formats, values that are refused, a rank's share; copies of
BF16 checkpoints in GGML's blocks."""

import json
import re
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from gguf_files import SIZES, release, write_headers, write_qwen35

from atlas_lab.checkpoint import (
    CheckpointError,
    Sizes,
    open_checkpoint,
    quantize_checkpoint,
    show,
    sizes,
    write_checkpoint,
)
from atlas_lab.checkpoint.qwen35 import layout_of
from atlas_lab.formats import get

MODEL = release(SIZES)
ONE = replace(SIZES, layers=1)
ONE_MODEL = release(ONE)
MODULES = {"gdn.qkv": "linear_attn.in_proj_qkv", "gdn.out": "linear_attn.out_proj", "attn.q": "self_attn.q_proj"}


def dequantized(checkpoint, p):
    return get(p.weight.format).dequantize({f: checkpoint.store.read(t.name) for f, t in p.weight.fields})


@pytest.mark.parametrize("form", ["bf16", "q8_0", "q2_0_g64", "q2_0_g128", "block_nvfp4"])
def test_projections_have_the_formats_of_their_tensors(tmp_path, form):
    checkpoint = open_checkpoint(write_qwen35(tmp_path / "m.gguf", SIZES, MODEL, form))
    assert (checkpoint.family, checkpoint.dims) == ("qwen3.5", replace(SIZES, tied=True).dims)
    assert checkpoint.missing == ()
    f = get(form)
    held = {(p.layer, p.role): p for p in checkpoint.projections}
    assert len(held) == 40  # 39 in 5 layers, and the embedding as output head
    for (layer, role), p in held.items():
        kept = role in ("gdn.a", "gdn.b", "lm_head")
        assert (p.weight.format, p.weight.geometry) == (("bf16", get("bf16").geometry) if kept else (form, f.geometry))
        if role in MODULES:
            w = MODEL[f"layers.{layer}.{MODULES[role]}.weight"]
            assert (p.n, p.k) == w.shape
            np.testing.assert_array_equal(dequantized(checkpoint, p), f.dequantize(f.quantize(w)))
    assert show(checkpoint.path, verify=True).faults == ()


def test_what_lies_beside_the_file_says_nothing_of_it(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(write_qwen35(tmp_path / "m.gguf", ONE, ONE_MODEL, "q8_0"))
    assert checkpoint.config["model_type"] == "qwen3_5_text"


@pytest.mark.parametrize("form", ["q8_0", "block_nvfp4", "q2_0_g128"])
def test_shares_of_ranks_are_the_whole(tmp_path, form):
    path = write_qwen35(tmp_path / "m.gguf", SIZES, MODEL, form)
    whole = open_checkpoint(path)
    ranks = [open_checkpoint(path, tensor_parallel=(rank, 2)) for rank in (0, 1)]
    cuts = {w.role: w.cut for layer in layout_of(SIZES).layers for w in layer.weights}
    for i, p in enumerate(whole.projections[:-1]):
        parts = [dequantized(r, r.projections[i]) for r in ranks]
        cut = cuts[p.role]
        starts = np.cumsum([0, *(s.extent // 2 for s in cut.segments)])
        pieces = [part.take(range(b, e), cut.axis) for b, e in pairwise(starts) for part in parts]
        np.testing.assert_array_equal(np.concatenate(pieces, cut.axis), dequantized(whole, p), p.label)


def test_a_faulty_scale_is_found_and_named(tmp_path):
    path = write_qwen35(tmp_path / "m.gguf", ONE, ONE_MODEL, "q8_0")
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.mlp.gate_proj.weight_q8_0"
    first = checkpoint.store.read(name)[3, 34:68].tobytes()
    path.write_bytes(path.read_bytes().replace(first, b"\0\x7c" + first[2:]))
    (fault,) = show(path, verify=True).faults
    assert fault == (f"{path}: layers.0.ffn.gate: {name}: found d = infinity at row 3, block 1, expected a finite f16")


SCALES = "blk.0.ffn_gate.scale", "blk.0.ffn_gate.input_scale"


def test_a_tensor_scale_may_be_absent(tmp_path):
    def gate(path, **options):
        checkpoint = open_checkpoint(write_qwen35(path, ONE, ONE_MODEL, {"gate_proj": "block_nvfp4"}, **options))
        return checkpoint, next(p for p in checkpoint.projections if p.role == "ffn.gate")

    extra = {SCALES[1]: np.full(1, 0.25, np.float32)}
    without, p = gate(tmp_path / "a.gguf", scales=False, extra=extra)
    assert [f for f, _ in p.weight.fields] == ["blocks"]
    assert [(f, t.name) for f, t in p.weight.activation] == [
        ("input_scale", "model.layers.0.mlp.gate_proj.input_scale")
    ]
    extra = {SCALES[0]: np.full(1, 0.5, np.float32)}
    with_one, q = gate(tmp_path / "b.gguf", scales=False, extra=extra)
    assert [f for f, _ in q.weight.fields] == ["blocks", "global_scale"]
    np.testing.assert_array_equal(dequantized(with_one, q), 0.5 * dequantized(without, p))


@pytest.mark.parametrize(
    ("form", "shape", "sentence"),
    [
        ("q8_0", 1, "weight_scale_2: found with q8_0 weights, expected only weight_q8_0"),
        ("block_nvfp4", 2, "weight_scale_2: found f32[2], expected f32[] or f32[1] for the u8[512, 144] codes of "),
    ],
)
def test_scales_that_have_no_place(tmp_path, form, shape, sentence):
    extra = {SCALES[0]: np.ones(shape, np.float32)}
    path = write_qwen35(tmp_path / "m.gguf", ONE, ONE_MODEL, {"gate_proj": form}, scales=False, extra=extra)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: model.layers.0.mlp.gate_proj.{sentence}")):
        open_checkpoint(path)


def test_files_that_are_none(tmp_path):
    for path, sentence in (
        (tmp_path / "none.gguf", "cannot be read (No such file or directory)"),
        (tmp_path / "none.bin", "found a file, expected a folder, a .safetensors or a .gguf file"),
    ):
        if path.suffix == ".bin":
            path.write_bytes(b"")
        with pytest.raises(CheckpointError, match=f"^{re.escape(f'{path}: {sentence}')}$"):
            open_checkpoint(path)


@pytest.mark.parametrize("form", ["q8_0", "q4_k", "q6_k", "q2_0_g64", "q2_0_g128", "block_nvfp4"])
def test_copies_of_a_checkpoint_in_blocks(tmp_path, form):
    s = sizes("tiny", layers=1, intermediate=512)
    write_checkpoint(tmp_path / "bf16", s, "bf16")
    source = open_checkpoint(tmp_path / "bf16")
    quantize_checkpoint(source, form, tmp_path / "copy")
    write_checkpoint(tmp_path / "direct", s, form)
    made = open_checkpoint(tmp_path / "copy")
    assert "quantization_config" not in made.config
    f = get(form)
    for p, q in zip(source.projections, made.projections, strict=True):
        if q.weight.format == "bf16":
            assert p.role in ("gdn.a", "gdn.b", "lm_head")
            continue
        assert (q.weight.format, q.weight.family) == (form, f.family)
        assert q.weight.fields[0][1].name.endswith(f".weight_{form}")
        w = source.store.read(p.weight["weight"].name).astype(np.float32)
        np.testing.assert_array_equal(dequantized(made, q), f.dequantize(f.quantize(w)))
    files = [(tmp_path / which / "model.safetensors").read_bytes() for which in ("copy", "direct")]
    assert files[0] == files[1]


def test_a_27b_with_its_vocabulary_opens_in_a_second(tmp_path):
    s = replace(sizes("qwen3.6-27b"), prediction=0)
    assert write_headers(tmp_path / "m.gguf", s, merges=247_587, tokens=248_320) == 851
    started = time.process_time()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert time.process_time() - started < 2  # 0.2 s on a core of its own
    assert {p.weight.format for p in checkpoint.projections} == {"q2_0_g128", "bf16"}
    assert Sizes.of(checkpoint.config) == s
    ffn = sum(p.weight.bytes for p in checkpoint.projections if p.role.startswith("ffn."))
    assert ffn == 64 * 3 * 17408 * 5120 * 34 // 128
