"""Conversion a few rows at a time: the same tensors, in bounded memory, whole or not at all."""

import json
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.checkpoint import CheckpointError, Store, model, new, open_checkpoint, quantize_checkpoint, show, sizes
from atlas_lab.checkpoint.files import Group, write_files, write_json
from atlas_lab.checkpoint.naming import CONVENTIONS
from atlas_lab.checkpoint.writer import write_checkpoint
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get

P = "model.language_model.layers."


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("c", CONVENTIONS, ids=lambda c: f"{c.producer}-{c.format}")
def test_pieces_make_the_whole(monkeypatch, c):
    """In chunks of a few rows and tiles cut short at the edges, what the format makes of all rows at once."""
    rng = np.random.default_rng(0)
    n, k = 300, 272
    w = rng.standard_normal((n, k), np.float32).astype(ml_dtypes.bfloat16)
    handles = c.tensors("m", n, k)
    wanted = get(c.format).quantize(w.astype(np.float32))
    reads = []

    def read(rows):
        reads.append(rows)
        return w[rows]

    monkeypatch.setattr("atlas_lab.formats.scan.CHUNK", 7 * k)
    made = c.encode("m", n, k, read)
    assert max(r.stop - r.start for r in reads) == (128 if c.format == "fp8" else 7)
    passes = 2 if c.format in ("fp8_tensor", "nvfp4", "nvfp4_ct") else 1
    assert sum(r.stop - r.start for r in reads) == passes * n
    for f, t in handles.items():
        assert made[t.name].shape == t.shape
        assert made[t.name].tobytes() == wanted[f].astype(made[t.name].dtype).tobytes(), f


def large(folder, n, k):
    """A model whose embedding and head are small, with one large tensor and one that nothing reads."""
    _, config = model("tiny-llama", layers=1, hidden=k, intermediate=n, vocab=8)
    family, _ = model("tiny-llama")
    layout = family.layout(config)
    rng = np.random.default_rng(1)
    row = rng.standard_normal((1, max(n, k)), np.float32).astype(ml_dtypes.bfloat16)
    groups = []
    named = [(layout.module("model.", 0, w), (w.n, w.k)) for w in (*layout.layers[0].weights, layout.head)]
    for name, shape in [*named, ("model.embed_tokens", (8, k)), ("mtp.fc", (n, k))]:
        t = Tensor("bf16", shape, f"{name}.weight")
        pieces = lambda t=t: {t.name: (np.repeat(row[:, : t.shape[1]], 1, 0) for _ in range(t.shape[0]))}  # noqa: E731
        groups.append(Group((t,), pieces))
    folder.mkdir()
    write_files(folder, groups, {})
    write_json(folder / "config.json", config)
    return n * k * 2


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_memory_stays_below_two_of_the_largest_tensors(tmp_path, form):
    largest = large(tmp_path / "bf16", 8192, 1536)
    source = open_checkpoint(tmp_path / "bf16")
    tracemalloc.start()
    quantize_checkpoint(source, form, tmp_path / form)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest
    assert all(f._map is None for f in source.store.files)  # no page of the source is mapped, so none is counted
    copied = Store.open(tmp_path / form).read("mtp.fc.weight")
    assert copied.tobytes() == source.store.read("mtp.fc.weight").tobytes()


def test_progress(tmp_path):
    new(tmp_path / "bf16", layers=1)
    seen = []
    quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), "nvfp4", tmp_path / "q", progress=lambda *a: seen.append(a))
    done = [d for _, d, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2] == len({name for name, _, _ in seen} - {""})
    assert seen[0][0] == f"{P}0.linear_attn.in_proj_qkv.weight"
    seen.clear()
    new(tmp_path / "n", "fp8", layers=1, max_shard_bytes=300_000, progress=lambda *a: seen.append(a))
    assert [d for _, d, _ in seen] == sorted(d for _, d, _ in seen)
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.parametrize("at", [0, 5, -1])
def test_an_interruption_leaves_nothing(tmp_path, at):
    new(tmp_path / "bf16", layers=1)
    calls = []

    def interrupted(what, done, of):
        calls.append(what)
        if done == (of if at < 0 else at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), "fp8", tmp_path / "q", progress=interrupted)
    assert [p.name for p in tmp_path.iterdir()] == ["bf16"]
    assert calls


MIXED = {
    "nvfp4+fp8": ("nvfp4", "fp8_tensor", "nvfp4", "modelopt", "MIXED_PRECISION"),
    "nvfp4+fp8_row": ("nvfp4", "fp8_row", "nvfp4", "modelopt", "MIXED_PRECISION"),
    "nvfp4_ct+fp8": ("nvfp4_ct", "fp8", "bf16", "compressed-tensors", "mixed-precision"),
    "nvfp4+bf16": ("nvfp4", "bf16", "nvfp4", "modelopt", "W4A16_NVFP4"),
    "bf16+fp8": ("bf16", "fp8", "bf16", "fp8", None),
}


