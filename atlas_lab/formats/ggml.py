"""Formats of GGML: a row is a sequence of blocks, each with its scales and its codes.

Arithmetic and byte order are those of ggml-org/ggml `src/ggml-quants.c` and `src/ggml-common.h`; a format's docstring
names its struct. Floats in blocks are f16, little-endian.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from atlas_lab.formats import checks, scan
from atlas_lab.formats.base import Format, FormatError, Geometry, Spec, Tensors

F16 = np.dtype("<f2")
F16_MAX = 65504.0

# ggml rounds by adding 1.5 x 2^23 in float32 and keeping the low mantissa bits: to nearest even up to 2^22, wrapped
# beyond, 0 for NaN.
_MAGIC = np.float32(12582912)
EXACT = np.float32(4e6)
PIECE = 256  # blocks fitted at once: temporaries of 256 KB stay in a core's cache


class Blocks(Format):
    """`blocks`: u8 `[N, K / block x block_bytes]`, where `block` weights of a row are stored in `block_bytes`."""

    block_bytes: int

    @property
    def block(self) -> int:
        return self.geometry.cols

    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """N of 1 or more, K a multiple of the block; FormatError otherwise."""
        checks.dims(self.name, n, k, self.block)
        return {"blocks": Spec("u8", (n, k // self.block * self.block_bytes))}

    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 `[N, K]` to blocks, bit for bit as the reference quantizer without an importance matrix.

        Raises FormatError where K is no multiple of the block and, with row and column, for NaN, infinity and weights
        too large for the f16 scale of their block (the reference stores infinity).
        """
        n, k = checks.source(w, self.name)
        checks.dims(self.name, n, k, self.block)
        out = np.empty((n, k // self.block, self.block_bytes), np.uint8)
        for rows in scan.row_chunks(n, k):
            blocks = np.ascontiguousarray(w[rows]).reshape(-1, self.block)
            out[rows] = self.encode(blocks).reshape(-1, *out.shape[1:])
            for _, scale in self.scales(out[rows]):
                _refuse_overflow(self.name, w[rows], scale, rows.start)
        return {"blocks": out.reshape(n, -1)}

    def dequantize(self, t: Tensors) -> np.ndarray:
        """The stored values as float64 `[N, K]`, exactly; raises FormatError for a missing field, wrong dtype or
        shape."""
        blocks = self.structure(t, self.name)
        n, count, _ = blocks.shape
        out = np.empty((n, count * self.block), np.float64)
        for rows in scan.row_chunks(n, out.shape[1]):
            out[rows] = self.decode(blocks[rows].reshape(-1, self.block_bytes)).reshape(-1, out.shape[1])
        return out

    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError for a missing field, wrong dtype or shape, and for an f16 scale that is NaN or infinite.

        A scale of 0 or below is legal, as in the reference.
        """
        blocks = self.structure(t, label)
        for rows in scan.row_chunks(blocks.shape[0], blocks.shape[1] * self.block):
            for name, scale in self.scales(blocks[rows]):
                refuse(scale, ~np.isfinite(scale), f"{label}.blocks: found {name} =", "a finite f16", rows.start)

    def weight_shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """N and K of a weight by the shape of its blocks; raises FormatError."""
        if len(stored) != 2 or 0 in stored or stored[1] % self.block_bytes:
            expected = f"[N, a multiple of the {self.block_bytes} bytes of a block of {self.block}]"
            raise FormatError(f"found shape {list(stored)}, expected {expected}")
        return stored[0], stored[1] // self.block_bytes * self.block

    def structure(self, t: Tensors, label: str) -> np.ndarray:
        """The blocks as `[N, K / block, block_bytes]`; raises FormatError."""
        a = checks.present(t, label, "blocks")
        if checks.dtype_name(a) != "u8":
            raise FormatError(f"{label}.blocks: found dtype {checks.dtype_name(a)}, expected u8")
        try:
            self.weight_shape(a.shape)
        except FormatError as e:
            raise FormatError(f"{label}.blocks: {e}") from None
        return a.reshape(a.shape[0], -1, self.block_bytes)

    @abstractmethod
    def encode(self, x: np.ndarray) -> np.ndarray:
        """Float32 `[blocks, block]` to u8 `[blocks, block_bytes]`."""

    @abstractmethod
    def decode(self, blocks: np.ndarray) -> np.ndarray:
        """u8 `[blocks, block_bytes]` to the float64 `[blocks, block]` that they stand for."""

    @abstractmethod
    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """The f16 scales `[...]` of u8 blocks `[..., block_bytes]` by their name in the struct."""


def in_pieces(encode: Callable[[np.ndarray], np.ndarray], x: np.ndarray, block_bytes: int) -> np.ndarray:
    """`encode` of float32 `[blocks, block]`, a piece at a time, to u8 `[blocks, block_bytes]`; divisions by 0 that it
    replaces do not warn."""
    out = np.empty((len(x), block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        for start in range(0, len(x), PIECE):
            out[start : start + PIECE] = encode(x[start : start + PIECE])
    return out


def packed(block: int, group: int) -> Geometry:
    """Blocks of `block` weights, one scale for `group` of them."""
    return Geometry("packed", 1, block, group=group)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block: u8 `[..., bytes]` to f16 `[...]`."""
    values: np.ndarray = np.ascontiguousarray(blocks[..., at : at + 2]).view(F16)
    return values[..., 0]


def halves(values: np.ndarray) -> np.ndarray:
    """Float32 `[...]` rounded to f16, as bytes `[..., 2]`; infinity where f16 does not reach."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, np.float32).astype(F16)[..., None].view(np.uint8)


def refuse(values: np.ndarray, bad: np.ndarray, found: str, expected: str, first_row: int) -> None:
    """Raise FormatError with value, row and block of the first of `values` `[rows, blocks]` that is `bad`."""
    if bad.any():
        row, block = np.unravel_index(int(bad.argmax()), bad.shape)
        value = checks.show(values[row, block])
        raise FormatError(f"{found} {value} at row {first_row + row}, block {block}, expected {expected}")


def total(a: np.ndarray) -> np.ndarray:
    """Sum over axis 0 of a C-contiguous `[group, many]`, one element after the other as a C loop adds them.

    NumPy adds whole rows here; pairwise it sums only along an axis that is contiguous, so `many` is 2 or more.
    """
    sums: np.ndarray = np.add.reduce(a, axis=0)
    return sums


def nearest(v: np.ndarray) -> np.ndarray:
    """Float32 to int32 as ggml's `nearest_int`, whatever the value."""
    bits: np.ndarray = (v + _MAGIC).view(np.int32)
    return (bits & 0x7FFFFF) - 0x400000


def round_to(v: np.ndarray, top: int, wild: np.ndarray) -> np.ndarray:
    """Float32 `[group, many]`, in place, to `nearest` of it clipped to 0 .. `top`; `wild` are the columns (indices) in
    which a value may be beyond `EXACT`: elsewhere plain rounding is the same."""
    exact = nearest(v[:, wild]) if wild.size else None
    np.rint(v, out=v)
    np.clip(v, np.float32(0), np.float32(top), out=v)
    if exact is not None:
        v[:, wild] = np.clip(exact, 0, top)
    return v


def _refuse_overflow(name: str, w: np.ndarray, scale: np.ndarray, first_row: int) -> None:
    bad = ~np.isfinite(scale)
    if not bad.any():
        return
    row, block = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    width = w.shape[1] // scale.shape[1]
    column = block * width + int(np.abs(w[row, block * width : (block + 1) * width]).argmax())
    raise FormatError(
        f"{checks.source_label(name)}: found {checks.show(w[row, column])} at row {first_row + row}, column {column}, "
        f"expected a block whose f16 scale is at most {F16_MAX:g}"
    )
