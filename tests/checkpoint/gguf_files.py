"""GGUF files of a few kilobytes, made by the gguf package's writer from tensors in the release's names and order.

What a converter rewrites is written out here head by head, from the words of the spec and not from our code.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from atlas_lab.checkpoint.qwen35 import layout_of
from atlas_lab.checkpoint.sizes import ATTENTION, Sizes
from atlas_lab.formats import get

Arrays = dict[str, np.ndarray]

# Name in gguf's enum by format; the other two are no types of it.
KINDS = {"q8_0": "Q8_0", "q4_k": "Q4_K", "q6_k": "Q6_K", "block_nvfp4": "NVFP4", "bf16": "BF16"}
TERNARY = {"q2_0_g64": 42, "q2_0_g128": 42, "pq2_0": 142}

SIZES = Sizes(256, 512, 5, 4, 2, 2, 6, head_dim=128, key_head_dim=64, value_head_dim=128, vocab=320, interval=4)

GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def release(s: Sizes, seed: int = 0) -> Arrays:
    """A model's tensors under the release's names within it, bf16 values as float32: projections, norms and gates."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(s.layers):
        inner: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (s.hidden,),
            "post_attention_layernorm.weight": (s.hidden,),
        }
        n = s.shapes
        for m, role in (("gate", "ffn.gate"), ("up", "ffn.up"), ("down", "ffn.down")):
            inner[f"mlp.{m}_proj.weight"] = n[role]
        if s.kind(i) == ATTENTION:
            for m in "qkvo":
                inner[f"self_attn.{m}_proj.weight"] = n[f"attn.{m}"]
            inner |= {f"self_attn.{m}_norm.weight": (s.head_dim,) for m in "qk"}
        else:
            for m in ("qkv", "z", "a", "b"):
                inner[f"linear_attn.in_proj_{m}.weight"] = n[f"gdn.{m}"]
            inner["linear_attn.out_proj.weight"] = n["gdn.out"]
            inner["linear_attn.conv1d.weight"] = (2 * s.key_dim + s.value_dim, 1, s.conv)
            inner |= {f"linear_attn.{g}": (s.value_heads,) for g in ("A_log", "dt_bias")}
            inner["linear_attn.norm.weight"] = (s.value_head_dim,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in inner.items()}
    shapes |= {"embed_tokens.weight": (s.vocab, s.hidden), "norm.weight": (s.hidden,)}
    out = {}
    for name, shape in shapes.items():
        values = rng.uniform(0.1, 2.5, shape) if name.endswith("A_log") else rng.standard_normal(shape) * 0.05
        if values.ndim == 1:
            values = np.where(np.abs(values) < 2.0**-16, 0.5, values)  # below, 1 + w loses bits of w
        out[name] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return out


def tiled(a: np.ndarray, s: Sizes, axis: int, width: int, before: int = 0) -> np.ndarray:
    """Value heads of `width` along an axis, after `before` others, as GGUF has them: head j of every key head first."""
    r = s.value_heads // s.key_heads
    at = [*range(before)]
    for j in range(r):
        for g in range(s.key_heads):
            first = before + (g * r + j) * width
            at += range(first, first + width)
    return a.take(at, axis)


def converted(name: str, a: np.ndarray, s: Sizes) -> np.ndarray:
    """A tensor of the release as a converter would store it, in float32."""
    keys = 2 * s.key_dim
    if name.endswith("A_log"):
        a = -np.exp(a)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        a = a + np.float32(1)
    if "conv1d" in name:
        a = tiled(a.squeeze(1), s, 0, s.value_head_dim, keys)
    if "in_proj_qkv" in name:
        a = tiled(a, s, 0, s.value_head_dim, keys)
    if "in_proj_z" in name:
        a = tiled(a, s, 0, s.value_head_dim)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        a = tiled(a, s, 0, 1)
    if "linear_attn.out_proj" in name:
        a = tiled(a, s, 1, s.value_head_dim)
    return a


def gguf_name(name: str) -> str:
    whole = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, inner = name.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[inner]}"


def is_projection(name: str) -> bool:
    return "_proj" in name


