"""GGUF checkpoints, written by the gguf package from known tensors: every one comes back under its release's name, in
its order and with its values, bit for bit, and as gguf's own dequantization has it."""

import re
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_files import (
    KINDS,
    SIZES,
    converted,
    finish,
    gguf_name,
    is_projection,
    metadata,
    release,
    stored,
    tiled,
    write_qwen35,
)

from atlas_lab.checkpoint import CheckpointError
from atlas_lab.checkpoint.gguf import open_gguf
from atlas_lab.checkpoint.sizes import Sizes
from atlas_lab.formats import get

MODEL = release(SIZES)
FORMS = ["bf16", "q8_0", "q2_0_g64", "q2_0_g128", "pq2_0", "block_nvfp4"]
WIDE = replace(SIZES, layers=1, value_head_dim=256)  # heads as wide as the blocks of Q4_K and Q6_K
WIDE_MODEL = release(WIDE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A path by format, written when it is first asked for."""
    folder, held = tmp_path_factory.mktemp("gguf"), {}

    def path(form, s=SIZES, model=MODEL):
        key = form, s
        if key not in held:
            held[key] = write_qwen35(folder / f"{len(held)}.gguf", s, model, form)
        return held[key]

    return path


def values(store, module):
    """A projection's float64 values, from whatever tensors it is stored in."""
    form, after = next(
        (f, n.removeprefix(module + ".weight")) for n, f in forms(store) if n.startswith(module + ".weight")
    )
    if form == "bf16":
        return store.read(f"{module}.weight").astype(np.float64)
    fields = {"blocks": store.read(f"{module}.weight{after}")}
    if f"{module}.weight_scale_2" in store.tensors:
        fields["global_scale"] = store.read(f"{module}.weight_scale_2")
    get(form).check(fields, module)
    return get(form).dequantize(fields)


def forms(store):
    for name in store.tensors:
        last = name.rpartition(".")[2]
        if last == "weight" or (last.startswith("weight_") and last != "weight_scale_2"):
            yield name, "bf16" if last == "weight" else last.removeprefix("weight_")


@pytest.mark.parametrize(
    ("form", "s", "model"),
    [*((f, SIZES, MODEL) for f in FORMS), *((f, WIDE, WIDE_MODEL) for f in (*FORMS, "q4_k", "q6_k"))],
)
def test_every_projection_is_that_of_the_release(files, form, s, model):
    store = open_gguf(files(form, s, model))
    ours = {"pq2_0": "q2_0_g128"}.get(form, form)
    seen = 0
    for name, w in model.items():
        if is_projection(name):
            gates = name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
            f = get("bf16" if gates else ours)
            expected = f.dequantize(f.quantize(w))
            np.testing.assert_array_equal(values(store, "model." + name.removesuffix(".weight")), expected, name)
            seen += 1
    assert seen == (39 if s is SIZES else 8)


@pytest.mark.parametrize("form", [*KINDS])
def test_the_file_holds_what_gguf_dequantizes(files, form):
    s, model = (WIDE, WIDE_MODEL) if form in ("q4_k", "q6_k") else (SIZES, MODEL)
    path = files(form, s, model)
    store = open_gguf(path)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    for name, w in model.items():
        if is_projection(name):
            t = theirs[gguf_name(name)]
            read = gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
            scale = theirs.get(gguf_name(name).replace(".weight", ".scale"))
            read = read * np.float64(scale.data[0]) if scale else read
            here = converted(name, values(store, "model." + name.removesuffix(".weight")), s)
            np.testing.assert_array_equal(here.astype(np.float32), read.astype(np.float32), name)
            assert w.shape == read.shape


def test_every_other_tensor_is_that_of_the_release(files):
    store = open_gguf(files("bf16"))
    for name, w in MODEL.items():
        if is_projection(name):
            continue
        found = store.read(f"model.{name}")
        assert (found.shape, str(found.dtype)) == (w.shape, "bfloat16" if name == "embed_tokens.weight" else "float32")
        assert store.tensors[f"model.{name}"].shape == w.shape
        if name.endswith("A_log"):  # exp was rounded: the last bit of float32 is lost, none of bf16
            np.testing.assert_allclose(found, w, rtol=0, atol=2.0**-22)
            found = found.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found.astype(np.float32), w, name)


