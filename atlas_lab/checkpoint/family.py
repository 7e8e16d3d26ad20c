"""A model family that is described by a layout: which stored tensors are which projections, and what the others are."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atlas_lab.checkpoint.json_object import CheckpointError, brief, shown
from atlas_lab.checkpoint.layout import EMBED, ROWS, Cut, Layout, Other, Parameter, Weight
from atlas_lab.checkpoint.recognise import recognise
from atlas_lab.checkpoint.slicing import cut_weight
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import HEAD, Projection, Site, WeightSource, label_of
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.formats.ggml import Blocks

Tensors = Mapping[str, Tensor]

# Key of config.json by which a checkpoint of part of a model says which: {"layers": [...], "roles": [...]}.
PART = "atlas_lab_part"

_FLOATS = ("bf16", "f16", "f32")

# What no projection reads, by a pattern of its name.
_MEANINGS = (
    (r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|embed_vision)\.", "vision tower, not used"),
    (r"(^|\.)(audio_tower|embed_audio)\.", "audio tower, not used"),
    (r"^(model\.)?mtp\.", "multi-token prediction, not used"),
    (r"\.(input_scale|input_global_scale)$", "scale of activations"),
    (r"\.(k_scale|v_scale)$", "scale of the KV cache"),
    (r"\.experts\.", "experts, not supported"),
    (r"per_layer_", "input of its own for every layer, not used"),
    (r"embed_tokens\.weight(_\w+)?$", "embedding"),
    (r"lm_head\.", "output head"),
    (r"\.linear_attn\.conv1d\.weight$", "convolution"),
    (r"\.linear_attn\.(A_log|dt_bias)$", "gates"),
    (r"norm\.weight$", "norm"),
)


class Family(ABC):
    """A `ModelFamily` by its `layout`; the built-in plugin provides those of this package through `atlas_models`."""

    family: str
    model_types: tuple[str, ...]

    @abstractmethod
    def layout(self, config: Mapping[str, Any]) -> Layout:
        """What the model of a config.json is made of; raises CheckpointError naming the key of what it cannot be."""

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in self.model_types

    def dims(self, config: Mapping[str, Any]) -> ModelDims:
        """Raises CheckpointError naming a key of config.json."""
        return self.layout(config).dims

    def sites(self, config: Mapping[str, Any], tensors: Tensors) -> list[Site]:
        """The model's sites, layer by layer, the output head last where the checkpoint has one.

        Raises CheckpointError, naming the tensor, where one of a layer is missing, is in no supported convention, or
        has another shape than config.json says.
        """
        layout = self.layout(config)
        prefix = prefix_of(layout, tensors)
        part = _part(config)
        _within(layout, prefix, tensors)
        out = [
            Site(tuple(_projection(layout, prefix, layer, role, tensors) for role in roles))
            for layer, roles in layout.selected(*part)
        ]
        head = _head(layout, prefix, tensors) if part == (None, None) else None
        return out + ([Site((head,))] if head else [])

    def parameters(self, config: Mapping[str, Any], tensors: Tensors) -> list[Parameter]:
        """The other tensors of the model that the checkpoint has; raises CheckpointError for one of another shape."""
        layout = self.layout(config)
        prefix = prefix_of(layout, tensors)
        named = [(layer, o, t) for layer, o, name in layout.named_others(prefix) for t in _stored(o, name, tensors)]
        return [_parameter(layer, o, t) for layer, o, t in named]

    def missing(self, config: Mapping[str, Any], tensors: Tensors) -> list[str]:
        """Tensors of the model, other than its layers' projections, that the checkpoint has not; none of a part."""
        if _part(config) != (None, None):
            return []
        layout = self.layout(config)
        prefix = prefix_of(layout, tensors)
        named = layout.named_others(prefix)
        names = [name for _, o, name in named if not _stored(o, name, tensors)]
        if layout.head and not _head(layout, prefix, tensors):
            names.append(f"{layout.head.module}.weight")
        return names

    def cuts(self, config: Mapping[str, Any]) -> dict[tuple[int | None, str], Cut]:
        """How ranks share each projection and each other tensor, by layer (None: the model's own) and role."""
        layout = self.layout(config)
        out: dict[tuple[int | None, str], Cut] = {}
        for i, layer in enumerate(layout.layers):
            out |= {(i, w.role): w.cut for w in layer.weights}
            out |= {(i, o.role): o.cut for o in layer.others if o.cut}
        if layout.head:
            out[len(layout.layers), HEAD] = layout.head.cut
        return out

    def meaning(self, name: str) -> str:
        """What a tensor that no projection reads is for."""
        return next((text for pattern, text in _MEANINGS if re.search(pattern, name)), "unknown")


def prefix_of(layout: Layout, tensors: Tensors) -> str:
    """What the names of the text model start with in this checkpoint; raises CheckpointError."""
    found = [p for p in layout.prefixes if any(name.startswith(f"{p}layers.") for name in tensors)]
    if len(found) != 1:
        held = " and ".join(f"{p}layers.*" for p in found) or "no tensor of a layer"
        wanted = " or ".join(f"{p}layers.*" for p in layout.prefixes)
        raise CheckpointError(f"found {held}, expected tensors named {wanted}")
    return found[0]


