"""Writing safetensors: any number of shards and their index, a few tensors in memory at a time.

The layout is that of the safetensors package, byte for byte; it is written here because the package wants a whole
file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from atlas_lab.checkpoint.safetensors import LENGTH_BYTES
from atlas_lab.checkpoint.store import INDEX, SINGLE
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import DTYPES, dtype

# Widest first, then in the package's order of types: this keeps every tensor aligned to its element size.
_ORDER = ("u64", "i64", "f64", "f32", "u32", "i32", "bf16", "f16", "u16", "i16", "e4m3", "e5m2", "i8", "u8", "bool")
assert set(_ORDER) == set(DTYPES)


@dataclass(frozen=True)
class Group:
    """Tensors that are made together; `make` returns their values by name."""

    tensors: tuple[Tensor, ...]
    make: Callable[[], Mapping[str, np.ndarray]]

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)


def write_files(
    folder: Path, groups: Iterable[Group], metadata: Mapping[str, str], max_shard_bytes: int | None = None
) -> None:
    """Write `groups` into an existing folder: one file, or shards of at most `max_shard_bytes` (a larger group has a
    shard of its own) and their index."""
    shards = _shards(groups, max_shard_bytes)
    if len(shards) == 1:
        _write(folder / SINGLE, shards[0], metadata)
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard, metadata)
        weight_map.update({t.name: name for g in shard for t in g.tensors})
    total = sum(g.bytes for shard in shards for g in shard)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shards(groups: Iterable[Group], limit: int | None) -> list[list[Group]]:
    shards: list[list[Group]] = [[]]
    held = 0
    for g in groups:
        if limit is not None and shards[-1] and held + g.bytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(g)
        held += g.bytes
    return shards


def _write(path: Path, groups: Sequence[Group], metadata: Mapping[str, str]) -> None:
    tensors = {t.name: t for g in groups for t in g.tensors}
    header, offsets = file_header(tensors.values(), metadata)
    with path.open("wb") as file:
        file.write(header)
        for g in groups:
            values = g.make()
            for t in g.tensors:
                _put(file, t, values[t.name], len(header) + offsets[t.name])


def _put(file: BinaryIO, t: Tensor, values: np.ndarray, at: int) -> None:
    if (values.shape, values.dtype) != (t.shape, dtype(t.dtype).numpy):
        raise ValueError(f"{t}: made {values.dtype}{list(values.shape)}")
    file.seek(at)
    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def file_header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file up to its data, and where in the data each tensor begins."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets = {}
    at = 0
    for t in sorted(tensors, key=lambda t: (_ORDER.index(t.dtype), t.name)):
        offsets[t.name] = at
        entries[t.name] = {
            "dtype": dtype(t.dtype).safetensors,
            "shape": list(t.shape),
            "data_offsets": [at, at + t.bytes],
        }
        at += t.bytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, offsets