def test_rewrites_are_named(files):
    store = open_gguf(files("q8_0"))
    assert store.origin("model.layers.0.linear_attn.A_log") == "blk.0.ssm_a (F32): log of -x, value heads grouped"
    assert (
        store.origin("model.layers.3.self_attn.q_norm.weight") == "blk.3.attn_q_norm.weight (F32): 1 taken from 1 + w"
    )
    assert store.origin("model.layers.0.linear_attn.norm.weight") == "blk.0.ssm_norm.weight (F32)"
    name = "model.layers.0.linear_attn.out_proj.weight_q8_0"
    assert store.origin(name) == "blk.0.ssm_out.weight (Q8_0): value heads grouped"
    assert store.origin("model.layers.0.mlp.down_proj.weight_q8_0") == "blk.0.ffn_down.weight (Q8_0)"


def test_only_what_was_moved_is_copied(files, tmp_path):
    def copied(s, path):
        store = open_gguf(path)
        return {n.split(".", 3)[-1] for n in store.tensors if store.read(n).flags.owndata and ".0." in n}

    moved = {"A_log", "dt_bias", "conv1d.weight", "in_proj_qkv.weight_q8_0", "in_proj_z.weight_q8_0"}
    moved |= {"in_proj_a.weight", "in_proj_b.weight", "out_proj.weight_q8_0"}
    changed = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert copied(SIZES, files("q8_0")) == {f"linear_attn.{m}" for m in moved} | changed
    equal = replace(SIZES, layers=1, value_heads=2)  # as many value heads as key heads: none is in another place
    path = write_qwen35(tmp_path / "m.gguf", equal, release(equal), "q4_k")  # nor need blocks be parts of heads
    assert copied(equal, path) == {"linear_attn.A_log", *changed}
    assert not open_gguf(path).read("model.layers.0.mlp.up_proj.weight_q4_k").flags.writeable


@pytest.mark.parametrize("form", ["bf16", "q8_0", "block_nvfp4"])
@pytest.mark.parametrize("module", ["in_proj_qkv", "out_proj"])
def test_parts_are_parts_of_the_whole(files, form, module):
    store = open_gguf(files(form))
    name = f"model.layers.1.linear_attn.{module}.weight" + ("" if form == "bf16" else f"_{form}")
    whole = store.read(name)
    for part, expected in (
        ("[3:40+200:202]", np.concatenate([whole[3:40], whole[200:202]])),
        ("[:,5:70]", whole[:, 5:70]),
        ("[1:2,0:36+72:108]", np.hstack([whole[1:2, :36], whole[1:2, 72:108]])),
    ):
        np.testing.assert_array_equal(store.read(name + part), expected)
    part = f"{name}[0:{len(whole) + 1}]"
    with pytest.raises(CheckpointError, match=re.escape(f"{part}: found a part outside the {[*whole.shape]}")):
        store.read(part)
    heads = store.read("model.layers.0.linear_attn.A_log")
    np.testing.assert_array_equal(store.read("model.layers.0.linear_attn.A_log[2:4]"), heads[2:4])


def test_config_and_metadata(files, tmp_path):
    store = open_gguf(files("q8_0"))
    assert Sizes.of(store.config) == replace(SIZES, tied=True)
    assert store.metadata["general.architecture"] == "qwen35"
    assert store.metadata["tokenizer.ggml.tokens"] == "3 values"
    assert store.bytes == sum(t.bytes for t in store.tensors.values())
    with pytest.raises(CheckpointError, match=r"model.norm.weigh: missing, .* did you mean model.norm.weight\?$"):
        store.read("model.norm.weigh")


