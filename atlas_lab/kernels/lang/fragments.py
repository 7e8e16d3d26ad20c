"""Registers of a warp or warpgroup on the interpreter: one array, seen by each lane as the tuple of its registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Fragment(Sequence[Any]):
    """The registers of `lane` in `array` [32 or 128, count], float32, int32 or uint32; a tuple to the kernel.

    Elements become scalars only when they are looked at, and a warp-wide operation on fragments of one array takes
    the array: an accumulator that stays in the matrix units is never unpacked.
    """

    __slots__ = ("array", "lane")

    def __init__(self, array: np.ndarray, lane: int) -> None:
        self.array, self.lane = array, lane

    def __len__(self) -> int:
        return int(self.array.shape[1])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return tuple(self)[i]
        value = self.array[self.lane, i]
        return value if self.array.dtype == np.float32 else int(value)

    def __iter__(self) -> Iterator[Any]:
        row = self.array[self.lane]
        return iter(row if row.dtype == np.float32 else row.tolist())

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))


def gather(lanes: Sequence[Sequence[Any]], dtype: np.dtype | type) -> np.ndarray:
    """The [lanes, count] array of every lane's registers, in lane order."""
    first = lanes[0]
    if isinstance(first, Fragment) and first.array.dtype == dtype:
        array = first.array
        if all(isinstance(f, Fragment) and f.array is array and f.lane == i for i, f in enumerate(lanes)):
            return array
    return np.array([tuple(f) for f in lanes], dtype)


def scatter(array: np.ndarray) -> list[Fragment]:
    """Each lane's registers of a [lanes, count] array."""
    return [Fragment(array, lane) for lane in range(len(array))]
