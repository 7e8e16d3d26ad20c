"""What a wrapped kernel sees of a one-dimensional array parameter."""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.types import Pointer, Scalar


class ArrayPointer(Pointer):
    """A pointer that is also indexed, as Numba's contiguous one-dimensional arrays are. A negative index is out of
    bounds: that it would wrap around in Numba is not worth the mistakes it hides."""

    __slots__ = ("size",)

    def __init__(self, buffer: Any, offset: int, dtype: Scalar, mode: str) -> None:
        super().__init__(buffer, offset, dtype, "global", mode)
        self.size = (buffer.size - offset) // dtype.bytes

    @property
    def shape(self) -> tuple[int]:
        return (self.size,)

    def __len__(self) -> int:
        return int(self.size)

    def __getitem__(self, index: int) -> Any:
        return current().read(self, index, self.dtype, 1)[0]

    def __setitem__(self, index: int, value: Any) -> None:
        current().write(self, index, self.dtype, (self.dtype(value),))
