"""What there is to compute: a projection, the weight it reads, and the site whose input it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.base import Geometry

HEAD = "lm_head"  # the one projection of no layer: it is filed under the number after the last layer's


def label_of(layer: int, *roles: str) -> str:
    """`layers.0.ffn.gate+ffn.up`; of the output head its role alone."""
    return HEAD if roles == (HEAD,) else f"layers.{layer}." + "+".join(roles)


@dataclass(frozen=True)
class Packed:
    """The stored tensors of a weight, as they are: what a `Derived` names as its source to be handed the packed
    form and not the values."""

    weight: WeightSource


@dataclass(frozen=True)
class WeightSource:
    """A weight `[N, K]` as a checkpoint stores it.

    `format` is the format's name (`nvfp4_ct`), `family` what arms start from (`nvfp4`); `tensors` are the stored
    ones by field (`weight`, `scale`, `global_scale`), named as in the checkpoint. `activation` holds scales of the
    input that are stored beside it, by their names there (`input_scale`): facts, no part of the weight.
    """

    format: str
    family: str
    geometry: Geometry
    fields: tuple[tuple[str, Tensor], ...]
    activation: tuple[tuple[str, Tensor], ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return MappingProxyType(dict(self.fields))

    @property
    def packed(self) -> Packed:
        return Packed(self)

    @property
    def bytes(self) -> int:
        return sum(t.bytes for _, t in self.fields)

    def __getitem__(self, field: str) -> Tensor:
        return self.tensors[field]


@dataclass(frozen=True)
class Projection:
    """`y[M, N] = x[M, K] · W[N, K]ᵀ`. `role` is `ffn.gate`, `attn.q`, `gdn.out`, `lm_head` …"""

    layer: int
    role: str
    n: int
    k: int
    weight: WeightSource

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"{self.label}: found N={self.n}, K={self.k}, expected 1 or more")

    @property
    def label(self) -> str:
        return label_of(self.layer, self.role)


@dataclass(frozen=True)
class Site:
    """The projections of one layer that read the same input, or a single one."""

    projections: tuple[Projection, ...]

    def __post_init__(self) -> None:
        if not self.projections:
            raise ValueError("site: found no projection, expected one or more")
        first = self.projections[0]
        for p in self.projections:
            if (p.layer, p.k) != (first.layer, first.k):
                raise ValueError(
                    f"site of {first.label}: {p.label} has K={p.k}, expected the shared input's K={first.k} of layer "
                    f"{first.layer}"
                )

    @property
    def layer(self) -> int:
        return self.projections[0].layer

    @property
    def k(self) -> int:
        return self.projections[0].k

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(p.role for p in self.projections)

    @property
    def label(self) -> str:
        return label_of(self.layer, *self.roles)

    def __getitem__(self, role: str) -> Projection:
        for p in self.projections:
            if p.role == role:
                return p
        raise KeyError(f"{self.label} has no projection {role!r}")
