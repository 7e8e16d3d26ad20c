"""A checkpoint as the lab sees it: its model's dimensions, its projections, and what nothing reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from atlas_lab.checkpoint import quantization
from atlas_lab.checkpoint.gemma import GEMMA
from atlas_lab.checkpoint.gguf import SUFFIX as GGUF
from atlas_lab.checkpoint.gguf import GgufStore, open_gguf
from atlas_lab.checkpoint.json_object import CheckpointError, brief
from atlas_lab.checkpoint.layout import Layout, Parameter
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.recognise import companion
from atlas_lab.checkpoint.sliced import base_name
from atlas_lab.checkpoint.slicing import slice_dims, slice_parameter, slice_sites
from atlas_lab.checkpoint.store import CONFIG, Store
from atlas_lab.checkpoint.transformer import LLAMA, QWEN3
from atlas_lab.checkpoint.verify import faults
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.tensor import Tensor


class ModelFamily(Protocol):
    """What `atlas_models` provides. `sites` and `dims` raise CheckpointError for a config.json, or tensors, that they
    cannot read; `meaning` says what a tensor that no projection reads is for.

    A family may have `layout(config)`, `parameters(config, tensors)`, `missing(config, tensors)` and `cuts(config)` as
    `atlas_lab.checkpoint.family.Family` does: then the model's other tensors are described too, and cut for ranks.
    """

    family: str

    def matches(self, config: Mapping[str, Any]) -> bool: ...

    def dims(self, config: Mapping[str, Any]) -> ModelDims: ...

    def sites(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Site]: ...

    def meaning(self, name: str) -> str: ...


BUILT_IN: Mapping[str, ModelFamily] = {m.family: m for m in (QWEN35, QWEN3, LLAMA, GEMMA)}


@dataclass(frozen=True)
class Checkpoint:
    """`sites` are all of the model's; `unread` the tensors that belong to no projection, of which `parameters` are
    those that the model reads; `missing` are names of those it lacks. With `tensor_parallel` dimensions, sites and
    parameters are those of one rank. No value has been read."""

    store: Store
    family: str
    dims: ModelDims
    sites: tuple[Site, ...]
    unread: tuple[Tensor, ...]
    model: ModelFamily
    parameters: tuple[Parameter, ...] = ()
    missing: tuple[str, ...] = ()
    tensor_parallel: tuple[int, int] = (0, 1)

    @property
    def path(self) -> Path:
        return self.store.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.store.config

    @property
    def layout(self) -> Layout | None:
        """The model's layers and their heads, where its family describes them."""
        layout = getattr(self.model, "layout", None)
        return layout(self.config) if layout else None

    @property
    def unused(self) -> tuple[Tensor, ...]:
        """Tensors that nothing here reads."""
        read = {base_name(p.tensor.name) for p in self.parameters}
        return tuple(t for t in self.unread if t.name not in read)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(p for s in self.sites for p in s.projections)


@dataclass(frozen=True)
class Described:
    """One tensor of a checkpoint. `used_by` is `layers.0.ffn.gate`, with the weight's `format`, `geometry` and the
    `field` the tensor is of it; all empty for one that no projection reads, whose `note` says what it is."""

    tensor: Tensor
    used_by: str = ""
    field: str = ""
    format: str = ""
    geometry: str = ""
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """What `show` found: a row for every tensor, and one sentence for each weight with a fault among its values (None
    where they were not read)."""

    checkpoint: Checkpoint
    rows: tuple[Described, ...]
    faults: tuple[str, ...] | None = None


def open_checkpoint(
    path: str | os.PathLike[str],
    models: Mapping[str, ModelFamily] | None = None,
    tensor_parallel: tuple[int, int] = (0, 1),
) -> Checkpoint:
    """Read a checkpoint's headers and config.json, or a GGUF file's metadata. `models` are families by name (a
    registry's); `tensor_parallel` is the rank whose share is wanted, and the number of ranks. Raises CheckpointError,
    also where quantization configs disagree with what the tensors are."""
    store = open_gguf(path) if Path(path).suffix == GGUF else Store.open(path)
    known = BUILT_IN if models is None else models
    if not store.config:
        raise CheckpointError(f"{store.path}: {CONFIG}: missing, expected a model's beside its tensors")
    model = next((m for m in known.values() if m.matches(store.config)), None)
    if model is None:
        found = brief(store.config.get("model_type"))
        families = ", ".join(known)
        raise CheckpointError(f"{store.path}: {CONFIG}: model_type: found {found}, expected a family of {families}")
    try:
        return _described(store, model, tensor_parallel)
    except CheckpointError as e:
        raise CheckpointError(f"{store.path}: {e}") from None


def _described(store: Store, model: ModelFamily, tensor_parallel: tuple[int, int]) -> Checkpoint:
    rank, size = tensor_parallel
    dims = model.dims(store.config)
    sites = tuple(model.sites(store.config, store.tensors))
    if not isinstance(store, GgufStore):  # whose tensors say all there is, whatever lies beside it
        quantization.check_sites(store.config, store.path, store.tensors, sites)
    parameters: tuple[Parameter, ...] = tuple(_optional(model, "parameters", store.config, store.tensors) or ())
    missing: tuple[str, ...] = tuple(_optional(model, "missing", store.config, store.tensors) or ())
    read = {name for s in sites for p in s.projections for t in p.weight.tensors.values() for name in _names(t)}
    unread = tuple(t for name, t in store.tensors.items() if name not in read)
    if size != 1:
        cuts = _optional(model, "cuts", store.config) or {}
        sites = slice_sites(sites, cuts, rank, size)
        parameters = tuple(slice_parameter(p, cuts.get((p.layer, p.role)), rank, size) for p in parameters)
        dims = slice_dims(dims, size)
    return Checkpoint(store, model.family, dims, sites, unread, model, parameters, missing, tensor_parallel)


def _optional(model: ModelFamily, method: str, *arguments: Any) -> Any:
    found = getattr(model, method, None)
    return found(*arguments) if found else None


def _names(t: Tensor) -> tuple[str, str]:
    """A handle's name, and that of the stored tensor it may be part of."""
    return t.name, base_name(t.name)


def describe(checkpoint: Checkpoint) -> list[Described]:
    """A row for every tensor, projections first, layer by layer."""
    rows = [
        Described(t, p.label, field, p.weight.format, str(p.weight.geometry))
        for p in checkpoint.projections
        for field, t in p.weight.fields
    ]
    inputs = {
        t.name: f"scale of the input of {p.label}" for p in checkpoint.projections for _, t in p.weight.activation
    }
    return rows + [Described(t, note=inputs.get(t.name) or _meaning(checkpoint, t.name)) for t in checkpoint.unread]


def _meaning(checkpoint: Checkpoint, name: str) -> str:
    meaning = checkpoint.model.meaning(name)
    return companion(name) or meaning if meaning == "unknown" else meaning


def show(path: str | os.PathLike[str], verify: bool = False, models: Mapping[str, ModelFamily] | None = None) -> Shown:
    """What a checkpoint holds; with `verify` the values of all its tensors are read and checked.

    Raises CheckpointError for a checkpoint that cannot be opened; faults among the values are listed.
    """
    checkpoint = open_checkpoint(path, models)
    return Shown(checkpoint, tuple(describe(checkpoint)), tuple(faults(checkpoint)) if verify else None)
