"""FP8: E4M3 weights under float32 scales, one a 128x128 tile, one a row or one a tensor; a weight is code x scale."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from atlas_lab.formats import checks, e4m3, scan
from atlas_lab.formats.base import BLOCK_128, PER_ROW, PER_TENSOR, Format, Geometry, Spec, Tensors

SCALE_DTYPES = ("f32", "bf16")  # checkpoints hold either; bf16 widens exactly


class Fp8(Format):
    """`weight`: e4m3 `[N, K]`; `scale`: f32 `[ceil(N/128), ceil(K/128)]` (block), `[N, 1]` (row) or `[]` (tensor).

    A scale multiplies, whatever its name in a checkpoint (`weight_scale`, `weight_scale_inv`). Stored scales may
    also be bf16, a row scale `[N]` and a tensor scale `[1]`.
    """

    family = "fp8"

    def __init__(self, name: str, geometry: Geometry) -> None:
        self.name = name
        self.geometry = geometry

    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """Any N and K of 1 or more, tiles at the edges are partial; FormatError otherwise."""
        checks.dims(self.name, n, k)
        return {"weight": Spec("e4m3", (n, k)), "scale": Spec("f32", self._scale_shapes(n, k)[0])}

    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 `[N, K]` to codes and float32 scales; raises FormatError, with row and column, for NaN or infinity.

        `scale = amax / 448` over what the scale covers, 1 where that is 0; code = E4M3 of `w / scale`, a true
        division by the scale as stored, to nearest even, clamped to ±448. This is the recipe of DeepSeek-V3
        `inference/kernel.py` and of compressed-tensors; transformers' `Fp8Quantize` rounds `448 / amax` first and
        multiplies by it, which moves a scale by units in the last place and a code near a tie to its neighbour.
        """
        return self.quantize_rows(w)

    def quantize_rows(self, w: np.ndarray, amax: np.float32 | None = None) -> dict[str, np.ndarray]:
        n, k = checks.source(w, self.name)
        weight = np.empty((n, k), ml_dtypes.float8_e4m3fn)
        scale = np.empty(self._scale_shapes(n, k)[0], np.float32)
        if self.geometry == PER_TENSOR:
            scale[...] = _scale(np.asarray(scan.amax(w) if amax is None else amax))
        for rows in self._chunks(n, k):
            x = w[rows]
            if self.geometry == PER_ROW:
                scale[rows] = _scale(np.abs(x).max(axis=1, keepdims=True))
            elif self.geometry == BLOCK_128:
                scale[_tiles(rows)] = _scale(_tile_amax(x))
            weight[rows] = e4m3.encode(x / self._spread(scale, rows, k))
        return {"weight": weight, "scale": scale}

    def dequantize(self, t: Tensors) -> np.ndarray:
        """code x scale as float64 `[N, K]`, exactly; raises FormatError for a missing field, wrong dtype or shape."""
        weight, scale = self._structure(t, self.name)
        n, k = weight.shape
        wide = scale.astype(np.float64).reshape(self._scale_shapes(n, k)[0])
        out = np.empty((n, k), np.float64)
        for rows in self._chunks(n, k):
            np.multiply(e4m3.decode(weight[rows]), self._spread(wide, rows, k), out=out[rows])
        return out

    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError for a missing field, wrong dtype or shape, a NaN code, a scale not finite and positive."""
        weight, scale = self._structure(t, label)
        checks.value(weight, f"{label}.weight", e4m3.is_nan, "no NaN code")
        checks.positive(scale, f"{label}.scale")

    def _structure(self, t: Tensors, label: str) -> tuple[np.ndarray, np.ndarray]:
        n, k = checks.weight(t, label, "e4m3")
        scale = checks.field(t, label, "scale", SCALE_DTYPES, self._scale_shapes(n, k), (n, k))
        return t["weight"], scale

    def _scale_shapes(self, n: int, k: int) -> tuple[checks.Shape, ...]:
        """Legal shapes of `scale`, the one that `quantize` makes first."""
        if self.geometry == PER_TENSOR:
            return (), (1,)
        if self.geometry == PER_ROW:
            return (n, 1), (n,)
        return ((-(-n // BLOCK_128.rows), -(-k // BLOCK_128.cols)),)

    def _chunks(self, n: int, k: int) -> Iterator[slice]:
        return scan.row_chunks(n, k, BLOCK_128.rows if self.geometry == BLOCK_128 else 1)

    def _spread(self, scale: np.ndarray, rows: slice, k: int) -> np.ndarray:
        """The scale of each element of these rows, in a shape that broadcasts against `[rows, k]`."""
        if self.geometry == PER_TENSOR:
            return scale
        if self.geometry == PER_ROW:
            return scale[rows]
        tall = np.repeat(scale[_tiles(rows)], BLOCK_128.rows, axis=0)[: rows.stop - rows.start]
        return np.repeat(tall, BLOCK_128.cols, axis=1)[:, :k]


def _scale(amax: np.ndarray) -> np.ndarray:
    scale = amax / np.float32(e4m3.MAX)
    return np.where(scale > 0, scale, np.float32(1))


def _tiles(rows: slice) -> slice:
    """Rows of the tile grid that cover these rows, the first of which starts a tile."""
    return slice(rows.start // BLOCK_128.rows, -(-rows.stop // BLOCK_128.rows))


def _tile_amax(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of each tile of `[rows, K]`, partial tiles at the lower and right edges included."""
    across = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[1], BLOCK_128.cols), axis=1)
    tiles: np.ndarray = np.maximum.reduceat(across, np.arange(0, x.shape[0], BLOCK_128.rows), axis=0)
    return tiles


FORMATS: tuple[Format, ...] = (Fp8("fp8", BLOCK_128), Fp8("fp8_tensor", PER_TENSOR), Fp8("fp8_row", PER_ROW))
