"""Reading sizes from a config.json: every fault names the key, what was found and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas_lab.checkpoint.json_object import CheckpointError, brief, is_integer

MOST_LAYERS = 10_000  # far above any model, far below what a loop over layers would hang on

# Activations of a gated FFN by their names in config.json.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

LIMIT = "swiglu_limit"
MOST_LIMIT = 1e38

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model, nested or not; raises CheckpointError."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config: found {brief(text)}, expected an object")
    return text


def positive(value: object, key: str) -> int:
    """The integer of 1 or more that a key holds; raises CheckpointError."""
    if not isinstance(value, int) or not is_integer(value) or value < 1:
        raise CheckpointError(f"{key}: found {brief(value)}, expected an integer of 1 or more")
    return value


def size(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The size under a key, `default` where it is unset; raises CheckpointError."""
    value = text.get(key)
    if value is None and default is None:
        raise CheckpointError(f"config.json: {key}: missing, expected an integer of 1 or more")
    return positive(default if value is None else value, f"config.json: {key}")


def count(text: Mapping[str, Any], key: str) -> int:
    """The integer of 0 or more under a key, 0 where it is unset; raises CheckpointError."""
    value = text.get(key)
    if value is None or (is_integer(value) and value == 0):
        return 0
    return positive(value, f"config.json: {key}")


def layers(text: Mapping[str, Any]) -> int:
    found = size(text, "num_hidden_layers")
    if found > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers: found {found}, expected at most {MOST_LAYERS}")
    return found


def layer_types(text: Mapping[str, Any], kinds: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of every layer; raises CheckpointError for one that is none of `kinds`, by its name."""
    found = text.get("layer_types")
    if found is None:
        return default
    if not isinstance(found, list | tuple):
        raise CheckpointError(f"config.json: layer_types: found {brief(found)}, expected a list")
    if len(found) != len(default):
        raise CheckpointError(f"config.json: layer_types: found {len(found)} entries, expected {len(default)}")
    for i, kind in enumerate(found):
        if kind not in kinds:
            raise CheckpointError(f"config.json: layer_types[{i}]: found {brief(kind)}, expected {' or '.join(kinds)}")
    return tuple(found)


def heads(text: Mapping[str, Any], many: str, few: str) -> tuple[int, int]:
    """Query heads and KV heads, as many where those are unset; raises CheckpointError unless they divide."""
    q = size(text, many)
    kv = size(text, few, q)
    if q % kv:
        raise CheckpointError(f"config.json: {many}: found {q}, expected a multiple of the {kv} of {few}")
    return q, kv


def activation(text: Mapping[str, Any], *keys: str, default: str = "silu") -> str:
    """`silu` or `gelu_tanh`; raises CheckpointError for another."""
    for key in keys:
        found = text.get(key)
        if found is not None:
            if not isinstance(found, str) or found not in ACTIVATIONS:
                expected = " or ".join(ACTIVATIONS)
                raise CheckpointError(f"config.json: {key}: found {brief(found)}, expected {expected}")
            return ACTIVATIONS[found]
    return default


def activation_limit(text: Mapping[str, Any]) -> float:
    """What the inputs of the gated product are clamped at, 0 for no clamp: `swiglu_limit` of DeepSeek-V4 and GLM.
    Raises CheckpointError."""
    found = text.get(LIMIT)
    return 0.0 if found is None else limit(found, f"config.json: {LIMIT}")


def limit(value: object, key: str) -> float:
    """The number of 0 or more, and that BF16 holds, under a key; raises CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_LIMIT:
        raise CheckpointError(f"{key}: found {brief(value)}, expected a number from 0 to {MOST_LIMIT:g}")
    return float(value)


def tied(config: Mapping[str, Any], default: bool) -> bool:
    """Whether the output head is the embedding; of a nested config the text model's word comes first."""
    for part in (text_config(config), config):
        found = part.get("tie_word_embeddings")
        if found is not None:
            if not isinstance(found, bool):
                raise CheckpointError(f"config.json: tie_word_embeddings: found {brief(found)}, expected true or false")
            return found
    return default


def refuse_experts(text: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a model whose layers hold experts."""
    for key in _EXPERTS:
        found = text.get(key)
        if found is not None and (not is_integer(found) or found > 0):
            raise CheckpointError(
                f"config.json: {key}: found {brief(found)}, expected none: no mixture of experts is supported"
            )
