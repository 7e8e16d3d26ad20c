"""A checkpoint on disk: one safetensors file, or a folder with one or with shards and their index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_lab.checkpoint.json_object import CheckpointError, brief, is_text_map, parse_object, read_bytes, shown
from atlas_lab.checkpoint.safetensors import Header, SafetensorsFile, open_file
from atlas_lab.checkpoint.sliced import Slice
from atlas_lab.core.tensor import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GRIDS = (".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True)
class Store:
    """The tensors of a checkpoint by name, as handles; values are read when asked for.

    `metadata` is that of the files (of the first that has a key); `config` is config.json, empty without one. A scale
    grid that is stored `[R, 1, C, 1]` (ModelOpt's FP8_PB_WO) is `[R, C]` here, the same bytes.
    """

    path: Path
    files: tuple[SafetensorsFile, ...]
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    _file_of: Mapping[str, SafetensorsFile]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Read the headers of a .safetensors file or of a folder; raises CheckpointError."""
        path = Path(path)
        if path.is_dir():
            files = _folder(path)
            config = path / CONFIG
        elif path.suffix == ".safetensors" or not path.exists():
            files = (open_file(path),)
            config = path.parent / CONFIG
        else:
            raise CheckpointError(f"{path}: found a file, expected a folder, a .safetensors or a .gguf file")
        files = tuple(_flat(f) for f in files)
        file_of = {name: f for f in files for name in f.tensors}
        return cls(
            path,
            files,
            MappingProxyType({name: f.tensors[name] for name, f in file_of.items()}),
            parse_object(read_bytes(config), str(config)) if config.is_file() else {},
            file_of,
        )

    @property
    def metadata(self) -> dict[str, str]:
        return {k: v for f in reversed(self.files) for k, v in f.header.metadata.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.bytes for t in self.tensors.values())

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of safetensors files in the folder that are no part of the checkpoint."""
        if not self.path.is_dir():
            return ()
        mine = {f.path for f in self.files}
        return tuple(sorted(p.name for p in self.path.glob("*.safetensors") if p not in mine))

    def read(self, name: str) -> np.ndarray:
        """The values of one tensor (ml_dtypes for bf16, e4m3, e5m2), a read-only view of the file that costs what is
        touched of it; of a part of one (`NAME[0:64]`), an array of their own and exactly those bytes read. Raises
        CheckpointError for a name the checkpoint has not."""
        if name not in self._file_of:
            part = Slice.parse(name)
            if part and part.base in self._file_of:
                return self._file_of[part.base].read_part(part)
            near = get_close_matches(name, self.tensors, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise CheckpointError(f"{self.path}: {name}: missing, expected one of {len(self.tensors)} tensors{hint}")
        return self._file_of[name].read(name)


def _flat(file: SafetensorsFile) -> SafetensorsFile:
    """The file with its scale grids as matrices."""
    grids = {
        name: replace(t, shape=(t.shape[0], t.shape[2]))
        for name, t in file.tensors.items()
        if name.endswith(GRIDS) and len(t.shape) == 4 and t.shape[1] == t.shape[3] == 1
    }
    if not grids:
        return file
    header = Header(MappingProxyType({**file.tensors, **grids}), file.header.offsets, file.header.metadata)
    return replace(file, header=header)


def _folder(folder: Path) -> tuple[SafetensorsFile, ...]:
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        files = _shards(folder, index)
        if folder / SINGLE not in (f.path for f in files):  # some exporters index a single file, too
            raise CheckpointError(f"{folder}: found both {SINGLE} and {INDEX}, expected one of them")
        return files
    if single.exists():
        return (open_file(single),)
    if not index.exists():
        raise CheckpointError(f"{folder}: found neither {SINGLE} nor {INDEX}, expected one of them")
    return _shards(folder, index)


def _shards(folder: Path, index: Path) -> tuple[SafetensorsFile, ...]:
    weight_map = parse_object(read_bytes(index), str(index)).get("weight_map")
    if not is_text_map(weight_map):
        raise CheckpointError(f"{index}: weight_map: found {brief(weight_map)}, expected file names by tensor")
    assert isinstance(weight_map, dict)
    shards = dict.fromkeys(weight_map.values())
    for shard in shards:
        if not _is_inside(shard):
            raise CheckpointError(f"{index}: weight_map: found shard {brief(shard)}, expected a file in this folder")
        if not os.path.isfile(folder / shard):  # which a name that is too long is not, either
            tensor = next(t for t, s in weight_map.items() if s == shard)
            raise CheckpointError(
                f"{index}: weight_map: {shown(tensor)}: found no shard {brief(shard)}, expected it here"
            )
    files = {shard: open_file(folder / shard) for shard in shards}
    for tensor, shard in weight_map.items():
        if tensor not in files[shard].tensors:
            raise CheckpointError(f"{folder / shard}: {shown(tensor)}: missing, expected it here by {INDEX}")
    for shard, file in files.items():
        for tensor in file.tensors:
            if weight_map.get(tensor) != shard:
                home = f"only in {weight_map[tensor]}" if tensor in weight_map else "no tensor that lacks an entry"
                raise CheckpointError(f"{folder / shard}: {shown(tensor)}: found here, expected {home} by {INDEX}")
    return tuple(files.values())


def _is_inside(shard: str) -> bool:
    """Whether a name of an index stays in its folder, read as a path of any system."""
    path = PureWindowsPath(shard)  # takes / and \\ for separators
    return shard not in ("", ".") and not path.anchor and ".." not in path.parts and "\0" not in shard
