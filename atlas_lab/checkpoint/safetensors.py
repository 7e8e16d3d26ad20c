"""A safetensors file, read lazily: the header when it is opened, values by memory map when they are asked for.

A file is eight bytes with the header's length (little-endian), the header (one JSON object from tensor name to dtype,
shape and offsets), and the data, which the tensors cover without gap or overlap.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_lab.checkpoint.json_object import (
    CheckpointError,
    brief,
    is_integer,
    is_text,
    is_text_map,
    parse_object,
    refuse_endless,
)
from atlas_lab.checkpoint.sliced import Slice
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import BY_SAFETENSORS, dtype

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # of the format's own library
MOST_DIMENSIONS = 64  # of NumPy
MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Header:
    """Tensors by name, where each begins and ends in the data (bytes), and the `__metadata__`."""

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, str]


@dataclass
class SafetensorsFile:
    """An open file; holds its header, and a map of the file once a tensor was read."""

    path: Path
    header: Header
    data_start: int
    _map: mmap.mmap | None = field(default=None, repr=False)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.header.tensors

    def read(self, name: str) -> np.ndarray:
        """The values of one tensor as a read-only view of the file: pages are read when they are touched.

        Raises KeyError for an unknown name, CheckpointError where the file has shrunk or gone since it was opened.
        """
        tensor = self.tensors[name]
        begin, end = (self.data_start + o for o in self.header.offsets[name])
        host = dtype(tensor.dtype).numpy
        if begin == end:
            return np.empty(tensor.shape, host)
        if self._map is None:
            self._map = _map(self.path, self._size)
        values = np.frombuffer(self._map, host, tensor.elements, begin).reshape(tensor.shape)
        # Some writers do not pad the header to 8 bytes, which moves every tensor off its alignment.
        return values if values.flags.aligned else values.copy()

    def read_part(self, part: Slice) -> np.ndarray:
        """The values of a part of one tensor, in memory of their own: exactly its bytes are read from the file, those
        of a column range row by row.

        Raises KeyError for an unknown name, CheckpointError for a part that the tensor has not, and where the file
        has shrunk or gone since it was opened.
        """
        tensor = self.tensors[part.base]
        shape = part.shape(tensor.shape)
        if shape is None:
            raise CheckpointError(f"{self.path}: {part}: found a part outside the {list(tensor.shape)} of its tensor")
        element = dtype(tensor.dtype)
        values = np.empty(shape, element.numpy)
        target = values.reshape(-1).view(np.uint8).data
        begin = self.data_start + self.header.offsets[part.base][0]
        try:
            with open_raw(self.path) as file:
                _same_size(self.path, os.fstat(file.fileno()).st_size, self._size)
                at = 0
                for first, count in part.runs(tensor.shape):
                    end = at + count * element.bytes
                    _fill(file, begin + first * element.bytes, target[at:end], self.path)
                    at = end
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be read ({e.strerror})") from None
        return values

    @property
    def _size(self) -> int:
        return self.data_start + max((last for _, last in self.header.offsets.values()), default=0)


def open_raw(path: Path) -> io.FileIO:
    """A file whose reads are those asked for, no more."""
    return io.FileIO(path)


def _fill(file: io.FileIO, at: int, target: memoryview, path: Path) -> None:
    file.seek(at)
    while target:
        count = file.readinto(target)
        if not count:
            raise CheckpointError(f"{path}: found its end at {file.tell()} bytes, expected {len(target)} more")
        target = target[count:]


def open_file(path: Path) -> SafetensorsFile:
    """Read and check the header of a safetensors file; raises CheckpointError.

    No more than the header is read, and no more is allocated than the file is long.
    """
    refuse_endless(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < LENGTH_BYTES:
                raise CheckpointError(f"{path}: found a file of {size} bytes, expected 8 or more (the header's length)")
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            room = size - LENGTH_BYTES
            if length > room:
                raise CheckpointError(
                    f"{path}: found a header length of {length} bytes, expected at most the {room} that follow it"
                )
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    f"{path}: found a header length of {length} bytes, expected at most {HEADER_LIMIT}"
                )
            header = parse_header(file.read(length), room - length, str(path))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    return SafetensorsFile(path, header, LENGTH_BYTES + length)


def parse_header(header: bytes, data_bytes: int, label: str) -> Header:
    """Check a header against the `data_bytes` that follow it; raises CheckpointError, `label` names the file."""
    entries = parse_object(header, label)
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not is_text_map(metadata):
        raise CheckpointError(f"{label}: __metadata__: found {brief(metadata)}, expected strings by name")
    tensors: dict[str, Tensor] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        tensors[name], offsets[name] = _entry(name, entry, f"{label}: tensor {brief(name)}")
    _cover(offsets, data_bytes, label)
    return Header(MappingProxyType(tensors), MappingProxyType(offsets), MappingProxyType(metadata or {}))


def _entry(name: str, entry: Any, label: str) -> tuple[Tensor, tuple[int, int]]:
    if not is_text(name):
        raise CheckpointError(f"{label}: found a name that is not Unicode text, expected text")
    if not isinstance(entry, dict):
        raise CheckpointError(f"{label}: found {brief(entry)}, expected an object with dtype, shape and data_offsets")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise CheckpointError(f"{label}: {key}: missing, found {brief(sorted(entry))}")
    spelling, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(spelling, str) or spelling not in BY_SAFETENSORS:
        known = ", ".join(BY_SAFETENSORS)
        raise CheckpointError(f"{label}: dtype: found {brief(spelling)}, expected one of {known}")
    element = BY_SAFETENSORS[spelling]
    if not _is_shape(shape):
        raise CheckpointError(
            f"{label}: shape: found {brief(shape)}, expected a list of at most {MOST_DIMENSIONS} integers of 0 or more"
        )
    if prod(e for e in shape if e) * element.bytes > MOST_BYTES:
        raise CheckpointError(f"{label}: shape: found {brief(shape)}, expected at most 2^62 bytes")
    if not (isinstance(span, list) and len(span) == 2 and all(is_integer(o) and 0 <= o <= MOST_BYTES for o in span)):
        raise CheckpointError(f"{label}: data_offsets: found {brief(span)}, expected two integers from 0 to 2^62")
    begin, end = span
    if begin > end:
        raise CheckpointError(f"{label}: data_offsets: found {brief(span)}, expected the first at most the second")
    wanted = prod(shape) * element.bytes
    if end - begin != wanted:
        raise CheckpointError(
            f"{label}: data_offsets: found {end - begin} bytes, expected {wanted} for {spelling} {brief(shape)}"
        )
    if begin % element.bytes:
        raise CheckpointError(
            f"{label}: data_offsets: found a start at {begin}, expected a multiple of the {element.bytes} bytes of "
            f"{spelling}"
        )
    return Tensor(element.name, tuple(shape), name), (begin, end)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(is_integer(e) and e >= 0 for e in shape)


def _cover(offsets: Mapping[str, tuple[int, int]], data_bytes: int, label: str) -> None:
    """Raise CheckpointError unless the tensors cover the data exactly, in some order."""
    at, before = 0, ""
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin < at:
            raise CheckpointError(
                f"{label}: tensor {brief(name)}: data_offsets: found a start at {begin}, inside tensor "
                f"{brief(before)}, expected {at}"
            )
        if begin > at:
            raise CheckpointError(
                f"{label}: tensor {brief(name)}: data_offsets: found a start at {begin}, expected {at}, where "
                + (f"tensor {brief(before)} ends" if before else "the data begins")
            )
        at, before = end, name
    if data_bytes < at:
        raise CheckpointError(f"{label}: found {data_bytes} bytes of data, expected {at} (the file is cut short)")
    if data_bytes > at:
        raise CheckpointError(f"{label}: found {data_bytes} bytes of data, expected {at} (no tensor covers the rest)")


def _map(path: Path, size: int) -> mmap.mmap:
    """The file, which had `size` bytes when it was opened; touching a page beyond its end would kill the process."""
    try:
        with path.open("rb") as file:
            _same_size(path, file.seek(0, 2), size)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None


def _same_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise CheckpointError(f"{path}: found {found} bytes, expected the {size} it had when it was opened")
