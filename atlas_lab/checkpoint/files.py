"""Writing safetensors: any number of shards and their index, a few tensors in memory at a time.

The layout is that of the safetensors package, byte for byte; it is written here because the package wants a whole
file in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.safetensors import LENGTH_BYTES
from atlas_lab.checkpoint.store import INDEX, SINGLE
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import DTYPES, dtype

# Widest first, then in the package's order of types: this keeps every tensor aligned to its element size.
_ORDER = (
    *("u64", "i64", "f64", "f32", "u32", "i32", "bf16", "f16", "u16", "i16"),
    *("e8m0", "e4m3", "e5m2", "i8", "u8", "bool"),
)
assert set(_ORDER) == set(DTYPES)


Made = Mapping[str, "np.ndarray | Iterator[np.ndarray]"]
Progress = Callable[[str, int, int], None]  # what is written, groups done, groups in all


def silent(what: str, done: int, of: int) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True)
class Group:
    """Tensors that are made together; `make` returns their values by name, whole or as flat pieces in order."""

    tensors: tuple[Tensor, ...]
    make: Callable[[], Made]

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)


def write_files(
    folder: Path,
    groups: Iterable[Group],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None = None,
    progress: Progress = silent,
) -> None:
    """Write `groups` into an existing folder: one file, or shards of at most `max_shard_bytes` (a larger group has a
    shard of its own) and their index."""
    shards = _shards(groups, max_shard_bytes)
    done, of = 0, sum(map(len, shards))
    for path, shard in _named(folder, shards):
        done = _write(path, shard, metadata, progress, done, of)


def write_headers(
    folder: Path, groups: Iterable[Group], metadata: Mapping[str, str], max_shard_bytes: int | None = None
) -> None:
    """The files that `write_files` would write with holes for values, which read as zeros; raises CheckpointError
    where the file system gives holes their full size."""
    for path, shard in _named(folder, _shards(groups, max_shard_bytes)):
        header, _ = file_header((t for g in shard for t in g.tensors), metadata)
        with path.open("wb") as file:
            file.write(header)
            size = len(header) + sum(g.bytes for g in shard)
            file.truncate(size)
            taken = getattr(os.fstat(file.fileno()), "st_blocks", 0) * 512
        if taken > len(header) + _BLOCKS:
            raise CheckpointError(f"{path}: takes {taken} bytes for a header of {len(header)}, expected sparse files")


_BLOCKS = 1 << 20  # more than a file system rounds up by


def _named(folder: Path, shards: Sequence[Sequence[Group]]) -> Iterator[tuple[Path, Sequence[Group]]]:
    """The path of each file; writes the index of several after the last."""
    if len(shards) == 1:
        yield folder / SINGLE, shards[0]
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        yield folder / name, shard
        weight_map.update({t.name: name for g in shard for t in g.tensors})
    total = sum(g.bytes for shard in shards for g in shard)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which becomes `path` on success and is removed on failure."""
    if path.exists():
        raise CheckpointError(f"{path}: exists, expected a new path for a checkpoint")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None
    try:
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # mkdtemp's is for its owner alone
        yield folder
        folder.rename(path)
    except OSError as e:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


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


def _write(
    path: Path, groups: Sequence[Group], metadata: Mapping[str, str], progress: Progress, done: int, of: int
) -> int:
    tensors = {t.name: t for g in groups for t in g.tensors}
    header, offsets = file_header(tensors.values(), metadata)
    with path.open("wb") as file:
        file.write(header)
        for g in groups:
            progress(g.tensors[0].name, done, of)
            values = g.make()
            for t in g.tensors:
                file.seek(len(header) + offsets[t.name])
                _put(file, t, values[t.name])
            del values  # before the next ones are made
            done += 1
        progress("", done, of)
    return done


def _put(file: BinaryIO, t: Tensor, values: np.ndarray | Iterator[np.ndarray]) -> None:
    if isinstance(values, np.ndarray):
        if (values.shape, values.dtype) != (t.shape, dtype(t.dtype).numpy):
            raise ValueError(f"{t}: made {values.dtype}{list(values.shape)}")
        values = iter((values,))
    written = sum(file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data) for piece in values)
    if written != t.bytes:
        raise ValueError(f"{t}: made {written} bytes of {t.bytes}")


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
