"""Element types and parameter annotations of kernels.

A `Scalar` is dual: in a kernel on the interpreter it is a cast (`u32(x)` masks a Python integer, truncates a float
that fits and raises for one that does not; `f32(x)` rounds to single precision); in Numba's typing it is a number
class. `In[u8]`, `Out[bf16]`, `InOut[f32]` and `i32` annotate a kernel's parameters: they give the compile signature,
the interpreter's element types, and which buffers a launch reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.formats.dtypes import dtype


class Scalar:
    """An element type of kernel code. `numba` names its Numba type ("" where arithmetic has none: bf16, fp8)."""

    __slots__ = ("bits", "least", "mask", "most", "name", "numba", "numpy", "signed")

    def __init__(self, name: str, numba: str = "", signed: bool = False) -> None:
        self.name, self.numba, self.signed = name, numba, signed
        self.numpy = dtype(name).numpy
        self.bits = dtype(name).bits
        self.mask = (1 << self.bits) - 1
        self.most = self.mask >> 1 if signed else self.mask
        self.least = self.most - self.mask

    @property
    def bytes(self) -> int:
        return self.bits // 8

    def __call__(self, value: Any) -> int:
        if value.__class__ is int and self.least <= value <= self.most:
            return value
        given = int(value)
        v = given & self.mask
        if v > self.most:
            v -= self.mask + 1
        if v != given and isinstance(value, float | np.floating):
            # PTX saturates, by the width that the compiler happens to choose; LLVM promises nothing
            raise OverflowError(f"{self.name}({value}): no {self.name} holds it; clamp it first, or use f32_i32")
        return v

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (_scalar, (self.name,))


class FloatScalar(Scalar):
    """A floating-point cast: rounds to nearest, ties to even."""

    __slots__ = ()

    def __call__(self, value: Any) -> Any:
        return self.numpy.type(value)


class StorageScalar(Scalar):
    """An element type that exists in memory only; conversions are intrinsics."""

    __slots__ = ()

    def __call__(self, value: Any) -> Any:
        raise TypeError(f"{self.name} is a storage type: convert with an intrinsic, not with {self.name}(...)")


i8 = Scalar("i8", "int8", signed=True)
u8 = Scalar("u8", "uint8")
i16 = Scalar("i16", "int16", signed=True)
u16 = Scalar("u16", "uint16")
i32 = Scalar("i32", "int32", signed=True)
u32 = Scalar("u32", "uint32")
i64 = Scalar("i64", "int64", signed=True)
u64 = Scalar("u64", "uint64")
f32 = FloatScalar("f32", "float32")
f16 = StorageScalar("f16")
bf16 = StorageScalar("bf16")
e4m3 = StorageScalar("e4m3")
e5m2 = StorageScalar("e5m2")

SCALARS: dict[str, Scalar] = {s.name: s for s in (i8, u8, i16, u16, i32, u32, i64, u64, f32, f16, bf16, e4m3, e5m2)}


def _scalar(name: str) -> Scalar:
    return SCALARS[name]


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: a pointer to global memory or a map of it (`mode` in, out or inout), or a scalar
    (`mode` "").

    `abi` is `pointer` (8 bytes), `scalar`, `map` (a tensor map, 128 bytes, handed over by value), or `array`: Numba's
    flattened one-dimensional array, for wrapped dispatchers only.
    """

    mode: str
    dtype: Scalar
    abi: str = "pointer"
    name: str = ""

    @property
    def reads(self) -> bool:
        return self.mode in ("in", "inout")

    @property
    def writes(self) -> bool:
        return self.mode in ("out", "inout")


class _Mode(type):
    mode: str
    abi: str = "pointer"

    def __getitem__(cls, item: Scalar) -> Parameter:
        if not isinstance(item, Scalar):
            raise TypeError(f"{cls.__name__}[...] takes an element type such as bf16, found {item!r}")
        return Parameter(cls.mode, item, cls.abi)


class In(metaclass=_Mode):
    """Global memory that nothing writes while the grid runs: loads from it may be reordered freely."""

    mode = "in"


class Out(metaclass=_Mode):
    """Global memory that the kernel writes; every element that the launch declares."""

    mode = "out"


class InOut(metaclass=_Mode):
    """Global memory that the kernel reads and writes."""

    mode = "inout"


class InMap(In):
    """A tensor map of global memory that nothing writes while the grid runs."""

    abi = "map"


class OutMap(Out):
    """A tensor map of global memory that the kernel writes."""

    abi = "map"


class InOutMap(InOut):
    """A tensor map of global memory that the kernel loads tiles from and stores tiles to."""

    abi = "map"


READ_ONLY = ("in", "waited")  # modes of pointers that nothing is written through


class Pointer:
    """A typed address on the interpreter: a buffer, a byte offset in it, the element type.

    `buffer` belongs to the interpreter; kernels hand pointers to intrinsics and to `offset` only.
    `space` is `global`, `shared`, `cluster` (shared memory of a block of the cluster) or `map` (a tensor map);
    `mode` is the parameter's (shared memory: `inout`), or `waited`: of an `in` one after `grid_wait_for`.
    """

    __slots__ = ("buffer", "dtype", "mode", "offset", "space")

    def __init__(self, buffer: Any, offset: int, dtype: Scalar, space: str, mode: str) -> None:
        self.buffer, self.offset, self.dtype, self.space, self.mode = buffer, offset, dtype, space, mode

    def __repr__(self) -> str:
        return f"<{self.space} {self.dtype} pointer into {self.buffer} at byte {self.offset}>"
