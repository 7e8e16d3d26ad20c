"""Models by name: config.json of releases, and of small models of each family.

Sizes of Qwen3 and Llama are those of the published configs; of Gemma 4 31B also the heads, 16 sliding and 4 full KV
heads of 256 and 512, full layers without a v.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import cycle, islice
from typing import Any

from atlas_lab.checkpoint import keys
from atlas_lab.checkpoint.family import Family
from atlas_lab.checkpoint.gemma import GEMMA
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.sizes import SIZES, sizes
from atlas_lab.checkpoint.transformer import LLAMA, QWEN3

Config = dict[str, Any]


def _plain(
    kind: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    vocab: int,
    tied: bool,
) -> Config:
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _gemma4(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], head_dims: tuple[int, int], vocab: int
) -> Config:
    text = {
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_global_key_value_heads": heads[2],
        "head_dim": head_dims[0],
        "global_head_dim": head_dims[1],
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    return {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}


_CONFIGS: dict[str, tuple[Family, Config]] = {
    "qwen3-8b": (QWEN3, _plain("qwen3", 4096, 12288, 36, (32, 8), 128, 151936, False)),
    "qwen3-4b": (QWEN3, _plain("qwen3", 2560, 9728, 36, (32, 8), 128, 151936, True)),
    "qwen3-1.7b": (QWEN3, _plain("qwen3", 2048, 6144, 28, (16, 8), 128, 151936, True)),
    "llama-3-8b": (LLAMA, _plain("llama", 4096, 14336, 32, (32, 8), 128, 128256, False)),
    "llama-3-70b": (LLAMA, _plain("llama", 8192, 28672, 80, (64, 8), 128, 128256, False)),
    "gemma-4-31b": (GEMMA, _gemma4(5376, 21504, 60, (32, 16, 4), (256, 512), 262144)),
    # Of no release: every kind of layer in a few megabytes.
    "tiny-qwen3": (QWEN3, _plain("qwen3", 256, 384, 2, (4, 2), 64, 512, True)),
    "tiny-llama": (LLAMA, _plain("llama", 256, 384, 2, (4, 2), 64, 512, False)),
    "tiny-gemma": (GEMMA, _gemma4(256, 384, 6, (4, 4, 2), (64, 128), 512)),
}

NAMES = (*SIZES, *_CONFIGS)


def model(name: str, **overrides: Any) -> tuple[Family, Config]:
    """The family and config.json of a model by name, with some sizes replaced: fields of `Sizes`, of other families
    `layers`, `hidden`, `intermediate` and `vocab` alone. Raises CheckpointError naming the nearest."""
    if name in SIZES:
        return QWEN35, sizes(name, **overrides).config()
    if name not in _CONFIGS:
        near = get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CheckpointError(f"model: found {name!r}, expected one of {', '.join(NAMES)}{hint}")
    family, config = _CONFIGS[name]
    known = {"layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size"}
    known["vocab"] = "vocab_size"
    for key in overrides:
        if key not in known:
            raise CheckpointError(f"model {name}: found {key!r}, expected one of {', '.join(known)}")
    given = {known[key]: value for key, value in overrides.items()}
    text = {**config.get("text_config", config), **given}
    if "layer_types" in text:
        text["layer_types"] = list(islice(cycle(text["layer_types"]), keys.layers(text)))
    made = {**config, "text_config": text} if "text_config" in config else text
    family.layout(made)  # raises for sizes that no model has
    return family, made
