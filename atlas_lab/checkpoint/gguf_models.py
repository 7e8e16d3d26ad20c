"""What architectures of GGUF files call tensors and sizes, in the names of the releases that they were made from.

Names are those of gguf's `constants.py` and `tensor_mapping.py`, keys those that `conversion/qwen.py` and `llama.py` of
ggml-org/llama.cpp write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atlas_lab.checkpoint.gguf_file import Value
from atlas_lab.checkpoint.json_object import CheckpointError, brief
from atlas_lab.checkpoint.sizes import TEXT_MODEL_TYPE

Config = dict[str, Any]

MOST_LAYERS = 10_000  # far above any model, far below what a loop over layers would hang on
HADAMARD = "prism.hadamard."
EMBED, HEAD = "token_embd.weight", "output.weight"

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {**_ATTENTION, "ffn_norm": "post_attention_layernorm"}
_QWEN35 = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # names without a suffix of ours
_PREDICTION = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` is read: names of its layers' modules, its sizes, and whether converters rewrote
    values (`gguf_rewrites`)."""

    name: str
    modules: Mapping[str, str]
    config: Callable[[Mapping[str, Value]], Config]
    whole: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, name: str, layers: int) -> tuple[str, str]:
        """Module and suffix (`weight`, `bias`, `scale`, `input_scale`; empty where the module is the whole name) of a
        tensor in the release; its own name and no suffix for one that the release has not.

        Layers past the model's own are those of its multi-token prediction head.
        """
        found = _LAYER.fullmatch(name)
        inner = found[2] if found else name
        stem, _, suffix = inner.rpartition(".")
        if not found:
            return (_MODEL[stem], suffix) if stem in _MODEL else (name, "")
        i = int(found[1])
        if i == layers and stem in _PREDICTION:
            return _PREDICTION[stem], suffix
        root = f"model.layers.{i}" if i < layers else f"mtp.layers.{i - layers}"
        if inner in self.whole:
            return f"{root}.{self.whole[inner]}", ""
        return (f"{root}.{self.modules[stem]}", suffix) if stem in self.modules else (name, "")


def architecture(metadata: Mapping[str, Value]) -> Architecture:
    """The architecture that a file says it has; raises CheckpointError, also where its weights are not stored as they
    multiply and where it is part of a model."""
    found = metadata.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        expected = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"general.architecture: found {brief(found)}, expected one of {expected}")
    rotated = next((key for key in metadata if key.startswith(HADAMARD)), None)
    if rotated:
        raise CheckpointError(
            f"{rotated}: found weights that are stored under a Walsh-Hadamard transform, expected weights as they "
            "multiply: their inputs would have to be transformed too, and no kernel here does that"
        )
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(f"split.count: found one of {parts} files, expected the whole model in one")
    return ARCHITECTURES[found]


@dataclass(frozen=True)
class _Keys:
    """The metadata of one architecture."""

    metadata: Mapping[str, Value]
    name: str

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of 1 or more; of a list with one value a layer, the one that all layers that have any share."""
        full = f"{self.name}.{key}"
        found = self.metadata.get(full, default)
        if isinstance(found, tuple):
            several = sorted({v for v in found if v != 0})
            found = several[0] if len(several) == 1 else found
        if found is None:
            raise CheckpointError(f"{full}: missing, expected an integer of 1 or more")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise CheckpointError(f"{full}: found {brief(found)}, expected an integer of 1 or more")
        return found

    def count(self, key: str) -> int:
        """An integer of 0 or more, 0 where it is unset."""
        found = self.metadata.get(f"{self.name}.{key}", 0)
        return 0 if found == 0 else self.size(key)

    def common(self) -> Config:
        """The sizes that every architecture states."""
        if self.count("expert_count"):
            raise CheckpointError(f"{self.name}.expert_count: found experts, expected none: they are not supported")
        layers = self.size("block_count")
        if layers > MOST_LAYERS:
            raise CheckpointError(f"{self.name}.block_count: found {layers}, expected at most {MOST_LAYERS}")
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        return {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": self.size("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv", heads),
            "head_dim": self._head_dim(max(1, hidden // heads)),
            "hidden_act": "silu",
        }

    def _head_dim(self, default: int) -> int:
        key, value = (self.size(f"attention.{which}_length", default) for which in ("key", "value"))
        if key != value:
            raise CheckpointError(f"{self.name}.attention.value_length: found {value}, expected key_length {key}")
        return key


def _plain(name: str) -> Callable[[Mapping[str, Value]], Config]:
    return lambda metadata: {"model_type": name, **_Keys(metadata, name).common()}


def _qwen35(metadata: Mapping[str, Value]) -> Config:
    """A text-only config.json of the Qwen3.5 family."""
    keys = _Keys(metadata, "qwen35")
    config = {"model_type": TEXT_MODEL_TYPE, **keys.common()}
    prediction = keys.count("nextn_predict_layers")
    if prediction >= config["num_hidden_layers"]:
        found = f"qwen35.nextn_predict_layers: found {prediction}"
        raise CheckpointError(f"{found}, expected fewer than the {config['num_hidden_layers']} of block_count")
    config["num_hidden_layers"] -= prediction
    if prediction:
        config["mtp_num_hidden_layers"] = prediction
    heads, width = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if width % heads:
        raise CheckpointError(f"qwen35.ssm.inner_size: found {width}, expected a multiple of time_step_rank {heads}")
    groups = keys.size("ssm.group_count")
    if heads % groups:
        raise CheckpointError(f"qwen35.ssm.time_step_rank: found {heads}, expected a multiple of group_count {groups}")
    return config | {
        "full_attention_interval": keys.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": width // heads,
    }


ARCHITECTURES = {
    "qwen35": Architecture("qwen35", _QWEN35, _qwen35, _QWEN35_WHOLE),
    "qwen3": Architecture("qwen3", _PLAIN, _plain("qwen3")),
    "llama": Architecture("llama", _PLAIN, _plain("llama")),
}
