"""A GGUF file, read lazily: metadata and tensor entries when it is opened, values by memory map when asked for.

A file is the magic, its version, how many tensors and metadata keys it has, the keys, the tensor entries, and the data,
which the tensors cover in order, each padded to the alignment (ggml-org/ggml `docs/gguf.md`, `src/gguf.cpp`). The gguf
package's reader is not used: it trusts every count (a damaged one makes it loop and allocate without end), makes an
array of every token of a vocabulary, and does not know type 42. It is what the tests compare this with.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from atlas_lab.checkpoint.gguf_types import Q2_0, Q2_0_KINDS, TYPES, GgmlType
from atlas_lab.checkpoint.json_object import CheckpointError, brief
from atlas_lab.core.tensor import round_up
from atlas_lab.formats.dtypes import dtype

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4  # of ggml
MOST_BYTES = 1 << 62
LONGEST_NAME = 256  # ggml's tensors have 63 bytes at most
MOST_NUMBERS = 10_000  # a longer array of numbers is no property of layers: its values are not kept

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32 = 4
_LEAST_KEY, _LEAST_ENTRY, _LEAST_STRING = 13, 24, 8  # bytes


@dataclass(frozen=True)
class Skipped:
    """An array of metadata whose values are not kept: a vocabulary, say."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} values"


Value = int | float | bool | str | tuple[int | float | bool, ...] | Skipped


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its name, type, shape in weights (outermost first), and where in the data it begins."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return self.type.stored_bytes(prod(self.shape))


_Undecided = tuple[str, int, tuple[int, ...], int]  # name, type number, shape (outermost first), offset


