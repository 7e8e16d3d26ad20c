"""Q2_0: two-bit codes for ternary weights under one f16 scale for 64 or 128 of them.

Groups of 64 are `block_q2_0` of ggml, type 42. Groups of 128 are of PrismML's fork, which stores them as type 42 (older
files) and 142: only the bytes of a tensor tell a type 42 of the one from the other.
"""

from __future__ import annotations

import numpy as np

from atlas_lab.formats.base import Format
from atlas_lab.formats.ggml import F16_MAX, Blocks, half, halves, packed
from atlas_lab.formats.q8_0 import half_away, inverse

# [256, 4]: the four values of a byte of codes, the lowest two bits first.
QUADS: np.ndarray = np.stack([(np.arange(256) >> shift & 3) - 1 for shift in (0, 2, 4, 6)], axis=1).astype(np.float64)
QUADS.setflags(write=False)


class Q2_0(Blocks):  # noqa: N801
    """f16 `d`, u8 `qs[group / 4]`: weight j is bits 2 (j mod 4) of byte j div 4, and stands for d x (code - 1).

    Code 3, twice d, is legal; ternary files and `quantize` use 0 to 2.
    """

    family = "q2_0"
    largest = F16_MAX

    def __init__(self, group: int) -> None:
        self.name = f"q2_0_g{group}"
        self.geometry = packed(group, group)
        self.block_bytes = 2 + group // 4

    def encode(self, x: np.ndarray) -> np.ndarray:
        """d = amax, code = w / d rounded half away from zero, plus 1."""
        d = np.abs(x).max(axis=1)
        codes = (np.clip(half_away(x * inverse(d)[:, None]), -1, 2) + 1).astype(np.uint8).reshape(len(x), -1, 4)
        out = np.empty((len(x), self.block_bytes), np.uint8)
        out[:, :2] = halves(d)
        out[:, 2:] = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return out

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        values: np.ndarray = QUADS[blocks[:, 2:]].reshape(len(blocks), -1)
        values *= half(blocks, 0).astype(np.float64)[:, None]
        return values

    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [("d", half(blocks, 0))]


Q2_0_G64 = Q2_0(64)
Q2_0_G128 = Q2_0(128)
FORMATS: tuple[Format, ...] = (Q2_0_G64, Q2_0_G128)
