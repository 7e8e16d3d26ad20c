"""Tensor maps on the interpreter: which bytes a box is, in global and in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.lang.types import Pointer, Scalar

CHUNK = 16
Bytes = npt.NDArray[np.uint8]
_SHIFT = 3  # from the address bits that a swizzle reads to those that it changes
_CHANGED = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}


class Span(NamedTuple):
    """Bytes [at, at + size) of global memory."""

    at: int
    size: int


class MapPointer(Pointer):
    """A kernel's tensor map parameter."""

    __slots__ = ("map",)

    def __init__(self, buffer: Any, dtype: Scalar, mode: str, tensor_map: TensorMap) -> None:
        super().__init__(buffer, tensor_map.view.offset, dtype, "map", mode)
        self.map = tensor_map


class Box:
    """One box of a map at coordinates. `spans` are its rows inside the view; `whole` that all of it is."""

    def __init__(self, p: MapPointer, at: Sequence[int]) -> None:
        m = p.map
        self._memory, self._box, self._width = p.buffer, m.box, p.dtype.bytes
        self._strides = m.strides
        edges = list(zip(at, m.box, m.view.shape, strict=True))
        self._inside = tuple(slice(max(-c, 0), max(min(b, e - c), max(-c, 0))) for c, b, e in edges)
        self._counts = tuple(s.stop - s.start for s in self._inside)
        first = (c + s.start for c, s in zip(at, self._inside, strict=True))
        self._first = p.offset + sum(c * s for c, s in zip(first, self._strides, strict=True))
        self.whole = self._counts == m.box
        self.size = m.bytes

    @property
    def spans(self) -> Iterator[Span]:
        *outer, inner = self._counts
        if 0 in self._counts:
            return
        for index in np.ndindex(*outer):
            yield Span(
                self._first + sum(i * s for i, s in zip(index, self._strides, strict=False)), inner * self._width
            )

    def _view(self) -> Bytes:
        """The part inside, in global memory: its counts, then the bytes of an element."""
        raw = np.frombuffer(self._memory.bytes, np.uint8)[self._first :]
        return np.lib.stride_tricks.as_strided(raw, (*self._counts, self._width), (*self._strides, 1))

    def gather(self) -> Bytes:
        """The box's bytes, row-major, zero outside the view."""
        out = np.zeros((*self._box, self._width), np.uint8)
        if 0 not in self._counts:
            out[self._inside] = self._view()
        return out.reshape(-1)

    def scatter(self, data: Bytes) -> None:
        """Write the part of the box's bytes that is inside the view."""
        if 0 not in self._counts:
            self._view()[...] = data.reshape(*self._box, self._width)[self._inside]

    def used(self) -> npt.NDArray[np.bool_]:
        """Which 16-byte chunks of the box hold something inside the view."""
        marks = np.zeros((*self._box, self._width), np.bool_)
        marks[self._inside] = True
        return np.asarray(marks.reshape(-1, CHUNK).any(axis=1))


class Line:
    """Contiguous bytes of global memory, as a box."""

    whole = True

    def __init__(self, memory: Any, at: int, size: int) -> None:
        self._memory, self._at, self.size = memory, at, size

    @property
    def spans(self) -> Iterator[Span]:
        yield Span(self._at, self.size)

    def gather(self) -> Bytes:
        return np.frombuffer(bytes(self._memory.bytes[self._at : self._at + self.size]), np.uint8)

    def scatter(self, data: Bytes) -> None:
        self._memory.bytes[self._at : self._at + self.size] = data.tobytes()

    def used(self) -> npt.NDArray[np.bool_]:
        return np.ones(self.size // CHUNK, np.bool_)


def places(at: int, size: int, swizzle: int) -> npt.NDArray[np.int64]:
    """Where each 16-byte chunk of a box that starts at shared address `at` lies, in bytes."""
    address = np.arange(at, at + size, CHUNK, dtype=np.int64)
    return address ^ ((address >> _SHIFT) & _CHANGED[swizzle])


def runs(chunks: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Contiguous runs of 16-byte chunks at these addresses: start and size in bytes."""
    ordered = np.sort(chunks)
    breaks = np.flatnonzero(np.diff(ordered) != CHUNK) + 1
    for part in np.split(ordered, breaks):
        if part.size:
            yield int(part[0]), CHUNK * part.size


def pieces(at: int, size: int) -> Iterator[tuple[int, int]]:
    """Bytes [at, at + size) as accesses that a shadow takes: aligned multiples of 16 bytes, and powers of two below."""
    while size:
        step = min(at & -at or CHUNK, CHUNK)
        while step > size:
            step >>= 1
        if step == CHUNK:
            step = size & -CHUNK
        yield at, step
        at, size = at + step, size - step
