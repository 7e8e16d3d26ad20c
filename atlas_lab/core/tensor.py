"""Handles of tensors: what an arm, a plan and a launch speak of; never memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from atlas_lab.formats.base import Spec
from atlas_lab.formats.dtypes import dtype as _dtype

ALIGNMENT = 256


def round_up(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`: allocations are counted like this everywhere."""
    return -(-nbytes // to) * to


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def reach(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    """Elements from a tensor's first to its last; no extent may be 0."""
    return sum((e - 1) * s for e, s in zip(shape, strides or row_major(shape), strict=True))


@dataclass(frozen=True)
class Tensor:
    """A tensor by name: dtype, shape, layout, and the buffer it lies in.

    `name` identifies the buffer (a checkpoint tensor's own name, or `layers.0.ffn.gate/int8_row.q` for a derived
    one); `offset` is in bytes from the buffer's start and `strides` in elements (None: contiguous).
    """

    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _dtype(self.dtype)
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"tensor {self.name!r}: found shape {self.shape}, expected extents of 0 or more")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes the elements take, gaps between strided rows not counted."""
        return self.elements * _dtype(self.dtype).bytes

    @property
    def is_contiguous(self) -> bool:
        return self.strides is None or self.strides == row_major(self.shape)

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, self.shape)

    def named(self, name: str) -> Tensor:
        return replace(self, name=name)

    def view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Tensor:
        """Part of the same buffer: `offset` in elements from this tensor's start; raises ValueError past its end."""
        last, end = offset + reach(shape, strides), reach(self.shape, self.strides)
        if offset < 0 or (0 not in shape and (last > end or 0 in self.shape)):
            raise ValueError(f"view of {self.name!r}: element {last} is outside its {end + 1} elements")
        return replace(self, shape=shape, strides=strides, offset=self.offset + offset * _dtype(self.dtype).bytes)

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.shape))
        return f"{self.name or 'tensor'}: {self.dtype}[{inner}]"
