"""The dense Qwen3.5 family (3.5, 3.6, 3.8): which tensors are which projections.

Names and shapes are those of the releases, and of transformers' `models/qwen3_5/modeling_qwen3_5.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from atlas_lab.checkpoint.family import PART as PART
from atlas_lab.checkpoint.family import Family
from atlas_lab.checkpoint.layout import (
    EMBED,
    Attention,
    Cut,
    DeltaNet,
    Layer,
    Layout,
    Other,
    Segment,
    Weight,
)
from atlas_lab.checkpoint.mix import mix
from atlas_lab.checkpoint.naming import BF16, KEPT, Convention
from atlas_lab.checkpoint.sizes import ATTENTION, FAMILY, GATED_DELTA_NET, MODEL_TYPE, TEXT_MODEL_TYPE, Sizes
from atlas_lab.core.projection import HEAD, Projection, Site

# The whole model nests its language part; a text-only export does not.
ROOTS = ("model.language_model.", "model.")
PREFIX, TEXT_PREFIX = (f"{root}layers." for root in ROOTS)

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


class Qwen35(Family):
    """The family, a `ModelFamily`: the built-in plugin provides it through `atlas_models`."""

    family = FAMILY
    model_types = (MODEL_TYPE, TEXT_MODEL_TYPE)

    def layout(self, config: Mapping[str, Any]) -> Layout:
        """Raises CheckpointError naming a key of config.json."""
        return layout_of(Sizes.of(config))


QWEN35 = Qwen35()


def _cuts(s: Sizes) -> dict[str, Cut]:
    """How ranks share each role: value heads follow their key head, so q, k and v are shared out each by itself."""
    query = (2 if s.output_gate else 1) * s.head_dim  # a head's query rows, then its gate rows
    value = Segment(s.value_dim, s.value_head_dim, "value heads")
    one = Segment(s.value_heads, 1, "value heads")
    kv = Cut.rows(Segment(s.kv_heads * s.head_dim, s.head_dim, "KV heads"))
    width = Cut.rows(Segment(s.intermediate))
    return {
        "attn.q": Cut.rows(Segment(s.heads * query, query, "query heads")),
        "attn.k": kv,
        "attn.v": kv,
        "attn.o": Cut.columns(Segment(s.heads * s.head_dim, s.head_dim, "query heads")),
        "gdn.qkv": mixed_cut(s),
        "gdn.z": Cut.rows(value),
        "gdn.b": Cut.rows(one),
        "gdn.a": Cut.rows(one),
        "gdn.out": Cut.columns(value),
        "ffn.gate": width,
        "ffn.up": width,
        "ffn.down": Cut.columns(Segment(s.intermediate)),
    }


def mixed_cut(s: Sizes) -> Cut:
    """Rows of q, k and v of the gated delta net, each head-major, one after the other."""
    key = Segment(s.key_dim, s.key_head_dim, "key heads")
    return Cut.rows(key, key, Segment(s.value_dim, s.value_head_dim, "value heads"))


def _others(s: Sizes, kind: str) -> tuple[Other, ...]:
    """A layer's other tensors; all are BF16 on disk, and gates are read as float32, by value."""
    norms = (
        Other("norm.input", "input_layernorm.weight", (s.hidden,), centred=True),
        Other("norm.post_attention", "post_attention_layernorm.weight", (s.hidden,), centred=True),
    )
    if kind == ATTENTION:
        return (
            *norms,
            Other("attn.q_norm", "self_attn.q_norm.weight", (s.head_dim,), centred=True),
            Other("attn.k_norm", "self_attn.k_norm.weight", (s.head_dim,), centred=True),
        )
    heads = Cut.rows(Segment(s.value_heads, 1, "value heads"))
    return (
        *norms,
        Other("gdn.conv", "linear_attn.conv1d.weight", (2 * s.key_dim + s.value_dim, 1, s.conv), mixed_cut(s)),
        Other("gdn.A_log", "linear_attn.A_log", (s.value_heads,), heads, "f32"),
        Other("gdn.dt_bias", "linear_attn.dt_bias", (s.value_heads,), heads, "f32"),
        Other("gdn.norm", "linear_attn.norm.weight", (s.value_head_dim,)),
    )