@dataclass
class GgufFile:
    """An open file: metadata by key and entries by name; a map of the file once a tensor was read."""

    path: Path
    metadata: Mapping[str, Value]
    entries: Mapping[str, Entry]
    data_start: int
    _size: int
    _map: mmap.mmap | None = field(default=None, repr=False)

    def read(self, name: str) -> np.ndarray:
        """A tensor as stored (blocks as u8), a read-only view of the file: pages are read when they are touched.

        Raises KeyError for an unknown name, CheckpointError where the file has shrunk or gone since it was opened.
        """
        e = self.entries[name]
        if self._map is None:
            self._map = _map(self.path, self._size)
        host = dtype(e.type.dtype).numpy
        values = np.frombuffer(self._map, host, e.bytes // host.itemsize, self.data_start + e.offset)
        values = values.reshape(e.type.stored_shape(e.shape))
        return values if values.flags.aligned else values.copy()


def open_file(path: Path) -> GgufFile:
    """Read and check everything before the data of a GGUF file; raises CheckpointError.

    Time and memory are bounded by the bytes that are read, those by the file.
    """
    try:
        size = path.stat().st_size
        if size < _LEAST_ENTRY:
            raise CheckpointError(f"{path}: found a file of {size} bytes, expected {_LEAST_ENTRY} or more (its header)")
        with _map(path, size) as data:
            return _parse(data, size, path)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None


def _parse(data: mmap.mmap, size: int, path: Path) -> GgufFile:
    c = _Cursor(data, size, str(path))
    if data[:4] != MAGIC:
        raise CheckpointError(f"{path}: found a file that begins with {brief(data[:4])}, expected {brief(MAGIC)}")
    c.at = 4
    version = c.number("I", "version")
    if version not in VERSIONS:
        swapped = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
        raise CheckpointError(f"{path}: found GGUF version {version}{swapped}, expected 2 or 3")
    tensors = c.number("Q", "tensor count")
    keys = c.count("metadata keys", _LEAST_KEY)
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = c.name("metadata key")
        if key in metadata:
            raise CheckpointError(f"{path}: found metadata key {brief(key)} twice, expected it once")
        metadata[key] = c.value(c.number("I", f"{key}: type"), key)
    c.enough(tensors, "tensors", _LEAST_ENTRY)
    alignment = _alignment(metadata, str(path))
    undecided = [c.entry(alignment) for _ in range(tensors)]
    start = round_up(c.at, alignment)
    entries = _placed(undecided, size - start, alignment, str(path))
    return GgufFile(path, MappingProxyType(metadata), MappingProxyType(entries), start, size)


class _Cursor:
    """Reads a file from the front; whatever reaches beyond its end is a CheckpointError."""

    def __init__(self, data: mmap.mmap, size: int, label: str) -> None:
        self._data, self._size, self._label, self.at = data, size, label, 0

    def number(self, form: str, what: str) -> int:
        """One number of a `struct` type, little-endian."""
        return int(self._unpack(form, what))

    def count(self, what: str, least: int) -> int:
        """A 64-bit count of things that take `least` bytes each."""
        found = self.number("Q", f"number of {what}")
        self.enough(found, what, least)
        return found

    def enough(self, count: int, what: str, least: int) -> None:
        """Raise unless `count` things of `least` bytes can follow."""
        room = self._size - self.at
        if count * least > room:
            raise CheckpointError(
                f"{self._label}: found {count} {what}, expected at most the {room // least} that the {room} bytes "
                "after their number have room for"
            )

    def name(self, what: str) -> str:
        """A name, which sentences show as it is: printable and not long."""
        found = self.text(what)
        if len(found) > LONGEST_NAME or not found.isprintable():
            raise CheckpointError(
                f"{self._label}: found a {what} {brief(found)}, expected at most {LONGEST_NAME} printable characters"
            )
        return found

    def text(self, what: str) -> str:
        length = self.count(f"bytes of a {what}", 1)
        raw = self._data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._label}: found a {what} {brief(raw)}, expected UTF-8") from None

    def value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self.text(f"value of {key}")
        if kind in _NUMBERS:
            return self._unpack(_NUMBERS[kind], key)
        if kind == _ARRAY:
            return self._array(key)
        raise CheckpointError(f"{self._label}: {key}: found value type {kind}, expected one of 0 to 12")

    def entry(self, alignment: int) -> _Undecided:
        name = self.name("tensor name")
        label = f"{self._label}: tensor {brief(name)}"
        dims = self.number("I", f"{name}: number of dimensions")
        if not 1 <= dims <= MOST_DIMENSIONS:
            raise CheckpointError(f"{label}: found {dims} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(self.number("Q", f"{name}: shape") for _ in range(dims))[::-1]
        if not all(shape) or prod(shape) > MOST_BYTES // 8:
            raise CheckpointError(
                f"{label}: found shape {list(shape)}, expected extents of 1 or more, at most 2^59 in all"
            )
        number = self.number("I", f"{name}: type")
        if number not in TYPES and number != Q2_0:
            raise CheckpointError(f"{label}: found type {number}, expected a type of ggml")
        offset = self.number("Q", f"{name}: offset")
        if offset % alignment:
            raise CheckpointError(f"{label}: found offset {offset}, expected a multiple of the alignment {alignment}")
        return name, number, shape, offset

    def _unpack(self, form: str, what: str) -> int | float | bool:
        try:
            (found,) = struct.unpack_from(f"<{form}", self._data, self.at)
        except struct.error:
            raise CheckpointError(f"{self._label}: found the file's end at {self._size} bytes, in: {what}") from None
        self.at += struct.calcsize(f"<{form}")
        return found  # type: ignore[no-any-return]

    def _array(self, key: str) -> Value:
        kind = self.number("I", f"{key}: type of values")
        if kind == _STRING:
            count = self.count(f"strings of {key}", _LEAST_STRING)
            unpack, at = struct.Struct("<Q").unpack_from, self.at
            for _ in range(count):
                if at + _LEAST_STRING > self._size:
                    break
                at += _LEAST_STRING + unpack(self._data, at)[0]
            self._skip(at, key)
            return Skipped(count)
        if kind not in _NUMBERS:
            raise CheckpointError(
                f"{self._label}: {key}: found an array of value type {kind}, expected numbers or text"
            )
        form = _NUMBERS[kind]
        width = struct.calcsize(f"<{form}")
        count = self.count(f"numbers of {key}", width)
        begin = self.at
        self._skip(begin + count * width, key)
        return struct.unpack_from(f"<{count}{form}", self._data, begin) if count <= MOST_NUMBERS else Skipped(count)

    def _skip(self, to: int, key: str) -> None:
        if to > self._size:
            raise CheckpointError(f"{self._label}: found the file's end at {self._size} bytes, in: {key}")
        self.at = to


def _alignment(metadata: Mapping[str, Value], label: str) -> int:
    found = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1 or found & (found - 1):
        raise CheckpointError(f"{label}: {ALIGNMENT}: found {brief(found)}, expected a power of two")
    return found


def _placed(undecided: Sequence[_Undecided], data_bytes: int, alignment: int, label: str) -> dict[str, Entry]:
    """Entries by name, type 42 decided; raises CheckpointError unless their bytes, padded, cover the data in order."""
    out: dict[str, Entry] = {}
    kinds: tuple[GgmlType, ...] = Q2_0_KINDS  # those that fit every tensor of type 42 so far
    at, before = 0, ""
    for i, (name, number, shape, offset) in enumerate(undecided):
        here = f"{label}: tensor {brief(name)}"
        if name in out:
            raise CheckpointError(f"{here}: found twice, expected once")
        if offset != at:
            where = f"where tensor {brief(before)} ends" if before else "where the data begins"
            raise CheckpointError(f"{here}: found offset {offset}, expected {at}, {where}")
        if number == Q2_0:
            end = undecided[i + 1][3] if i + 1 < len(undecided) else None
            kinds = _ternary(kinds, shape, offset, end, data_bytes, alignment, here)
        kind = kinds[0] if number == Q2_0 else TYPES[number]
        if shape[-1] % kind.block:
            whole = f"whole blocks of {kind.block} ({kind.name})"
            raise CheckpointError(f"{here}: found rows of {shape[-1]} weights, expected {whole}")
        e = out[name] = Entry(name, kind, shape, offset)
        if offset + e.bytes > data_bytes:
            raise CheckpointError(
                f"{here}: found {data_bytes - offset} bytes up to the end of the file, expected {e.bytes} ({kind.name} "
                f"{list(shape)}): the file is cut short"
            )
        at, before = round_up(offset + e.bytes, alignment), name
    if undecided and data_bytes > at:
        raise CheckpointError(f"{label}: found {data_bytes} bytes of data, expected {at} (no tensor covers the rest)")
    return _decided(out, kinds, label)


def _ternary(
    kinds: tuple[GgmlType, ...],
    shape: tuple[int, ...],
    offset: int,
    end: int | None,
    data_bytes: int,
    alignment: int,
    here: str,
) -> tuple[GgmlType, ...]:
    """The kinds of type 42 as which a tensor takes the bytes up to `end`, the next tensor's offset; the last one has
    None, and its padding may be missing. Raises CheckpointError where there is none."""

    def fits(k: GgmlType) -> bool:
        mine = k.stored_bytes(prod(shape))
        room = (data_bytes if end is None else end) - offset
        padded = round_up(mine, alignment)
        return not shape[-1] % k.block and (mine <= room <= padded if end is None else room == padded)

    found = tuple(k for k in kinds if fits(k))
    if not found:
        sizes = " or ".join(f"{k.stored_bytes(prod(shape))} (groups of {k.block})" for k in kinds)
        room = (data_bytes if end is None else end) - offset
        raise CheckpointError(f"{here}: found {room} bytes of Q2_0 {list(shape)}, expected {sizes}, padded")
    return found


def _decided(entries: dict[str, Entry], kinds: Sequence[GgmlType], label: str) -> dict[str, Entry]:
    """The entries with the one kind of type 42 that fits all of them."""
    ternary = [e for e in entries.values() if e.type in Q2_0_KINDS]
    if ternary and len(kinds) > 1:
        raise CheckpointError(
            f"{label}: tensor {brief(ternary[0].name)}: found Q2_0 {list(ternary[0].shape)}, which padding makes as "
            "large in groups of 64 as of 128, expected a tensor that tells"
        )
    return entries | {e.name: replace(e, type=kinds[0]) for e in ternary}


def _map(path: Path, size: int) -> mmap.mmap:
    """The file, which had `size` bytes when it was opened; touching a page beyond its end would kill the process."""
    try:
        with path.open("rb") as file:
            found = file.seek(0, 2)
            if found != size:
                raise CheckpointError(f"{path}: found {found} bytes, expected the {size} it had when it was opened")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
