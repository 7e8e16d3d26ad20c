"""Kernel arguments as the driver takes them: one little-endian value a parameter, packed once at binding.

A tensor map is 128 bytes by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime.bind import MapPlace, Place
from atlas_lab.runtime.tensor_map import encode

SLOT = 64  # bytes: values start at multiples of it, which are as aligned as any of them must be


def values(params: Sequence[Parameter], arguments: Sequence[Place | int | float]) -> tuple[Any, ...]:
    """NumPy scalars, and arrays of tensor maps, in the order of the compiled kernel's own parameters.

    A pointer is one 8-byte address. A wrapped dispatcher's array is Numba's flattened one of one dimension: two
    nulls, elements, bytes an element, address, extent, stride in bytes.
    """
    out: list[Any] = []
    for p, a in zip(params, arguments, strict=True):
        if not isinstance(a, Place):
            out.append(p.dtype.numpy.type(a))
            continue
        if isinstance(a, MapPlace):
            out.append(encode(a, p))
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
        raw = [np.asarray(v).reshape(-1).view(np.uint8) for v in scalars]
        slots = [max(-(-r.size // SLOT), 1) for r in raw]
        memory = np.zeros((sum(slots) + 1) * SLOT, np.uint8)
        self._values = memory[-memory.ctypes.data % SLOT :]
        base = self._values.ctypes.data
        places = [SLOT * sum(slots[:i]) for i in range(len(raw))]
        for at, r in zip(places, raw, strict=True):
            self._values[at : at + r.size] = r
        self._pointers = np.array([base + at for at in places] or [base], np.uint64)
        self.address = int(self._pointers.ctypes.data)

    def __bytes__(self) -> bytes:
        return self._values.tobytes()
