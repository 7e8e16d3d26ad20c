"""The dense Qwen3.5 family (3.5, 3.6, 3.8): which tensors are which projections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from atlas_lab.checkpoint.json_object import CheckpointError, brief, is_integer
from atlas_lab.checkpoint.naming import BF16, KEPT, Convention, convention
from atlas_lab.checkpoint.recognise import recognise
from atlas_lab.checkpoint.sizes import ATTENTION, FAMILY, GATED_DELTA_NET, MODEL_TYPE, TEXT_MODEL_TYPE, Sizes
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.tensor import Tensor

# The whole model nests its language part; a text-only export does not.
PREFIX = "model.language_model.layers."
TEXT_PREFIX = "model.layers."

# Modules of a layer by role.
MODULES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "gdn.qkv": "linear_attn.in_proj_qkv",
    "gdn.z": "linear_attn.in_proj_z",
    "gdn.b": "linear_attn.in_proj_b",
    "gdn.a": "linear_attn.in_proj_a",
    "gdn.out": "linear_attn.out_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}

# Roles that share an input, in the order in which a layer needs them, by its kind.
_FFN = (("ffn.gate", "ffn.up"), ("ffn.down",))
SITES: dict[str, tuple[tuple[str, ...], ...]] = {
    ATTENTION: (("attn.q", "attn.k", "attn.v"), ("attn.o",), *_FFN),
    GATED_DELTA_NET: (("gdn.qkv", "gdn.z", "gdn.b", "gdn.a"), ("gdn.out",), *_FFN),
}

# Key of config.json by which a checkpoint of part of a model says which: {"layers": [...], "roles": [...]}.
PART = "atlas_lab_part"

# What no projection reads, by a pattern of its name.
_MEANINGS = (
    (r"(^|\.)visual\.", "vision tower, not used"),
    (r"^mtp\.", "multi-token prediction, not used"),
    (r"\.(input_scale|input_global_scale)$", "scale of activations"),
    (r"\.(k_scale|v_scale)$", "scale of the KV cache"),
    (r"embed_tokens\.weight$", "embedding"),
    (r"^lm_head\.", "output head"),
    (r"\.linear_attn\.conv1d\.weight$", "convolution"),
    (r"\.linear_attn\.(A_log|dt_bias)$", "gates"),
    (r"norm\.weight$", "norm"),
)


class Qwen35:
    """The family, a `ModelFamily`: the built-in plugin provides it through `atlas_models`."""

    family = FAMILY

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in (MODEL_TYPE, TEXT_MODEL_TYPE)

    def dims(self, config: Mapping[str, Any]) -> ModelDims:
        """Raises CheckpointError naming a key of config.json."""
        return Sizes.of(config).dims

    def sites(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Site]:
        """The model's sites, layer by layer; raises CheckpointError, naming the tensor, where one is missing, is in no
        supported convention, or has another shape than config.json says."""
        s = Sizes.of(config)
        prefix = _prefix(tensors)
        return [
            Site(tuple(_projection(s, prefix, layer, role, tensors) for role in roles))
            for layer, roles in selected(s, *_part(config))
        ]

    def meaning(self, name: str) -> str:
        """What a tensor that no projection reads is for."""
        return next((text for pattern, text in _MEANINGS if re.search(pattern, name)), "unknown")


QWEN35 = Qwen35()


def module(prefix: str, layer: int, role: str) -> str:
    """The name of a projection's module."""
    return f"{prefix}{layer}.{MODULES[role]}"


def selected(
    s: Sizes, layers: Iterable[int] | None = None, roles: Sequence[str] | None = None
) -> list[tuple[int, tuple[str, ...]]]:
    """Layer and roles of every site among `layers` and `roles` (patterns: `ffn.*`), None for all; raises
    CheckpointError for a layer that the model has not, and for a pattern that none of these layers has."""
    chosen = list(range(s.layers)) if layers is None else sorted(set(layers))
    for layer in chosen:
        if not (is_integer(layer) and 0 <= layer < s.layers):
            raise CheckpointError(f"layers: found {brief(layer)}, expected 0 to {s.layers - 1}")
    patterns = ("*",) if roles is None else tuple(roles)
    sites = [(layer, group) for layer in chosen for group in SITES[s.kind(layer)]]
    held = {role for _, group in sites for role in group}
    for p in patterns:
        if not any(fnmatchcase(role, p) for role in held):
            raise CheckpointError(f"roles: found {brief(p)}, expected some of {', '.join(sorted(held))}")
    kept = [(layer, tuple(r for r in group if any(fnmatchcase(r, p) for p in patterns))) for layer, group in sites]
    return [(layer, group) for layer, group in kept if group]


