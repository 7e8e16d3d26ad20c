"""What converters to GGUF change in a model's tensors, and how a reader undoes it.

qwen35 (`conversion/qwen.py` of ggml-org/llama.cpp): A_log is stored as -exp(A_log), a norm as 1 + w but for the gated
delta net's own, and where there are more value heads than key heads, whatever is laid out by value heads has them tiled
(head j of every key head, then head j + 1 of every key head) and not grouped (all heads of a key head, then of the
next). llama (`llama.py`): rows of q and k of a head have the two halves of its rotary pairs interleaved.

Orders are put back without touching a value: by whole rows, and for columns by whole blocks where a head is made of
them. A head that shares a block with another could only be moved by quantizing anew; it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.checkpoint.gguf_file import Entry
from atlas_lab.checkpoint.json_object import CheckpointError


@dataclass(frozen=True)
class Rewrite:
    """How a stored tensor becomes the release's: which stored rows, which stored columns (elements of its dtype) it
    takes, in order; values; and the shape where that differs. `words` say it."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Callable[[np.ndarray, str], np.ndarray] | None = None
    shape: tuple[int, ...] = ()
    words: str = ""


AS_STORED = Rewrite()

_ROTARY = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def rewrite(architecture: str, config: Mapping[str, Any], name: str, e: Entry) -> Rewrite:
    """What undoes the converter for the tensor that the release calls `name`; raises CheckpointError where nothing
    can."""
    if architecture == "qwen35":
        return _qwen35(config, name, e)
    heads = next((key for module, key in _ROTARY.items() if module in name), None)
    if architecture == "llama" and heads and e.name.endswith((".weight", ".bias")):
        return Rewrite(rows=_rotary_rows(config[heads], e), words="rotary halves put apart")
    return AS_STORED


def _rotary_rows(heads: int, e: Entry) -> np.ndarray:
    """Stored row of each row: of a head, row i of the first half is stored at 2i, of the second at 2i + 1."""
    n = e.shape[0]
    if n % (2 * heads):
        raise CheckpointError(f"{e.name}: found {n} rows, expected an even number for each of {heads} heads")
    rows: np.ndarray = np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows


def _qwen35(config: Mapping[str, Any], name: str, e: Entry) -> Rewrite:
    if name.endswith(_NORMS) and not name.endswith(".linear_attn.norm.weight"):
        return Rewrite(values=_less_one, words="1 taken from 1 + w")
    module, _, suffix = name.rpartition(".linear_attn.")[2].partition(".")
    if ".linear_attn." not in name or suffix == "input_scale" or suffix == "weight_scale_2":
        return AS_STORED
    width = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]  # rows of q and k, which stay
    grouped = "value heads grouped"
    if module == "A_log":
        return Rewrite(_value_heads(config, e, 0, 1), values=_log_of_negative, words=f"log of -x, {grouped}")
    if module in ("dt_bias", "in_proj_a", "in_proj_b"):
        return Rewrite(_value_heads(config, e, 0, 1), words=grouped)
    if module == "in_proj_z":
        return Rewrite(_value_heads(config, e, 0, width), words=grouped)
    if module == "in_proj_qkv":
        return Rewrite(_value_heads(config, e, keys, width), words=grouped)
    if module == "conv1d":
        shape = (e.shape[0], 1, *e.shape[1:])
        return Rewrite(_value_heads(config, e, keys, width), shape=shape, words=grouped)
    if module == "out_proj":
        return Rewrite(columns=_value_columns(config, e), words=grouped)
    return AS_STORED


def _less_one(x: np.ndarray, name: str) -> np.ndarray:
    """w of 1 + w, as float32. Exact where the sum was: for a bf16 w of 2^-16 or more, and within 2^-24 below."""
    return x.astype(np.float32) - np.float32(1)


def _log_of_negative(x: np.ndarray, name: str) -> np.ndarray:
    """A_log of -exp(A_log), rounded once to float32."""
    bad = ~((x < 0) & np.isfinite(x))
    if bad.any():
        at = int(bad.argmax())
        raise CheckpointError(f"{name}: found {x[at]:g} at {at}, expected -exp(A_log), finite and below 0")
    return np.log(-x.astype(np.float64)).astype(np.float32)


def _heads(config: Mapping[str, Any]) -> np.ndarray:
    """The stored (tiled) place of each value head, in grouped order."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    places: np.ndarray = np.arange(heads).reshape(heads // groups, groups).T.reshape(-1)
    return places


def _value_heads(config: Mapping[str, Any], e: Entry, before: int, width: int) -> np.ndarray | None:
    """Stored row of each row where value heads of `width` rows follow `before` others; None where none moves."""
    n = before + config["linear_num_value_heads"] * width
    if e.shape[0] != n:
        raise CheckpointError(f"{e.name}: found {e.shape[0]} rows, expected {n} by its value heads")
    places = _heads(config)
    if (places == np.arange(len(places))).all():
        return None
    return np.concatenate([np.arange(before), before + _expanded(places, width)])


def _value_columns(config: Mapping[str, Any], e: Entry) -> np.ndarray | None:
    """Stored column of each column of a weight whose K is value heads; None where none moves."""
    places, width = _heads(config), config["linear_value_head_dim"]
    k = len(places) * width
    if e.shape[-1] != k:
        raise CheckpointError(f"{e.name}: found {e.shape[-1]} columns, expected {k} by its value heads")
    if (places == np.arange(len(places))).all():
        return None
    if width % e.type.block:
        raise CheckpointError(
            f"{e.name}: found value heads of {width} columns in blocks of {e.type.block} ({e.type.name}), expected "
            "whole blocks: the file has them in another order, which only quantizing anew could undo"
        )
    stored = width // e.type.block * e.type.bytes if e.type.dtype == "u8" else width
    return _expanded(places, stored)


def _expanded(places: np.ndarray, width: int) -> np.ndarray:
    rows: np.ndarray = (places[:, None] * width + np.arange(width)).reshape(-1)
    return rows


def described(r: Rewrite) -> str:
    """What was undone, empty where nothing was."""
    moved = r.rows is not None or r.columns is not None
    return r.words if moved or r.values else ""
