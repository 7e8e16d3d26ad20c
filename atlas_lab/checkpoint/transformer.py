"""Plain dense transformers, Qwen3 and Llama: every layer full attention and a gated FFN.

Names and shapes are those of transformers' `models/qwen3/modeling_qwen3.py` and `models/llama/modeling_llama.py`.
Some exports hold q, k, v and gate, up each in one tensor, rows one after the other, named as engines name them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_lab.checkpoint import keys
from atlas_lab.checkpoint.family import Family
from atlas_lab.checkpoint.layout import EMBED, Attention, Cut, Layer, Layout, Other, Segment, Weight
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import HEAD

FULL, SLIDING = "full_attention", "sliding_attention"

FUSED = (("self_attn.qkv_proj", ("attn.q", "attn.k", "attn.v")), ("mlp.gate_up_proj", ("ffn.gate", "ffn.up")))


def layer_of(
    kind: str, a: Attention, hidden: int, intermediate: int, others: Sequence[Other], without: Sequence[str] = ()
) -> Layer:
    """A layer of attention and a gated FFN, each projection in the module of its name; `without` some roles."""
    query, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q_cut = Segment(query, a.head_dim, "query heads")
    kv_cut = Cut.rows(Segment(kv, a.head_dim, "KV heads"))
    width = Segment(intermediate)
    sites = (
        (
            Weight("attn.q", "self_attn.q_proj", query, hidden, Cut.rows(q_cut)),
            Weight("attn.k", "self_attn.k_proj", kv, hidden, kv_cut),
            Weight("attn.v", "self_attn.v_proj", kv, hidden, kv_cut),
        ),
        (Weight("attn.o", "self_attn.o_proj", hidden, query, Cut.columns(q_cut)),),
        (
            Weight("ffn.gate", "mlp.gate_proj", intermediate, hidden, Cut.rows(width)),
            Weight("ffn.up", "mlp.up_proj", intermediate, hidden, Cut.rows(width)),
        ),
        (Weight("ffn.down", "mlp.down_proj", hidden, intermediate, Cut.columns(width)),),
    )
    kept = tuple(tuple(w for w in site if w.role not in without) for site in sites)
    return Layer(kind, a, intermediate, tuple(site for site in kept if site), tuple(others))


def embedding(config: Mapping[str, Any], hidden: int) -> tuple[tuple[Other, ...], Weight | None]:
    """The embedding and the output head; neither where config.json has no vocabulary."""
    vocab = keys.count(keys.text_config(config), "vocab_size")
    if not vocab:
        return (), None
    head = Weight(HEAD, HEAD, vocab, hidden, Cut.rows(Segment(vocab)))
    return (Other(EMBED, "embed_tokens.weight", (vocab, hidden)),), head


def norms(hidden: int, roles: Mapping[str, str], *, centred: bool = False) -> tuple[Other, ...]:
    """Norms over the hidden size: role by module."""
    return tuple(Other(role, f"{name}.weight", (hidden,), centred=centred) for name, role in roles.items())


class Transformer(Family):
    """A plain family; `head_norms` says whether q and k are normed by head."""

    def __init__(self, family: str, model_type: str, *, head_norms: bool) -> None:
        self.family = family
        self.model_types = (model_type,)
        self._head_norms = head_norms

    def layout(self, config: Mapping[str, Any]) -> Layout:
        """Raises CheckpointError naming a key of config.json."""
        text = keys.text_config(config)
        keys.refuse_experts(text)
        hidden, intermediate = keys.size(text, "hidden_size"), keys.size(text, "intermediate_size")
        count = keys.layers(text)
        heads, kv_heads = keys.heads(text, "num_attention_heads", "num_key_value_heads")
        head_dim = keys.size(text, "head_dim", max(1, hidden // heads))
        kinds = keys.layer_types(text, (FULL, SLIDING), (FULL,) * count)
        window = keys.count(text, "sliding_window")
        others = norms(hidden, {"input_layernorm": "norm.input", "post_attention_layernorm": "norm.post_attention"})
        if self._head_norms:
            for name in ("q_norm", "k_norm"):
                others += (Other(f"attn.{name}", f"self_attn.{name}.weight", (head_dim,)),)
        layers = {
            kind: layer_of(
                kind,
                Attention(heads, kv_heads, head_dim, window=window if kind == SLIDING else 0),
                hidden,
                intermediate,
                others,
            )
            for kind in dict.fromkeys(kinds)
        }
        embed, head = embedding(config, hidden)
        return Layout(
            dims=ModelDims(
                self.family,
                hidden,
                intermediate,
                count,
                count,
                kv_heads,
                head_dim,
                activation=keys.activation(text, "hidden_act"),
                activation_limit=keys.activation_limit(text),
            ),
            prefixes=("model.",),
            layers=tuple(layers[kind] for kind in kinds),
            others=(*embed, *norms(hidden, {"norm": "norm"})),
            head=head,
            tied=keys.tied(config, False),
            fused=FUSED,
        )


QWEN3 = Transformer("qwen3", "qwen3", head_norms=True)
LLAMA = Transformer("llama", "llama", head_norms=False)
