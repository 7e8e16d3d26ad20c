"""A GGUF file as a checkpoint: the release's tensors by their names there, in its order and with its values.

A weight in blocks is the tensor `MODULE.weight_FORMAT` (`model.layers.0.mlp.gate_proj.weight_q4_k`), u8, whose rows are
rows of blocks; its tensor scale, if it has one, `MODULE.weight_scale_2`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_lab.checkpoint import gguf_models
from atlas_lab.checkpoint.gguf_file import Entry, GgufFile, open_file
from atlas_lab.checkpoint.gguf_models import Architecture
from atlas_lab.checkpoint.gguf_rewrites import Rewrite, described, rewrite
from atlas_lab.checkpoint.gguf_types import SUPPORTED
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.sliced import Slice, Spans
from atlas_lab.checkpoint.store import Store
from atlas_lab.core.tensor import Tensor

SUFFIX = ".gguf"

# Suffixes of the release by those of a GGUF name; that of a weight says its format.
_SUFFIXES = {"scale": "weight_scale_2", "input_scale": "input_scale", "bias": "bias"}
_PROJECTIONS = ("_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_a", ".in_proj_b")


@dataclass(frozen=True)
class _Item:
    """A tensor of the release, and what in the file it is made of."""

    tensor: Tensor
    entry: Entry
    rewrite: Rewrite


@dataclass(frozen=True)
class GgufStore(Store):
    """The tensors of a GGUF file under the names of the release. `read` undoes what the converter rewrote: a tensor
    whose rows or columns are in another order there is a copy, every other a view of the file."""

    file: GgufFile
    _items: Mapping[str, _Item]

    @property
    def metadata(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.file.metadata.items()}

    def read(self, name: str) -> np.ndarray:
        """As `Store.read`; of a part, the pages of its rows are touched and no others."""
        item = self._items.get(name)
        if item is not None:
            return self._values(item, ())
        part = Slice.parse(name)
        item = self._items.get(part.base) if part else None
        if item is None or part is None:
            return super().read(name)
        if part.shape(item.tensor.shape) is None:
            held = f"the {list(item.tensor.shape)} of its tensor"
            raise CheckpointError(f"{self.path}: {name}: found a part outside {held}")
        return self._values(item, part.axes)

    def origin(self, name: str) -> str:
        """What in the file a tensor is: its name and type there, and what was undone."""
        item = self._items[name]
        undone = described(item.rewrite)
        return f"{item.entry.name} ({item.entry.type.name}){f': {undone}' if undone else ''}"

    def _values(self, item: _Item, axes: Sequence[Spans]) -> np.ndarray:
        r, raw = item.rewrite, self.file.read(item.entry.name)
        if r.shape:
            raw = raw.reshape(r.shape)
        last = raw.ndim - 1
        for axis in range(raw.ndim):
            order = r.rows if axis == 0 else r.columns if axis == last else None
            spans = axes[axis] if axis < len(axes) else None
            if order is not None or spans is not None:
                raw = np.take(raw, _taken(order, spans, raw.shape[axis]), axis=axis)
        try:
            values = r.values(raw, item.entry.name) if r.values else raw
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from None
        return values


def open_gguf(path: str | os.PathLike[str]) -> GgufStore:
    """Read everything before the data of a GGUF file; raises CheckpointError, naming tensor or key, also for a
    projection of a type that is not read here and for an order that cannot be undone."""
    file = open_file(Path(path))
    try:
        architecture = gguf_models.architecture(file.metadata)
        config = architecture.config(file.metadata)
        _vocabulary(config, file.entries)
        items = _items(file.entries, architecture, config)
    except CheckpointError as e:
        raise CheckpointError(f"{file.path}: {e}") from None
    tensors = MappingProxyType({name: i.tensor for name, i in items.items()})
    return GgufStore(file.path, (), tensors, MappingProxyType(config), {}, file, MappingProxyType(items))


def _vocabulary(config: dict[str, Any], entries: Mapping[str, Entry]) -> None:
    embed = entries.get(gguf_models.EMBED)
    if embed:
        config["vocab_size"] = embed.shape[0]
        config["tie_word_embeddings"] = gguf_models.HEAD not in entries


def _items(entries: Mapping[str, Entry], architecture: Architecture, config: Mapping[str, Any]) -> dict[str, _Item]:
    out: dict[str, _Item] = {}
    for e in entries.values():
        module, suffix = architecture.renamed(e.name, config["num_hidden_layers"])
        name = f"{module}.{_suffix(module, suffix, e)}" if suffix else module
        if name in out:
            raise CheckpointError(f"{e.name}: found with {out[name].entry.name}, expected one of them for {name}")
        r = rewrite(architecture.name, config, name, e) if name != e.name else Rewrite()
        dtype = "f32" if r.values else e.type.dtype
        out[name] = _Item(Tensor(dtype, r.shape or e.type.stored_shape(e.shape), name), e, r)
    return out


def _suffix(module: str, suffix: str, e: Entry) -> str:
    """What follows the module in the release's name; raises CheckpointError for a projection that is not read here."""
    if suffix != "weight":
        return _SUFFIXES.get(suffix, suffix)
    if len(e.shape) > 1 and module.endswith(_PROJECTIONS) and module.startswith("model.layers.") and not e.type.format:
        expected = ", ".join(SUPPORTED)
        raise CheckpointError(f"{e.name}: found type {e.type.name}, expected a projection of one of {expected}")
    if e.type.dtype == "u8":
        return f"weight_{e.type.format or e.type.name.lower()}"
    return "weight"


def _taken(order: np.ndarray | None, spans: Spans, extent: int) -> np.ndarray:
    """Stored indices along an axis of the wanted spans of the release's order."""
    every = np.arange(extent) if order is None else order
    return every if spans is None else np.concatenate([every[b:e] for b, e in spans])
