"""Sizes of the dense Qwen3.5 family, from presets or from a config.json, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from atlas_lab.checkpoint import keys
from atlas_lab.checkpoint.json_object import CheckpointError, brief
from atlas_lab.core.context import ModelDims

FAMILY = "qwen3.5"
MODEL_TYPE = "qwen3_5"
TEXT_MODEL_TYPE = "qwen3_5_text"

ATTENTION = "full_attention"
GATED_DELTA_NET = "linear_attention"

PREDICTION = "mtp_num_hidden_layers"

# Fields of Sizes by their key in config.json.
KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class Sizes:
    """A model's sizes. `heads` are the query heads of full attention, `key_heads` and `value_heads` those of the gated
    delta net; `layer_types` holds one kind a layer, empty for full attention in every `interval`-th. Without a `vocab`
    the model has no embedding and no output head; `tied` makes them one tensor; `prediction` is the layers of its
    multi-token prediction head; `activation_limit` clamps the inputs of the FFN's gated product (0: no clamp)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    head_dim: int = 256
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv: int = 4
    interval: int = 4
    output_gate: bool = True
    layer_types: tuple[str, ...] = ()
    vocab: int = 0
    tied: bool = False
    prediction: int = 0
    activation_limit: float = 0.0

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            keys.positive(getattr(self, name), key)
        keys.positive(self.interval, "full_attention_interval")
        keys.limit(self.activation_limit, keys.LIMIT)
        if self.vocab != 0:
            keys.positive(self.vocab, "vocab_size")
        for found, key in ((self.layers, KEYS["layers"]), (self.prediction, PREDICTION)):
            if found > keys.MOST_LAYERS:
                raise CheckpointError(f"{key}: found {found}, expected at most {keys.MOST_LAYERS}")
        for many, few in (("heads", "kv_heads"), ("value_heads", "key_heads")):
            if getattr(self, many) % getattr(self, few):
                raise CheckpointError(
                    f"{KEYS[many]}: found {getattr(self, many)}, expected a multiple of the {getattr(self, few)} of "
                    f"{KEYS[few]}"
                )
        if self.layer_types and len(self.layer_types) != self.layers:
            raise CheckpointError(f"layer_types: found {len(self.layer_types)} entries, expected {self.layers}")
        for i, kind in enumerate(self.layer_types):
            if kind not in (ATTENTION, GATED_DELTA_NET):
                expected = f"expected {ATTENTION} or {GATED_DELTA_NET}"
                raise CheckpointError(f"layer_types[{i}]: found {brief(kind)}, {expected}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """The sizes in a config.json, nested under `text_config` or not; raises CheckpointError naming the key."""
        text = keys.text_config(config)
        keys.refuse_experts(text)
        if keys.activation(text, "hidden_act") != "silu":
            raise CheckpointError(f"config.json: hidden_act: found {brief(text['hidden_act'])}, expected silu")
        given = {name: text[key] for name, key in KEYS.items() if text.get(key) is not None}
        if "intermediate" not in given and text.get("moe_intermediate_size") is not None:
            given["intermediate"] = text["moe_intermediate_size"]
        optional = {f.name for f in fields(cls) if f.default is not MISSING}
        for name, key in KEYS.items():
            if name not in given and name not in optional:
                raise CheckpointError(f"config.json: {key}: missing, expected an integer of 1 or more")
        gate = text.get("attn_output_gate")
        if gate is not None and not isinstance(gate, bool):
            raise CheckpointError(f"config.json: attn_output_gate: found {brief(gate)}, expected true or false")
        kinds = text.get("layer_types") or ()
        if not isinstance(kinds, list | tuple):
            raise CheckpointError(f"config.json: layer_types: found {brief(kinds)}, expected a list")
        try:
            return cls(
                **given,
                interval=text.get("full_attention_interval", cls.interval),
                output_gate=gate is not False,
                layer_types=tuple(kinds),
                vocab=keys.count(text, "vocab_size"),
                tied=keys.tied(config, False),
                prediction=keys.count(text, PREDICTION),
                activation_limit=keys.activation_limit(text),
            )
        except CheckpointError as e:
            raise CheckpointError(f"config.json: {str(e).removeprefix('config.json: ')}") from None

    def kind(self, layer: int) -> str:
        """`full_attention` or `linear_attention`."""
        if self.layer_types:
            return self.layer_types[layer]
        return GATED_DELTA_NET if (layer + 1) % self.interval else ATTENTION

    @property
    def dims(self) -> ModelDims:
        """The dimensions that decisions and residency need."""
        attention = sum(self.kind(i) == ATTENTION for i in range(self.layers))
        return ModelDims(
            FAMILY,
            self.hidden,
            self.intermediate,
            self.layers,
            attention,
            self.kv_heads,
            self.head_dim,
            activation_limit=self.activation_limit,
            state_bytes=(self.layers - attention) * self.state_bytes,
        )

    @property
    def state_bytes(self) -> int:
        """What a gated delta net keeps of a sequence: the recurrence's state in float32, and the inputs of the
        convolution that came before, in bf16."""
        state = self.value_heads * self.key_head_dim * self.value_head_dim * 4
        return state + (2 * self.key_dim + self.value_dim) * (self.conv - 1) * 2

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """N and K of every projection by role. With an output gate, q has a gate row for each query row."""
        query = self.heads * self.head_dim
        return {
            "attn.q": (query * (2 if self.output_gate else 1), self.hidden),
            "attn.k": (self.kv_heads * self.head_dim, self.hidden),
            "attn.v": (self.kv_heads * self.head_dim, self.hidden),
            "attn.o": (self.hidden, query),
            "gdn.qkv": (2 * self.key_dim + self.value_dim, self.hidden),
            "gdn.z": (self.value_dim, self.hidden),
            "gdn.b": (self.value_heads, self.hidden),
            "gdn.a": (self.value_heads, self.hidden),
            "gdn.out": (self.hidden, self.value_dim),
            "ffn.gate": (self.intermediate, self.hidden),
            "ffn.up": (self.intermediate, self.hidden),
            "ffn.down": (self.hidden, self.intermediate),
        }

    def config(self, *, text_only: bool = False) -> dict[str, Any]:
        """A config.json with these sizes: that of the whole model, or of a text-only export."""
        text = {key: getattr(self, name) for name, key in KEYS.items()} | {
            "model_type": TEXT_MODEL_TYPE,
            "layer_types": [self.kind(i) for i in range(self.layers)],
            "full_attention_interval": self.interval,
            "attn_output_gate": self.output_gate,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "mamba_ssm_dtype": "float32",
        }
        if self.vocab:
            text |= {"vocab_size": self.vocab, "tie_word_embeddings": self.tied}
        if self.prediction:
            text[PREDICTION] = self.prediction
        if self.activation_limit:
            text[keys.LIMIT] = self.activation_limit
        if text_only:
            return {"architectures": ["Qwen3_5ForCausalLM"], **text}
        architecture = "Qwen3_5ForConditionalGeneration"
        return {"architectures": [architecture], "model_type": MODEL_TYPE, "text_config": text}


_VOCAB = 248320
_27B = Sizes(5120, 17408, 64, 24, 4, 16, 48, vocab=_VOCAB, prediction=1)

SIZES: dict[str, Sizes] = {
    "qwen3.5-27b": _27B,
    "qwen3.6-27b": _27B,
    "qwen3.5-9b": Sizes(4096, 12288, 32, 16, 4, 16, 32, vocab=_VOCAB, prediction=1),
    "qwen3.5-4b": Sizes(2560, 9216, 32, 16, 4, 16, 32, vocab=_VOCAB, tied=True, prediction=1),
    "qwen3.5-2b": Sizes(2048, 6144, 24, 8, 2, 16, 16, vocab=_VOCAB, tied=True, prediction=1),
    "qwen3.5-0.8b": Sizes(1024, 3584, 24, 8, 2, 16, 16, vocab=_VOCAB, tied=True, prediction=1),
    # Of no release: every kind of layer and projection in a few megabytes.
    "tiny": Sizes(256, 384, 4, 4, 2, 2, 4, head_dim=64, key_head_dim=64, value_head_dim=64, vocab=512),
}


def sizes(name: str = "qwen3.5-27b", **overrides: Any) -> Sizes:
    """A preset with some sizes replaced; raises CheckpointError for an unknown name or size, naming the nearest."""
    if name not in SIZES:
        raise CheckpointError(f"size: found {name!r}, expected one of {', '.join(SIZES)}{_near(name, SIZES)}")
    known = [f.name for f in fields(Sizes)]
    for key in overrides:
        if key not in known:
            raise CheckpointError(f"size: found {key!r}, expected one of {', '.join(known)}{_near(key, known)}")
    return replace(SIZES[name], **overrides)


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