@pytest.mark.parametrize("spelled", MIXED)
def test_mixed_formats(tmp_path, spelled):
    ffn, rest, head, method, said = MIXED[spelled]
    new(tmp_path / "bf16", layers=4, seed=9)
    new(tmp_path / "direct", spelled, layers=4, seed=9)
    quantize_checkpoint(open_checkpoint(tmp_path / "bf16"), spelled, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(tmp_path / "direct")
    shown = show(tmp_path / "copy", verify=True)
    assert shown.faults == ()
    for p in shown.checkpoint.projections:
        wanted = ffn if p.role.startswith("ffn") else head if p.role == "lm_head" else rest
        assert p.weight.format == ("bf16" if p.role in ("gdn.a", "gdn.b") else wanted), p.label
    config = shown.checkpoint.config["quantization_config"]
    assert config["quant_method"] == method
    assert said in (None, config.get("quant_algo"), config.get("format"))


def test_the_config_of_nvidia_s_mix(tmp_path):
    new(tmp_path / "c", "nvfp4+fp8", "qwen3.6-27b", headers_only=True)
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"]
    assert len(layers) == 401
    assert layers["lm_head"] == layers[f"{P}0.mlp.gate_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers[f"{P}0.linear_attn.in_proj_qkv"] == layers[f"{P}3.self_attn.o_proj"] == {"quant_algo": "FP8"}
    assert config["ignore"][:2] == [f"{P}0.linear_attn.in_proj_b", f"{P}0.linear_attn.in_proj_a"]
    held = open_checkpoint(tmp_path / "c")
    q = {t.name.rpartition(".")[2]: str(t) for t in held.sites[12].projections[0].weight.tensors.values()}
    name = f"{P}3.self_attn.q_proj"
    assert q == {
        "weight": f"{name}.weight: e4m3[12288, 5120]",
        "weight_scale": f"{name}.weight_scale: f32[]",
    }


def test_groups_of_a_compressed_tensors_mix(tmp_path):
    new(tmp_path / "c", "nvfp4_ct+fp8", layers=4)
    groups = Store.open(tmp_path / "c").config["quantization_config"]["config_groups"]
    assert [g["format"] for g in groups.values()] == ["nvfp4-pack-quantized", "float-quantized"]
    assert groups["group_0"]["targets"][:2] == [f"{P}0.mlp.gate_proj", f"{P}0.mlp.up_proj"]
    assert f"{P}3.self_attn.q_proj" in groups["group_1"]["targets"]


@pytest.mark.parametrize(
    ("spelled", "producer", "sentence"),
    [
        ("nvfp4+fp8+bf16", "", "format: found 'nvfp4+fp8+bf16', expected one format, or two as in nvfp4+fp8"),
        ("nvfp4+int8", "", "format: found 'int8', expected one of bf16, fp8, fp8_tensor, fp8_row, nvfp4, "),
        ("fp8+nvfp4", "", "producer of nvfp4: found 'qwen', expected one of modelopt"),
        ("nvfp4+nvfp4_ct", "", "producer of nvfp4_ct: found 'modelopt', expected one of compressed-tensors"),
        ("nvfp4", "qwen", "producer of nvfp4: found 'qwen', expected one of modelopt"),
    ],
)
def test_formats_refused(tmp_path, spelled, producer, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(sentence)):
        new(tmp_path / "c", spelled, producer=producer)
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_stays_the_embedding(tmp_path):
    new(tmp_path / "bf16", size="tiny-qwen3", seed=2)
    new(tmp_path / "direct", "nvfp4", "tiny-qwen3", seed=2)
    source = open_checkpoint(tmp_path / "bf16")
    quantize_checkpoint(source, "nvfp4", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(tmp_path / "direct")
    made = open_checkpoint(tmp_path / "copy")
    assert made.projections[-1].weight["weight"] == source.projections[-1].weight["weight"]


def test_a_fused_weight_is_converted_whole(tmp_path):
    _, config = model("tiny-llama", layers=1)
    new(tmp_path / "apart", size="tiny-llama", layers=1, seed=4)
    store = Store.open(tmp_path / "apart")
    a = "model.layers.0.self_attn."
    parts = [f"{a}{m}_proj.weight" for m in "qkv"]
    whole = Tensor("bf16", (512, 256), f"{a}qkv_proj.weight")
    groups = [Group((whole,), lambda: {whole.name: np.concatenate([store.read(n) for n in parts])})]
    groups += [
        Group((t,), lambda t=t: {t.name: store.read(t.name)}) for n, t in store.tensors.items() if n not in parts
    ]
    (tmp_path / "fused").mkdir()
    write_files(tmp_path / "fused", groups, {})
    write_json(tmp_path / "fused" / "config.json", config)
    quantize_checkpoint(open_checkpoint(tmp_path / "fused"), "nvfp4", tmp_path / "q")
    held = open_checkpoint(tmp_path / "q")
    assert held.store.tensors[f"{a}qkv_proj.weight_scale_2"].shape == ()
    wanted = get("nvfp4").quantize(np.concatenate([store.read(n) for n in parts]).astype(np.float32))
    found = {f: np.concatenate([held.store.read(p.weight[f].name) for p in held.sites[0].projections])
             for f in ("weight", "scale")}  # fmt: skip
    assert all(found[f].tobytes() == wanted[f].tobytes() for f in found)


def test_headers_alone_are_not_quantized(tmp_path):
    new(tmp_path / "c", headers_only=True)
    with pytest.raises(CheckpointError, match="c: found headers alone, expected values to quantize"):
        quantize_checkpoint(open_checkpoint(tmp_path / "c"), "nvfp4", tmp_path / "q")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_headers_alone_are_those_of_the_values(tmp_path):
    for limit in (None, 400_000):
        for name, only in (("whole", False), ("headers", True)):
            new(tmp_path / f"{name}{limit}", "nvfp4+fp8", layers=4, headers_only=only, max_shard_bytes=limit)
        whole, headers = contents(tmp_path / f"whole{limit}"), contents(tmp_path / f"headers{limit}")
        assert set(whole) == set(headers)
        assert (len(whole) > 3) == (limit is not None)
        for name, data in whole.items():
            if name.endswith(".safetensors"):
                end = 8 + int.from_bytes(data[:8], "little")
                assert headers[name][:end] == data[:end]
                assert headers[name][end:] == bytes(len(data) - end)
            elif name != "config.json":
                assert headers[name] == data
        configs = [json.loads(c["config.json"]) for c in (whole, headers)]
        assert configs[1] == configs[0] | {"atlas_lab_headers_only": True}


@pytest.mark.parametrize(
    ("name", "form", "gigabytes", "projections"),
    [
        ("qwen3.6-27b", "bf16", 54.641, 497),
        ("qwen3.6-27b", "fp8", 30.317, 497),
        ("qwen3.6-27b", "nvfp4+fp8", 21.0, 497),
        ("llama-3-70b", "bf16", 141.107, 561),
        ("gemma-4-31b", "nvfp4", 19.295, 411),
    ],
)
def test_headers_of_releases(tmp_path, name, form, gigabytes, projections):
    new(tmp_path / "c", form, name, headers_only=True)
    held = open_checkpoint(tmp_path / "c")
    assert len(held.projections) == projections
    assert round(held.store.bytes / 1e9, 3) == gigabytes
    assert held.missing == ()
    file = (tmp_path / "c" / "model.safetensors").stat()
    assert file.st_size > held.store.bytes
    assert file.st_blocks * 512 < 1 << 20
    with pytest.raises(CheckpointError, match=r"c: found headers alone, expected values to verify$"):
        show(tmp_path / "c", verify=True)


def test_a_file_system_without_holes(tmp_path, monkeypatch):
    monkeypatch.setattr("atlas_lab.checkpoint.files._BLOCKS", -(1 << 20))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: takes \d+ bytes for a header of \d+, expected spar"
    ):
        new(tmp_path / "c", headers_only=True)
    assert list(tmp_path.iterdir()) == []


def test_every_value_is_verified(tmp_path):
    """One line a fault, of what projections read and of the rest, named by tensor and place."""
    write_checkpoint(tmp_path / "c", sizes("tiny", layers=1, prediction=1), "nvfp4")
    file = tmp_path / "c" / "model.safetensors"
    opened = Store.open(tmp_path / "c").files[0]
    data = bytearray(file.read_bytes())

    def spoil(name, index, value):
        at = opened.data_start + opened.header.offsets[name][0] + index * len(value)
        data[at : at + len(value)] = value

    infinity, nan = b"\x80\x7f", b"\xc0\x7f"
    spoil(f"{P}0.mlp.up_proj.weight_scale", 1, b"\xff")
    spoil(f"{P}0.linear_attn.in_proj_a.weight", 3, nan)
    spoil(f"{P}0.linear_attn.conv1d.weight", 5, infinity)
    spoil("lm_head.weight", 256, nan)
    spoil("model.language_model.embed_tokens.weight", 0, infinity)
    spoil("mtp.fc.weight", 512, infinity)
    spoil("mtp.norm.weight", 2, nan)
    file.write_bytes(data)
    faults = show(tmp_path / "c", verify=True).faults
    embed = "model.language_model.embed_tokens"
    assert [f.removeprefix(f"{tmp_path / 'c'}: ") for f in faults] == [
        f"layers.0.gdn.a: {P}0.linear_attn.in_proj_a.weight: found NaN at row 0, column 3, expected finite values",
        f"layers.0.ffn.up: {P}0.mlp.up_proj.weight_scale: found code 0xFF (NaN) at row 0, column 1, expected a code "
        "from 0x00 to 0x7E",
        "lm_head: lm_head.weight: found NaN at row 1, column 0, expected finite values",
        f"{embed}: {embed}.weight: found infinity at row 0, column 0, expected finite values",
        f"convolution: {P}0.linear_attn.conv1d.weight: found infinity at row 1, column 0, expected finite values",
        "mtp.fc: mtp.fc.weight: found infinity at row 1, column 0, expected finite values",
        "multi-token prediction, not used: mtp.norm.weight: found NaN at row 2, expected finite values",
    ]
