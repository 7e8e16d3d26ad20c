"""What a model is made of, by its config.json alone: layers by kind, their projections and other tensors, by name and
shape, and how each may be cut for several devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from atlas_lab.checkpoint.json_object import CheckpointError, brief, is_integer
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import HEAD
from atlas_lab.core.tensor import Tensor

ROWS, COLUMNS = 0, 1  # axes of a weight [N, K]

EMBED = "embed"


@dataclass(frozen=True)
class Segment:
    """`extent` consecutive rows or columns that ranks share out by `unit`: heads of 128 rows, say."""

    extent: int
    unit: int = 1
    noun: str = ""  # of a unit in a sentence: "value heads"


@dataclass(frozen=True)
class Cut:
    """How ranks share a tensor: along one axis, each of its segments in equal shares."""

    axis: int
    segments: tuple[Segment, ...]

    @classmethod
    def rows(cls, *segments: Segment) -> Cut:
        return cls(ROWS, segments)

    @classmethod
    def columns(cls, *segments: Segment) -> Cut:
        return cls(COLUMNS, segments)


@dataclass(frozen=True)
class Weight:
    """A projection: its role, its module's name within the layer (of the head: within the model), N and K."""

    role: str
    module: str
    n: int
    k: int
    cut: Cut


@dataclass(frozen=True)
class Other:
    """A tensor that is no projection's: its role, name and shape. `dtype` is what kernels read it as, whatever is
    stored; `centred` that it stands for 1 + w; without a `cut` every rank has all of it."""

    role: str
    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    dtype: str = "bf16"
    centred: bool = False


@dataclass(frozen=True)
class Attention:
    """Heads of an attention layer. `gated`: q has a gate row a query row; `window`: tokens it sees, 0 for all."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    window: int = 0


@dataclass(frozen=True)
class DeltaNet:
    """Heads of a gated delta net layer, and the width of its convolution."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv: int


@dataclass(frozen=True)
class Layer:
    """A layer of one kind (`full_attention`); `sites` are projections that share an input."""

    kind: str
    mixer: Attention | DeltaNet
    intermediate: int
    sites: tuple[tuple[Weight, ...], ...]
    others: tuple[Other, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(w for site in self.sites for w in site)


@dataclass(frozen=True)
class Layout:
    """A model. `prefixes` are what tensors of the text model may start with, the release's own first; `head` and
    `extra` have names of their own. `fused` are modules, by name within a layer, that may hold several projections'
    rows one after the other."""

    dims: ModelDims
    prefixes: tuple[str, ...]
    layers: tuple[Layer, ...]
    others: tuple[Other, ...]  # of the model, within the prefix: the embedding, the last norm
    head: Weight | None = None
    tied: bool = False
    extra: tuple[Other, ...] = ()  # multi-token prediction
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def selected(
        self, layers: Iterable[int] | None = None, roles: Sequence[str] | None = None
    ) -> list[tuple[int, tuple[str, ...]]]:
        """Layer and roles of every site of a layer among `layers` and `roles` (patterns: `ffn.*`), None for all;
        raises CheckpointError for a layer that the model has not, and for a pattern that none of these layers has."""
        chosen = list(range(len(self.layers))) if layers is None else sorted(set(layers))
        for layer in chosen:
            if not (is_integer(layer) and 0 <= layer < len(self.layers)):
                raise CheckpointError(f"layers: found {brief(layer)}, expected 0 to {len(self.layers) - 1}")
        patterns = ("*",) if roles is None else tuple(roles)
        sites = [(layer, tuple(w.role for w in group)) for layer in chosen for group in self.layers[layer].sites]
        held = {role for _, group in sites for role in group}
        for p in patterns:
            if not any(fnmatchcase(role, p) for role in held):
                raise CheckpointError(f"roles: found {brief(p)}, expected some of {', '.join(sorted(held))}")
        kept = [(layer, tuple(r for r in group if any(fnmatchcase(r, p) for p in patterns))) for layer, group in sites]
        return [(layer, group) for layer, group in kept if group]

    def weight(self, layer: int, role: str) -> Weight:
        """The projection of a role in a layer; raises KeyError where the layer has none."""
        for w in (self.head,) if role == HEAD and self.head else self.layers[layer].weights:
            if w.role == role:
                return w
        raise KeyError(f"layers.{layer}.{role}")

    def module(self, prefix: str, layer: int, w: Weight) -> str:
        """The full name of a projection's module."""
        return w.module if w.role == HEAD else f"{prefix}layers.{layer}.{w.module}"

    def named_others(self, prefix: str) -> Iterator[tuple[int | None, Other, str]]:
        """Layer (None: the model's own) and full name of every tensor that is no projection's and that the model
        reads."""
        for other in self.others:
            yield None, other, prefix + other.name
        for i, layer in enumerate(self.layers):
            for other in layer.others:
                yield i, other, f"{prefix}layers.{i}.{other.name}"


@dataclass(frozen=True)
class Parameter:
    """A stored tensor that is no projection's, and its role: `embed`, `gdn.A_log`, `norm.input`. It is read as
    `dtype`, converted by value; `layer` is None for the model's own. `centred`: it stands for 1 + w."""

    layer: int | None
    role: str
    tensor: Tensor
    dtype: str
    centred: bool = False

    @property
    def label(self) -> str:
        """`layers.0.gdn.A_log`; of the model's own the role alone."""
        return self.role if self.layer is None else f"layers.{self.layer}.{self.role}"
