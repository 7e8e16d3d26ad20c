"""Global memory as a caller makes it: a named allocation with NumPy on the outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atlas_lab.kernels.lang.types import SCALARS, Scalar
from atlas_lab.simt.errors import SimtError
from atlas_lab.simt.memory import POISON, Memory

DTypeLike = Scalar | str | npt.DTypeLike


def _numpy(dtype: DTypeLike) -> np.dtype[Any]:
    if isinstance(dtype, Scalar):
        return np.dtype(dtype.numpy)
    if isinstance(dtype, str) and dtype in SCALARS:
        return np.dtype(SCALARS[dtype].numpy)
    return np.dtype(dtype)


class Buffer(Memory):
    """A global allocation of `nbytes` bytes, aligned to 256 as on a device.

    `data`, if given, is copied in and must have `nbytes` bytes; otherwise the bytes are zero if `initialised`,
    else poison that a kernel may not read before it wrote it. Every index is checked against the size, so an
    access before or behind the allocation is reported wherever it would land.
    """

    __slots__ = ()

    def __init__(
        self, name: str, nbytes: int, *, data: npt.NDArray[Any] | None = None, initialised: bool = False
    ) -> None:
        if nbytes < 0 or (data is not None and data.nbytes != nbytes):
            found = nbytes if data is None else data.nbytes
            raise SimtError(f"buffer {name!r}: found {found} bytes of data, expected {max(nbytes, 0)}", buffer=name)
        super().__init__(name, nbytes, "global", 256)
        if data is not None:
            self.bytes[:nbytes] = np.ascontiguousarray(data).tobytes()
        elif initialised:
            self.bytes[:nbytes] = bytes(nbytes)
        else:
            self.gaps = bytearray(nbytes)

    @classmethod
    def of(cls, name: str, data: npt.NDArray[Any]) -> Buffer:
        """A buffer that holds a copy of `data`."""
        return cls(name, data.nbytes, data=data)

    def poison(self) -> None:
        """Forget the contents: every byte is uninitialised again."""
        self.bytes[: self.size] = bytes([POISON]) * self.size
        self.gaps = bytearray(self.size)

    def write(self, data: npt.NDArray[Any], byte_offset: int = 0) -> None:
        """Copy `data` in; its bytes become initialised."""
        raw = np.ascontiguousarray(data).tobytes()
        if byte_offset < 0 or byte_offset + len(raw) > self.size:
            raise SimtError(
                f"buffer {self.name!r}: found data for bytes [{byte_offset}, {byte_offset + len(raw)}), expected at "
                f"most {self.size}",
                buffer=self.name,
            )
        self.bytes[byte_offset : byte_offset + len(raw)] = raw
        if self.gaps is not None:
            self.gaps[byte_offset : byte_offset + len(raw)] = b"\1" * len(raw)

    def array(
        self, dtype: DTypeLike = np.uint8, shape: int | tuple[int, ...] = -1, byte_offset: int = 0
    ) -> npt.NDArray[Any]:
        """A read-only view of the bytes from `byte_offset` as `dtype` (a NumPy dtype, an element type or its name);
        uninitialised bytes read as 0xFF."""
        kind = _numpy(dtype)
        rest = self.size - byte_offset
        count = rest // kind.itemsize if shape == -1 else int(np.prod(shape))
        if byte_offset < 0 or count < 0 or count * kind.itemsize > rest:
            raise SimtError(
                f"buffer {self.name!r}: found a view of {count} x {kind} from byte {byte_offset}, expected at most "
                f"{self.size} bytes",
                buffer=self.name,
            )
        view = np.frombuffer(memoryview(self.bytes).toreadonly(), kind, count, byte_offset)
        return view.reshape(shape)

    @property
    def unwritten(self) -> list[tuple[int, int]]:
        """The byte ranges [start, end) that are still uninitialised."""
        if self.gaps is None:
            return []
        marks = np.concatenate(([1], np.frombuffer(self.gaps, np.uint8), [1])).astype(np.int8)
        edges = np.flatnonzero(np.diff(marks))
        return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