def convention_of(role: str, c: Convention) -> Convention:
    """How a role's weight is stored in a checkpoint of convention `c`: some stay BF16 in every release."""
    return BF16 if role in KEPT else c


def synthetic_sites(
    s: Sizes,
    format_name: str,
    layers: Iterable[int] | None = None,
    roles: Sequence[str] | None = None,
    *,
    producer: str = "",
    text_only: bool = False,
) -> list[Site]:
    """The sites of a model in a format, as handles: what `sites` finds in a checkpoint that `write_checkpoint` makes
    with the same arguments. Raises CheckpointError."""
    c = convention(format_name, producer)
    prefix = TEXT_PREFIX if text_only else PREFIX

    def projection(layer: int, role: str) -> Projection:
        n, k = s.shapes[role]
        return Projection(layer, role, n, k, convention_of(role, c).source(module(prefix, layer, role), n, k))

    return [Site(tuple(projection(layer, r) for r in group)) for layer, group in selected(s, layers, roles)]


def auxiliary(s: Sizes, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's other tensors by their name within the layer; all are BF16 on disk."""
    out: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (s.hidden,),
        "post_attention_layernorm.weight": (s.hidden,),
    }
    if s.kind(layer) == ATTENTION:
        return out | {"self_attn.q_norm.weight": (s.head_dim,), "self_attn.k_norm.weight": (s.head_dim,)}
    return out | {
        "linear_attn.conv1d.weight": (2 * s.key_dim + s.value_dim, 1, s.conv),
        "linear_attn.A_log": (s.value_heads,),
        "linear_attn.dt_bias": (s.value_heads,),
        "linear_attn.norm.weight": (s.value_head_dim,),
    }


def _prefix(tensors: Mapping[str, Tensor]) -> str:
    found = [p for p in (PREFIX, TEXT_PREFIX) if any(name.startswith(p) for name in tensors)]
    if len(found) != 1:
        held = " and ".join(f"{p}*" for p in found) or "no tensor of a layer"
        raise CheckpointError(f"found {held}, expected tensors named {PREFIX}* or {TEXT_PREFIX}*")
    return found[0]


def _part(config: Mapping[str, Any]) -> tuple[list[int] | None, list[str] | None]:
    part = config.get(PART)
    if part is None:
        return None, None
    layers, roles = (part.get("layers"), part.get("roles")) if isinstance(part, Mapping) else (None, None)
    if not isinstance(layers, list) or not isinstance(roles, list) or not all(isinstance(r, str) for r in roles):
        raise CheckpointError(f"config.json: {PART}: found {brief(part)}, expected lists of layers and roles")
    return layers, roles


def _projection(s: Sizes, prefix: str, layer: int, role: str, tensors: Mapping[str, Tensor]) -> Projection:
    name = module(prefix, layer, role)
    n, k = s.shapes[role]
    weight = recognise(tensors, name)
    if weight is None:
        kind = "" if role.startswith("ffn.") else f" of a {s.kind(layer)} layer"
        raise CheckpointError(f"{name}.weight: missing, expected the [{n}, {k}] weight of layers.{layer}.{role}{kind}")
    if f"{name}.bias" in tensors:
        raise CheckpointError(f"{name}.bias: found a bias, expected none in this family")
    codes = weight["weight"]
    rows, width = codes.shape
    found = (rows, width * 2 if codes.dtype == "u8" else width)
    if found != (n, k):
        raise CheckpointError(
            f"{codes.name}: found a weight {list(found)}, expected {[n, k]} by config.json for layers.{layer}.{role}"
        )
    return Projection(layer, role, n, k, weight)