def metadata(writer: GGUFWriter, s: Sizes, prediction: int = 0) -> None:
    writer.add_block_count(s.layers + prediction)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_ssm_conv_kernel(s.conv)
    writer.add_ssm_state_size(s.key_head_dim)
    writer.add_ssm_group_count(s.key_heads)
    writer.add_ssm_time_step_rank(s.value_heads)
    writer.add_ssm_inner_size(s.value_dim)
    writer.add_full_attention_interval(s.interval)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "bc", "é"])
    if prediction:
        writer.add_nextn_predict_layers(prediction)


def stored(form: str, w: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """A weight in a format as the bytes of a GGUF tensor, and its tensor scale."""
    if form == "bf16":
        return w.astype(ml_dtypes.bfloat16).view(np.uint8), None
    made = get("q2_0_g128" if form == "pq2_0" else form).quantize(np.ascontiguousarray(w))
    return made["blocks"], made.get("global_scale")


def finish(writer: GGUFWriter, path: Path, types: Mapping[str, tuple[int, tuple[int, ...]]]) -> Path:
    """Write the file, then give tensors that were added as bytes (I8) the types and shapes that gguf has not."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    for name, (kind, shape) in types.items():
        key = struct.pack("<Q", len(name)) + name.encode()
        at = data.index(key) + len(key)
        struct.pack_into(f"<I{len(shape)}QI", data, at, len(shape), *shape[::-1], kind)
    path.write_bytes(data)
    return path


def write_qwen35(
    path: Path,
    s: Sizes,
    model: Arrays,
    form: str | Mapping[str, str] = "bf16",
    *,
    scales: bool = True,
    extra: Arrays | None = None,
) -> Path:
    """A model as a GGUF file, its projections in a format, or each in its own by the last part of its module.

    Without `scales` the tensor scales of NVFP4 are left out; `extra` are float32 tensors by their names in the file.
    """
    writer = GGUFWriter(path, "qwen35")
    metadata(writer, s)
    patches = {}
    for name, a in model.items():
        a, here = converted(name, a, s), gguf_name(name)
        if not is_projection(name) or name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            if a.ndim == 2 and "conv" not in name:
                writer.add_tensor(here, stored("bf16", a)[0], raw_dtype=GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(here, a.astype(np.float32))
            continue
        f = form if isinstance(form, str) else form.get(name.split(".")[-2], "bf16")
        blocks, scale = stored(f, a)
        if f in TERNARY:
            patches[here] = (TERNARY[f], a.shape)
            writer.add_tensor(here, blocks.view(np.int8))
        else:
            writer.add_tensor(here, blocks, raw_dtype=GGMLQuantizationType[KINDS[f]])
        if scale is not None and scales:
            writer.add_tensor(here.replace(".weight", ".scale"), scale.reshape(1))
    for name, a in (extra or {}).items():
        writer.add_tensor(name, a)
    return finish(writer, path, patches)


def write_headers(path: Path, s: Sizes, merges: int, tokens: int) -> int:
    """A model of these sizes in Q2_0 of groups of 128 as metadata and tensor entries, with a hole for the data;
    returns how many tensors it has."""
    writer = GGUFWriter(path, "qwen35")
    metadata(writer, s)
    del writer.kv_data[0]["tokenizer.ggml.tokens"]
    writer.add_token_list([f"token {i}" for i in range(tokens)])
    writer.add_token_merges([f"t{i} x" for i in range(merges)])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.close()
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (s.vocab, s.hidden),
        "output.weight": (s.vocab, s.hidden),
        "output_norm.weight": (s.hidden,),
    }
    for i, layer in enumerate(layout_of(s).layers):
        shapes |= {f"blk.{i}.{GGUF_NAMES[w.module + '.weight']}": (w.n, w.k) for w in layer.weights}
        shapes |= {f"blk.{i}.{GGUF_NAMES[o.name]}": tuple(e for e in o.shape if e != 1) for o in layer.others}
    head, at = bytearray(path.read_bytes()), 0
    for name, shape in shapes.items():
        kind, size = 0, 4 * int(np.prod(shape))
        if "ssm_alpha" in name or "ssm_beta" in name:
            kind, size = 30, size // 2
        elif len(shape) == 2 and "conv" not in name:
            kind, size = 42, size // 4 // 128 * 34
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, at)
        at += size + -size % 32
    struct.pack_into("<Q", head, 8, len(shapes))
    head += bytes(-len(head) % 32)
    path.write_bytes(head)
    os.truncate(path, len(head) + at)
    return len(shapes)
