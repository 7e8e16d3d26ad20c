"""A GGUF file of the Qwen3.5 family with ternary projections, headers over holes, as PrismML's converter names them.

Gates and output head are BF16 and norms float32. Written out here: our reader is what it is read with.
"""

from __future__ import annotations

import struct
from pathlib import Path

from atlas_lab.checkpoint.sizes import ATTENTION, Sizes

F32, BF16, Q2_0 = 0, 30, 42
BLOCKS = {64: 18, 128: 34}
UINT32, FLOAT32, STRING = 4, 6, 8
ALIGNMENT = 32


def write_headers(path: Path, s: Sizes, group: int) -> None:
    """Q2_0 in blocks of `group` weights; both sizes are type 42, told apart by the bytes between tensors."""
    infos, at = [], 0
    for name, shape, kind in tensors(s):
        infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, at))
        weights = 1
        for extent in shape:
            weights *= extent
        size = {F32: 4 * weights, BF16: 2 * weights, Q2_0: weights // group * BLOCKS[group]}[kind]
        at += -(-size // ALIGNMENT) * ALIGNMENT
    keys = metadata(s)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    head += bytes(-len(head) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + at)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def metadata(s: Sizes) -> list[bytes]:
    numbers = {
        "block_count": s.layers,
        "embedding_length": s.hidden,
        "feed_forward_length": s.intermediate,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "ssm.conv_kernel": s.conv,
        "ssm.state_size": s.key_head_dim,
        "ssm.group_count": s.key_heads,
        "ssm.time_step_rank": s.value_heads,
        "ssm.inner_size": s.value_dim,
        "full_attention_interval": s.interval,
    }
    out = [text("general.architecture") + struct.pack("<I", STRING) + text("qwen35")]
    out += [text(f"qwen35.{k}") + struct.pack("<II", UINT32, v) for k, v in numbers.items()]
    return [*out, text("qwen35.attention.layer_norm_rms_epsilon") + struct.pack("<If", FLOAT32, 1e-6)]


def tensors(s: Sizes) -> list[tuple[str, tuple[int, ...], int]]:
    n, mixed = s.shapes, 2 * s.key_dim + s.value_dim
    out: list[tuple[str, tuple[int, ...], int]] = [("token_embd.weight", (s.vocab, s.hidden), BF16)]
    for i in range(s.layers):
        inner: list[tuple[str, tuple[int, ...], int]] = [
            ("attn_norm.weight", (s.hidden,), F32),
            ("post_attention_norm.weight", (s.hidden,), F32),
            *((f"ffn_{m}.weight", n[f"ffn.{m}"], Q2_0) for m in ("gate", "up", "down")),
        ]
        if s.kind(i) == ATTENTION:
            names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
            inner += [(f"{name}.weight", n[f"attn.{r}"], Q2_0) for r, name in names.items()]
            inner += [(f"attn_{r}_norm.weight", (s.head_dim,), F32) for r in "qk"]
        else:
            names = {"qkv": "attn_qkv", "z": "attn_gate", "out": "ssm_out"}
            inner += [(f"{name}.weight", n[f"gdn.{r}"], Q2_0) for r, name in names.items()]
            inner += [(f"ssm_{name}.weight", n[f"gdn.{r}"], BF16) for r, name in (("a", "alpha"), ("b", "beta"))]
            inner += [("ssm_conv1d.weight", (mixed, s.conv), F32), ("ssm_norm.weight", (s.value_head_dim,), F32)]
            inner += [("ssm_a", (s.value_heads,), F32), ("ssm_dt.bias", (s.value_heads,), F32)]
        out += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in inner]
    return [*out, ("output_norm.weight", (s.hidden,), F32), ("output.weight", (s.vocab, s.hidden), BF16)]
