"""Tensor maps: tiles of a view as the copy engine (TMA) of compute capability 9 and later moves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from atlas_lab.core.tensor import Tensor, row_major
from atlas_lab.formats.dtypes import dtype

MAP_DTYPES = ("u8", "i8", "e4m3", "e5m2", "u16", "u32", "i32", "u64", "i64", "bf16", "f16", "f32")


@dataclass(frozen=True)
class TensorMap:
    """A launch argument that becomes a tensor map of the copy engine, for a parameter such as `InMap[bf16]`.

    `view` has 1 to 5 dimensions, the last one dense, the others a multiple of 16 bytes apart; elements outside it are
    zero when loaded and not written. `box` is what one copy moves, 1 to 256 elements a dimension, in the order of the
    view's shape; its rows are a multiple of 16 bytes. `swizzle` of shared memory in bytes: 0, or 32, 64 or 128,
    then the length of a box's row. `promotion`: the least the L2 fetches, in bytes (0, 64, 128, 256). Raises
    ValueError. Source: CUDA driver API, cuTensorMapEncodeTiled.
    """

    view: Tensor
    box: tuple[int, ...]
    swizzle: int = 0
    promotion: int = 128

    def __post_init__(self) -> None:
        for found in self._problems():
            raise ValueError(f"tensor map of {self.view.name!r}: found {found}")

    def _problems(self) -> Iterator[str]:
        view, width = self.view, dtype(self.view.dtype).bytes
        if view.dtype not in MAP_DTYPES:
            yield f"elements of {view.dtype}, expected one of {', '.join(MAP_DTYPES)}"
        if self.swizzle not in (0, 32, 64, 128):
            yield f"swizzle {self.swizzle}, expected 0, 32, 64 or 128"
        if self.promotion not in (0, 64, 128, 256):
            yield f"promotion {self.promotion}, expected 0, 64, 128 or 256"
        if not 1 <= len(view.shape) <= 5:
            yield f"a view of {len(view.shape)} dimensions, expected 1 to 5"
        if len(self.box) != len(view.shape):
            yield f"a box of {len(self.box)} dimensions, expected the view's {len(view.shape)}"
        if not all(type(e) is int and 1 <= e <= 256 for e in self.box):
            yield f"box {self.box}, expected 1 to 256 elements a dimension"
        if not all(1 <= e <= 1 << 32 for e in view.shape):
            yield f"shape {view.shape}, expected extents of 1 to 2**32"
        row = self.box[-1] * width
        if row % 16 or (self.swizzle and row != self.swizzle):
            expected = f"the swizzle's {self.swizzle}" if self.swizzle else "a multiple of 16"
            yield f"box rows of {row} bytes, expected {expected}"
        if view.offset % 16:
            yield f"a view at byte {view.offset}, expected a multiple of 16"
        *outer, inner = self.strides
        if inner != width:
            yield f"elements {inner} bytes apart in the last dimension, expected {width}"
        for s in outer:
            if s % 16 or not 0 < s < 1 << 40:
                yield f"a stride of {s} bytes, expected a multiple of 16 below 2**40"

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, by dimension."""
        width = dtype(self.view.dtype).bytes
        return tuple(s * width for s in self.view.strides or row_major(self.view.shape))

    @property
    def bytes(self) -> int:
        """What one copy puts into shared memory and its mbarrier counts."""
        return prod(self.box) * dtype(self.view.dtype).bytes

    @property
    def dtype(self) -> str:
        return self.view.dtype