def _within(layout: Layout, prefix: str, tensors: Tensors) -> None:
    """Raise CheckpointError for a tensor of a layer, an embedding or an output head that the model has not."""
    if layout.head is None:
        outside = next((t for m in (f"{prefix}embed_tokens", HEAD) for t in tensors if t.startswith(f"{m}.weight")), "")
        if outside:
            raise CheckpointError(f"config.json: vocab_size: missing, expected the rows of {outside}")
    begins, count = f"{prefix}layers.", len(layout.layers)
    for name in tensors:
        index = name.removeprefix(begins).partition(".")[0] if name.startswith(begins) else ""
        if index.isdecimal() and not (index.isascii() and len(index) <= 18 and int(index) < count):
            raise CheckpointError(
                f"{name}: found a tensor of layer {shown(index)}, expected layers 0 to {count - 1} by config.json: "
                "num_hidden_layers"
            )


def _part(config: Mapping[str, Any]) -> tuple[list[int] | None, list[str] | None]:
    part = config.get(PART)
    if part is None:
        return None, None
    layers, roles = (part.get("layers"), part.get("roles")) if isinstance(part, Mapping) else (None, None)
    if not isinstance(layers, list) or not isinstance(roles, list) or not all(isinstance(r, str) for r in roles):
        raise CheckpointError(f"config.json: {PART}: found {brief(part)}, expected lists of layers and roles")
    return layers, roles


def _projection(layout: Layout, prefix: str, layer: int, role: str, tensors: Tensors) -> Projection:
    w = layout.weight(layer, role)
    name = layout.module(prefix, layer, w)
    weight = recognise(tensors, name)
    if weight is None:
        weight = _fused(layout, prefix, layer, w, tensors)
    if weight is None:
        kind = "" if role.startswith("ffn.") else f" of a {layout.layers[layer].kind} layer"
        experts = next((t for t in tensors if t.startswith(f"{prefix}layers.{layer}.mlp.experts.")), None)
        if experts and role.startswith("ffn."):
            raise CheckpointError(
                f"{experts}: found an expert, expected {name}.weight: no layer of experts is supported"
            )
        raise CheckpointError(
            f"{name}.weight: missing, expected the [{w.n}, {w.k}] weight of {label_of(layer, role)}{kind}"
        )
    return _checked(Projection(layer, role, w.n, w.k, weight), name, tensors)


def _checked(p: Projection, module: str, tensors: Tensors) -> Projection:
    """Raise CheckpointError for a bias, and for a weight of another shape than config.json says."""
    if f"{module}.bias" in tensors:
        raise CheckpointError(f"{module}.bias: found a bias, expected none in this family")
    codes = p.weight.fields[0][1]
    found = weight_shape(p.weight)
    if found != (p.n, p.k):
        raise CheckpointError(
            f"{codes.name}: found a weight {list(found)}, expected {[p.n, p.k]} by config.json for {p.label}"
        )
    return p


def weight_shape(weight: WeightSource) -> tuple[int, int]:
    """N and K of a stored weight, from its codes."""
    codes = weight.fields[0][1]
    rows, width = codes.shape
    form = get(weight.format)
    if isinstance(form, Blocks):
        return rows, width // form.block_bytes * form.block
    return rows, width * 2 if codes.dtype == "u8" else width


def _fused(layout: Layout, prefix: str, layer: int, w: Weight, tensors: Tensors) -> WeightSource | None:
    """The rows of a projection in a module that holds several; None where there is none."""
    for module, roles in layout.fused:
        name = f"{prefix}layers.{layer}.{module}"
        if w.role not in roles:
            continue
        whole = recognise(tensors, name)
        if whole is None:
            continue
        held = [layout.weight(layer, r) for r in roles]
        n = sum(h.n for h in held)
        label = "+".join(roles)
        _checked(Projection(layer, label, n, w.k, whole), name, tensors)
        first = sum(h.n for h in held[: roles.index(w.role)])
        return cut_weight(whole, n, w.k, ROWS, ((first, first + w.n),), label_of(layer, w.role))
    return None


def _head(layout: Layout, prefix: str, tensors: Tensors) -> Projection | None:
    """The output head: its own tensor, or the embedding where the two are tied; None where there is neither."""
    if layout.head is None:
        return None
    names = [layout.head.module, f"language_model.{layout.head.module}"]
    if layout.tied:
        names.append(f"{prefix}embed_tokens")
    for name in names:
        weight = recognise(tensors, name)
        if weight is not None:
            p = Projection(len(layout.layers), HEAD, layout.head.n, layout.head.k, weight)
            return _checked(p, name, tensors)
    return None


def _stored(o: Other, name: str, tensors: Tensors) -> list[Tensor]:
    """The tensors that `name` is stored in, none where it is missing: one, but for an embedding in the form of a
    quantized weight."""
    if o.role != EMBED:
        return [tensors[name]] if name in tensors else []
    return [t for key, t in tensors.items() if key == name or key.startswith(f"{name}_")]


def _parameter(layer: int | None, other: Other, t: Tensor) -> Parameter:
    p = Parameter(layer, other.role, t, other.dtype, other.centred)
    if other.role == EMBED and (t.dtype not in _FLOATS or not t.name.endswith(".weight")):
        if len(t.shape) == 2 and t.dtype in ("e4m3", "u8") and t.shape[0] != other.shape[0]:
            raise CheckpointError(
                f"{t.name}: found {t.shape[0]} rows, expected {other.shape[0]} by config.json for {p.label}"
            )
        return replace(p, dtype=t.dtype)  # part of a quantized weight, read as it is stored
    if t.dtype not in _FLOATS:
        raise CheckpointError(f"{t.name}: found dtype {t.dtype}, expected one of {', '.join(_FLOATS)} for {p.label}")
    if t.shape != other.shape:
        raise CheckpointError(
            f"{t.name}: found shape {list(t.shape)}, expected {list(other.shape)} by config.json for {p.label}"
        )
    return p