def test_the_prediction_head_is_apart(tmp_path):
    s = replace(SIZES, layers=1)
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    metadata(writer, s, prediction=1)
    norm = np.full(256, 1.5, np.float32)
    for name in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm", "attn_q_norm"):
        writer.add_tensor(f"blk.1.{name}.weight", norm)
    writer.add_tensor("blk.1.nextn.eh_proj.weight", np.zeros((256, 544), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.ffn_up.weight", np.zeros((512, 256), np.float16))  # nothing reads it: no fault
    writer.add_tensor("blk.2.nextn.enorm.weight", norm)
    store = open_gguf(finish(writer, tmp_path / "m.gguf", {}))
    assert set(store.tensors) == {
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
        "mtp.fc.weight_q8_0",
        "mtp.layers.0.mlp.up_proj.weight",
        "blk.2.nextn.enorm.weight",
    }
    found = Sizes.of(store.config)
    assert (found.layers, found.prediction) == (1, 1)
    norms = [n for n in store.tensors if n.startswith("mtp.") and "norm" in n]
    assert len(norms) == 5 and all((store.read(n) == 0.5).all() for n in norms)
    assert (store.read("blk.2.nextn.enorm.weight") == 1.5).all()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_plain_architectures(tmp_path, architecture):
    heads, kv, dim, hidden = 4, 2, 8, 32
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((heads * dim, hidden)), rng.standard_normal((kv * dim, hidden))
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv([kv])
    for name, w, n in (("attn_q", q, heads), ("attn_k", k, kv)):
        if architecture == "llama":  # pairs of a head's two halves, one after the other
            w = np.stack([w[h * dim + i // 2 + (i % 2) * dim // 2] for h in range(n) for i in range(dim)])
        writer.add_tensor(
            f"blk.0.{name}.weight", stored("q8_0", w.astype(np.float32))[0], raw_dtype=GGMLQuantizationType.Q8_0
        )
    writer.add_tensor("blk.0.ffn_norm.weight", np.full(hidden, 3, np.float32))
    writer.add_tensor("output.weight", np.zeros((5, hidden), np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((5, hidden), np.float16))
    store = open_gguf(finish(writer, tmp_path / "m.gguf", {}))
    for name, w in (("q", q), ("k", k)):
        found = store.read(f"model.layers.0.self_attn.{name}_proj.weight_q8_0")
        np.testing.assert_array_equal(found, stored("q8_0", w.astype(np.float32))[0])
    assert (store.read("model.layers.0.post_attention_layernorm.weight") == 3).all()
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(store.tensors)
    config = dict(store.config)
    assert (config["model_type"], config["num_key_value_heads"], config["head_dim"]) == (architecture, 2, 8)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (5, False)


def refused(path, sentence):
    with pytest.raises(CheckpointError) as e:
        open_gguf(path)
    assert str(e.value) == f"{path}: {sentence}"


@pytest.mark.parametrize("form", ["q4_k", "q6_k"])
def test_heads_that_share_blocks_are_refused(tmp_path, form):
    s = replace(SIZES, layers=1)
    path = write_qwen35(tmp_path / "m.gguf", s, release(s), {"out_proj": form})
    refused(
        path,
        f"blk.0.ssm_out.weight: found value heads of 128 columns in blocks of 256 ({KINDS[form]}), expected whole "
        "blocks: the file has them in another order, which only quantizing anew could undo",
    )


@pytest.mark.parametrize(
    ("kind", "width"), [("F16", 0), ("F32", 0), ("Q5_K", 176), ("MXFP4", 136), ("TQ2_0", 66), ("Q1_0", 36)]
)
def test_projections_of_other_types_are_refused_by_name(tmp_path, kind, width):
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    metadata(writer, SIZES)
    data = np.zeros((512, width), np.uint8) if width else np.zeros((512, 256), kind.lower().replace("f", "float"))
    writer.add_tensor("token_embd.weight", data, raw_dtype=GGMLQuantizationType[kind])  # nothing multiplies by it
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=GGMLQuantizationType[kind])
    refused(
        finish(writer, tmp_path / "m.gguf", {}),
        f"blk.0.ffn_up.weight: found type {kind}, expected a projection of one of Q8_0, Q4_K, Q6_K, BF16, NVFP4, "
        "PQ2_0, Q2_0",
    )


def test_embeddings_of_other_types_are_only_not_read(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    metadata(writer, SIZES)
    writer.add_tensor("token_embd.weight", np.zeros((320, 176), np.uint8), raw_dtype=GGMLQuantizationType.Q5_K)
    store = open_gguf(finish(writer, tmp_path / "m.gguf", {}))
    assert {n: t.shape for n, t in store.tensors.items()} == {"model.embed_tokens.weight_q5_k": (320, 176)}
    assert store.config["vocab_size"] == 320


def keyed(path, *pairs, architecture="qwen35", without=(), names=()):
    writer = GGUFWriter(path, architecture)
    metadata(writer, SIZES)
    held = writer.kv_data[0]
    for key in without:
        del held[f"qwen35.{key}"]
    for key, value in pairs:
        held.pop(key, None)
        kind = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array, float: writer.add_float32}
        kind[type(value)](key, value)
    for name in names:
        writer.add_tensor(name, np.zeros(256, np.float32))
    return finish(writer, path, {})


ROTATED = (
    "found weights that are stored under a Walsh-Hadamard transform, expected weights as they multiply: their inputs "
    "would have to be transformed too, and no kernel here does that"
)


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([("prism.hadamard.version", 1)], f"prism.hadamard.version: {ROTATED}"),
        ([("prism.hadamard.block_size", 1024)], f"prism.hadamard.block_size: {ROTATED}"),
        ([("split.count", 3)], "split.count: found one of 3 files, expected the whole model in one"),
        ([("qwen35.expert_count", 8)], "qwen35.expert_count: found experts, expected none: they are not supported"),
        ([("qwen35.block_count", "5")], "qwen35.block_count: found '5', expected an integer of 1 or more"),
        ([("qwen35.block_count", 20_000)], "qwen35.block_count: found 20000, expected at most 10000"),
        ([("qwen35.embedding_length", 1.5)], "qwen35.embedding_length: found 1.5, expected an integer of 1 or more"),
        (
            [("qwen35.feed_forward_length", [512, 256, 512])],
            "qwen35.feed_forward_length: found (512, 256, 512), expected an integer of 1 or more",
        ),
        ([("qwen35.attention.value_length", 64)], "qwen35.attention.value_length: found 64, expected key_length 128"),
        ([("qwen35.ssm.inner_size", 100)], "qwen35.ssm.inner_size: found 100, expected a multiple of time_step_rank 6"),
        ([("qwen35.ssm.group_count", 4)], "qwen35.ssm.time_step_rank: found 6, expected a multiple of group_count 4"),
        (
            [("qwen35.nextn_predict_layers", 5)],
            "qwen35.nextn_predict_layers: found 5, expected fewer than the 5 of block_count",
        ),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path, pairs, sentence):
    refused(keyed(tmp_path / "m.gguf", *pairs), sentence)


def test_kv_heads_by_layer(tmp_path):
    path = keyed(tmp_path / "m.gguf", ("qwen35.attention.head_count_kv", [0, 0, 0, 1, 0]))
    assert open_gguf(path).config["num_key_value_heads"] == 1


def test_metadata_that_is_missing(tmp_path):
    path = keyed(tmp_path / "m.gguf", without=["ssm.state_size"])
    refused(path, "qwen35.ssm.state_size: missing, expected an integer of 1 or more")
    path = keyed(tmp_path / "n.gguf", architecture="gemma3")
    refused(path, "general.architecture: found 'gemma3', expected one of qwen35, qwen3, llama")


def test_two_tensors_for_one(tmp_path):
    path = keyed(tmp_path / "m.gguf", names=["blk.0.ssm_norm.weight", "model.layers.0.linear_attn.norm.weight"])
    refused(
        path,
        "model.layers.0.linear_attn.norm.weight: found with blk.0.ssm_norm.weight, expected one of them for "
        "model.layers.0.linear_attn.norm.weight",
    )


@pytest.mark.parametrize("name", ["ssm_a", "attn_qkv.weight", "ssm_out.weight", "ssm_conv1d.weight"])
def test_tensors_of_another_number_of_heads(tmp_path, name):
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    metadata(writer, SIZES)
    shape = {"ssm_a": (5,), "ssm_conv1d.weight": (1000, 4)}.get(name, (1000, 640))
    kind = GGMLQuantizationType.F32 if name in ("ssm_a", "ssm_conv1d.weight") else GGMLQuantizationType.BF16
    data = np.zeros(shape, np.float32) if kind == 0 else np.zeros((shape[0], 2 * shape[1]), np.uint8)
    writer.add_tensor(f"blk.0.{name}", data, raw_dtype=kind)
    with pytest.raises(
        CheckpointError, match=rf": blk\.0\.{name}: found \d+ (rows|columns), expected \d+ by its value heads$"
    ):
        open_gguf(finish(writer, tmp_path / "m.gguf", {}))


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (0.5, "0.5"), (np.nan, "nan"), (-np.inf, "-inf")])
def test_gates_that_are_no_exponential(tmp_path, value, shown):
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    metadata(writer, SIZES)
    writer.add_tensor("blk.0.ssm_a", np.array([-1, -2, -3, value, -1, -1], np.float32))
    path = finish(writer, tmp_path / "m.gguf", {})
    with pytest.raises(CheckpointError) as e:
        open_gguf(path).read("model.layers.0.linear_attn.A_log")
    at = [*tiled(np.arange(6), SIZES, 0, 1)].index(0)
    assert at == 0 and str(e.value).startswith(f"{path}: blk.0.ssm_a: found {shown} at ")
    assert str(e.value).endswith(", expected -exp(A_log), finite and below 0")
