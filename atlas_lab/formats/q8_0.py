"""Q8_0: blocks of 32 weights, an f16 scale and 32 int8 codes; `block_q8_0` of ggml, type 8."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats.base import Format
from atlas_lab.formats.ggml import F16_MAX, Blocks, half, halves, packed

BLOCK = 32
BYTES = 34
TINY = np.finfo(np.float32).tiny


class Q8_0(Blocks):  # noqa: N801
    """34 bytes: f16 `d`, i8 `qs[32]`; a weight is d x q."""

    name = "q8_0"
    family = "q8_0"
    geometry = packed(BLOCK, BLOCK)
    block_bytes = BYTES
    largest = F16_MAX * 127

    def encode(self, x: np.ndarray) -> np.ndarray:
        """d = amax / 127, q = x x (1 / d) rounded half away from zero; d is rounded to f16 after that.

        Where 1 / d would overflow the codes are 0 (in C the conversion is undefined); d is then 0 as f16.
        """
        d = np.abs(x).max(axis=1) / np.float32(127)
        out = np.empty((len(x), BYTES), np.uint8)
        out[:, :2] = halves(d)
        out[:, 2:] = half_away(x * inverse(d)[:, None]).astype(np.int8).view(np.uint8)
        return out

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        values: np.ndarray = half(blocks, 0).astype(np.float64)[:, None] * blocks[:, 2:].view(np.int8)
        return values

    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [("d", half(blocks, 0))]


def inverse(d: np.ndarray) -> np.ndarray:
    """1 / d in float32, and 0 where d is 0 or subnormal."""
    return np.where(d < TINY, np.float32(0), np.float32(1) / np.maximum(d, TINY))


def half_away(v: np.ndarray) -> np.ndarray:
    """Float32 rounded to an integer, halves away from zero: C's `roundf` (below 2^23, where it rounds at all)."""
    whole = np.trunc(v)
    rounded: np.ndarray = whole + np.trunc((v - whole) * np.float32(2))
    return rounded


FORMATS: tuple[Format, ...] = (Q8_0(),)
