"""Checkpoints whose weights are stored in any convention that is read, each its own, by the tensors alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import DTYPES

Arrays = dict[str, np.ndarray]

PREFIX = "model.language_model.layers."
CONFIG = {
    "model_type": "qwen3_5", "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FFN = {"mlp.gate_proj": (384, 256), "mlp.up_proj": (384, 256), "mlp.down_proj": (256, 384)}
LINEAR = {f"linear_attn.{m}": shape for m, shape in {
    "in_proj_qkv": (256, 256), "in_proj_z": (128, 256), "in_proj_b": (2, 256), "in_proj_a": (2, 256),
    "out_proj": (256, 128)}.items()}  # fmt: skip
FULL = {f"self_attn.{m}": shape for m, shape in {
    "q_proj": (512, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256)}.items()}  # fmt: skip
SHAPES = {f"{PREFIX}{i}.{m}": shape for i in range(2) for m, shape in ((FULL if i else LINEAR) | FFN).items()}


def stored(form: str, scale: str = "", reshape: Callable[[np.ndarray], np.ndarray] = lambda s: s, dtype: str = "f32",
           **inputs: tuple[int, ...]) -> tuple[str, Callable[[np.ndarray], Arrays]]:  # fmt: skip
    """How a weight is stored: its format, and its arrays by suffix. `scale` is the suffix of an FP8 scale, `inputs` are
    scales of activations with their shapes."""
    names = {"weight": "weight", "scale": scale or "weight_scale", "global_scale": "weight_scale_2"}
    if form == "nvfp4_ct":
        names |= {"weight": "weight_packed", "global_scale": "weight_global_scale"}

    def make(w: np.ndarray) -> Arrays:
        made = dict(get(form).quantize(w))
        if form.startswith("fp8"):
            made["scale"] = reshape(made["scale"].astype(DTYPES[dtype].numpy))
        return {names[f]: a for f, a in made.items()} | {n: np.ones(s, np.float32) for n, s in inputs.items()}

    return form, make


def rank4(s: np.ndarray) -> np.ndarray:
    return s[:, None, :, None]


CONVENTIONS = {
    "bf16": stored("bf16"),
    "hf block, bf16 scales": stored("fp8", "weight_scale_inv", dtype="bf16"),
    "hf block": stored("fp8", "weight_scale_inv"),
    "hf tensor": stored("fp8_tensor", "weight_scale_inv", activation_scale=()),
    "ct block": stored("fp8", dtype="bf16"),
    "ct channel": stored("fp8_row", dtype="bf16"),
    "ct tensor": stored("fp8_tensor", reshape=lambda s: s.reshape(1), input_scale=(1,)),
    "modelopt tensor": stored("fp8_tensor", input_scale=()),
    "modelopt channel": stored("fp8_row", reshape=lambda s: s.reshape(-1)),
    "modelopt block, rank 4": stored("fp8", reshape=rank4),
    "modelopt block, rank 4, inv": stored("fp8", "weight_scale_inv", reshape=rank4),
    "modelopt nvfp4": stored("nvfp4", input_scale=()),
    "modelopt nvfp4, weights only": stored("nvfp4"),
    "ct nvfp4": stored("nvfp4_ct", input_global_scale=(1,)),
    "ct nvfp4, weights only": stored("nvfp4_ct"),
}


def write_mixed(
    folder: Path, held: Mapping[str, str], extra: Mapping[str, np.ndarray] = {}, **config: object
) -> Arrays:
    """Write a checkpoint with the module named by each key of `held` in the convention it says; its arrays by name.
    `extra` are further tensors, `config` further keys of config.json."""
    arrays: Arrays = dict(extra)
    for i, (module, convention) in enumerate(held.items()):
        rng = np.random.default_rng(i)
        w = (rng.standard_normal(SHAPES[module]) * 0.02).astype(ml_dtypes.bfloat16).astype(np.float32)
        arrays |= {f"{module}.{suffix}": a for suffix, a in CONVENTIONS[convention][1](w).items()}
    names = {d.numpy: name for name, d in DTYPES.items()}
    handles = tuple(Tensor(names[a.dtype], a.shape, n) for n, a in arrays.items())
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, [Group(handles, lambda: arrays)], {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return arrays