def _prediction(s: Sizes, shapes: Mapping[str, tuple[int, int]]) -> tuple[Other, ...]:
    """Tensors of the multi-token prediction head: a projection of two hidden states, and layers of full attention."""
    if not s.prediction:
        return ()
    out = [Other("mtp.fc", "mtp.fc.weight", (s.hidden, 2 * s.hidden))]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        out.append(Other(f"mtp.{name}", f"mtp.{name}.weight", (s.hidden,), centred=True))
    for i in range(s.prediction):
        for role in (r for group in SITES[ATTENTION] for r in group):
            out.append(Other(f"mtp.{role}", f"mtp.layers.{i}.{MODULES[role]}.weight", shapes[role]))
        for o in _others(s, ATTENTION):
            out.append(Other(f"mtp.{o.role}", f"mtp.layers.{i}.{o.name}", o.shape, centred=o.centred))
    return tuple(out)


@lru_cache(maxsize=64)
def layout_of(s: Sizes) -> Layout:
    """The model of these sizes."""
    shapes, cuts = s.shapes, _cuts(s)
    mixers: dict[str, Attention | DeltaNet] = {
        ATTENTION: Attention(s.heads, s.kv_heads, s.head_dim, s.output_gate),
        GATED_DELTA_NET: DeltaNet(s.key_heads, s.value_heads, s.key_head_dim, s.value_head_dim, s.conv),
    }
    layers = {
        kind: Layer(
            kind,
            mixers[kind],
            s.intermediate,
            tuple(tuple(Weight(r, MODULES[r], *shapes[r], cuts[r]) for r in group) for group in groups),
            _others(s, kind),
        )
        for kind, groups in SITES.items()
    }
    embed = Other(EMBED, "embed_tokens.weight", (s.vocab, s.hidden))
    return Layout(
        dims=s.dims,
        prefixes=ROOTS,
        layers=tuple(layers[s.kind(i)] for i in range(s.layers)),
        others=(*((embed,) if s.vocab else ()), Other("norm", "norm.weight", (s.hidden,), centred=True)),
        head=Weight(HEAD, HEAD, s.vocab, s.hidden, Cut.rows(Segment(s.vocab))) if s.vocab else None,
        tied=s.tied,
        extra=_prediction(s, shapes),
    )


def module(prefix: str, layer: int, role: str) -> str:
    """The name of a projection's module."""
    return f"{prefix}{layer}.{MODULES[role]}"


def selected(
    s: Sizes, layers: Iterable[int] | None = None, roles: Sequence[str] | None = None
) -> list[tuple[int, tuple[str, ...]]]:
    """Layer and roles of every site among `layers` and `roles`, as `Layout.selected`."""
    return layout_of(s).selected(layers, roles)


def convention_of(role: str, c: Convention) -> Convention:
    """How a role's weight is stored in a checkpoint of convention `c`: some stay BF16 in every release."""
    return BF16 if role in KEPT else c


def auxiliary(s: Sizes, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's other tensors by their name within the layer; all are BF16 on disk."""
    return {o.name: o.shape for o in layout_of(s).layers[layer].others}


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
    m = mix(format_name, producer)
    layout = layout_of(s)
    root = ROOTS[1] if text_only else ROOTS[0]

    def projection(layer: int, w: Weight) -> Projection:
        name = layout.module(root, layer, w)
        return Projection(layer, w.role, w.n, w.k, m.of(w.role).source(name, w.n, w.k))

    chosen = layout.selected(layers, roles)
    out = [Site(tuple(projection(i, layout.weight(i, r)) for r in group)) for i, group in chosen]
    if layout.head and layers is None and roles is None:
        head = projection(s.layers, layout.head)
        if layout.tied:
            head = Projection(s.layers, HEAD, head.n, head.k, BF16.source(f"{root}embed_tokens", head.n, head.k))
        out.append(Site((head,)))
    return out
