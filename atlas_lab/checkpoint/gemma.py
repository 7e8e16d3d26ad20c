"""The text part of Gemma 3 and Gemma 4: GeGLU, sliding and full attention, heads that differ by layer.

Names and shapes are those of transformers' `models/gemma3/modeling_gemma3.py` and `models/gemma4/modeling_gemma4.py`.
In Gemma 4 layers of full attention have heads of `global_head_dim`; where `attention_k_eq_v` is set they have no v, and
KV heads of their own number; the last `num_kv_shared_layers` read an earlier layer's K and V and have neither, and may
have an FFN of twice the width. Gemma 3 norms multiply by 1 + w, those of Gemma 4 by w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atlas_lab.checkpoint import keys
from atlas_lab.checkpoint.family import Family
from atlas_lab.checkpoint.json_object import CheckpointError, brief
from atlas_lab.checkpoint.layout import Attention, Layer, Layout, Other
from atlas_lab.checkpoint.transformer import FULL, FUSED, SLIDING, embedding, layer_of, norms
from atlas_lab.core.context import ModelDims

GEMMA3 = ("gemma3", "gemma3_text")
GEMMA4 = ("gemma4", "gemma4_text")

_NORMS = {
    "input_layernorm": "norm.input",
    "post_attention_layernorm": "norm.post_attention",
    "pre_feedforward_layernorm": "norm.pre_ffn",
    "post_feedforward_layernorm": "norm.post_ffn",
}
_INTERVAL = 6  # of layers of full attention, where config.json says none
_HEAD_DIM, _GLOBAL_HEAD_DIM = 256, 512


@dataclass(frozen=True)
class _Text:
    """What the layers of a text model are made from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    gemma4: bool
    full_head_dim: int
    full_kv_heads: int
    k_is_v: bool
    double_wide: bool

    def layer(self, kind: str, shared: bool) -> Layer:
        full = kind == FULL
        head_dim, kv_heads = (self.full_head_dim, self.full_kv_heads) if full else (self.head_dim, self.kv_heads)
        if self.heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads: found {self.heads}, expected a multiple of the {kv_heads} KV heads"
            )
        a = Attention(self.heads, kv_heads, head_dim, window=0 if full else self.window)
        others = list(norms(self.hidden, _NORMS, centred=not self.gemma4))
        for name in ("q_norm",) if shared else ("q_norm", "k_norm"):
            others.append(Other(f"attn.{name}", f"self_attn.{name}.weight", (head_dim,), centred=not self.gemma4))
        if self.gemma4:
            others.append(Other("layer.scale", "layer_scalar", (1,)))
        without = ("attn.k", "attn.v") if shared else ("attn.v",) if full and self.k_is_v else ()
        return layer_of(
            kind, a, self.hidden, self.intermediate * (2 if shared and self.double_wide else 1), others, without
        )


class Gemma(Family):
    """The family, a `ModelFamily`."""

    family = "gemma"
    model_types = (*GEMMA3, *GEMMA4)

    def layout(self, config: Mapping[str, Any]) -> Layout:
        """Raises CheckpointError naming a key of config.json."""
        outer = keys.text_config(config)
        keys.refuse_experts(outer)
        if outer.get("enable_moe_block"):
            raise CheckpointError(
                "config.json: enable_moe_block: found True, expected false: no mixture of experts is supported"
            )
        count = keys.layers(outer)
        interval = keys.size(outer, "sliding_window_pattern", _INTERVAL)
        usual = tuple(SLIDING if (i + 1) % interval else FULL for i in range(count))
        kinds = keys.layer_types(outer, (SLIDING, FULL), usual)
        text = _text(outer, config.get("model_type") in GEMMA4)
        first_shared = count - keys.count(outer, "num_kv_shared_layers")
        shared = [i >= first_shared > 0 for i in range(count)]
        known = {key: text.layer(*key) for key in dict.fromkeys(zip(kinds, shared, strict=True))}
        layers = tuple(known[key] for key in zip(kinds, shared, strict=True))
        kept = [x.mixer for x, s in zip(layers, shared, strict=True) if not s and isinstance(x.mixer, Attention)]
        widths = {(a.kv_heads, a.head_dim) for a in kept}
        embed, head = embedding(config, text.hidden)
        return Layout(
            dims=ModelDims(
                self.family,
                text.hidden,
                text.intermediate,
                count,
                len(kept),
                text.kv_heads,
                text.head_dim,
                kv_width=0 if len(widths) == 1 else sum(a.kv_heads * a.head_dim for a in kept),
                activation=keys.activation(outer, "hidden_activation", "hidden_act", default="gelu_tanh"),
                activation_limit=keys.activation_limit(outer),
            ),
            prefixes=("model.language_model.", "language_model.model.", "model."),
            layers=layers,
            others=(*embed, *norms(text.hidden, {"norm": "norm"}, centred=not text.gemma4)),
            head=head,
            tied=keys.tied(config, True),
            fused=FUSED,
        )


def _text(text: Mapping[str, Any], gemma4: bool) -> _Text:
    heads, kv_heads = keys.heads(text, "num_attention_heads", "num_key_value_heads")
    head_dim = keys.size(text, "head_dim", _HEAD_DIM)
    k_is_v = text.get("attention_k_eq_v", False)
    double = text.get("use_double_wide_mlp", False)
    for key, found in (("attention_k_eq_v", k_is_v), ("use_double_wide_mlp", double)):
        if not isinstance(found, bool):
            raise CheckpointError(f"config.json: {key}: found {brief(found)}, expected true or false")
    return _Text(
        hidden=keys.size(text, "hidden_size"),
        intermediate=keys.size(text, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=keys.count(text, "sliding_window"),
        gemma4=gemma4,
        full_head_dim=keys.size(text, "global_head_dim", _GLOBAL_HEAD_DIM) if gemma4 else head_dim,
        full_kv_heads=keys.size(text, "num_global_key_value_heads", kv_heads) if gemma4 and k_is_v else kv_heads,
        k_is_v=gemma4 and k_is_v,
        double_wide=double,
    )


GEMMA = Gemma()
