"""Kernel arguments as the driver takes them: one little-endian value a parameter, packed once at binding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime.bind import Place

SLOT = 16  # bytes from one value to the next: more than any value's size and alignment


def values(params: Sequence[Parameter], arguments: Sequence[Place | int | float]) -> tuple[Any, ...]:
    """NumPy scalars in the order of the compiled kernel's own parameters.

    A pointer is one 8-byte address. A wrapped dispatcher's array is Numba's flattened one of one dimension: two
    nulls, elements, bytes an element, address, extent, stride in bytes.
    """
    out: list[Any] = []
    for p, a in zip(params, arguments, strict=True):
        if not isinstance(a, Place):
            out.append(p.dtype.numpy.type(a))
            continue
        address = np.int64(a.buffer.memory + a.offset)
        if p.abi == "array":
            size = np.int64(p.dtype.bytes)
            out += [np.int64(0), np.int64(0), np.int64(a.elements), size, address, np.int64(a.elements), size]
        else:
            out.append(address)
    return tuple(out)


class Packed:
    """`values` in memory: `address` is that of an array of pointers to them, as cuLaunchKernel takes it.

    The object must outlive every launch that uses the address.
    """

    def __init__(self, scalars: Sequence[Any]) -> None:
        self._values = np.zeros((max(len(scalars), 1), SLOT), np.uint8)
        for slot, v in zip(self._values, scalars, strict=False):
            raw = np.asarray(v).reshape(1).view(np.uint8)
            slot[: raw.size] = raw
        base = self._values.ctypes.data
        self._pointers = np.array([base + SLOT * i for i in range(len(self._values))], np.uint64)
        self.address = int(self._pointers.ctypes.data)

    def __bytes__(self) -> bytes:
        return self._values.tobytes()
