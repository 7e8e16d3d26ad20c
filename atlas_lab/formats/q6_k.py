"""Q6_K: blocks of 256 weights, 16 groups of 16 with an int8 scale each; `block_q6_K` of ggml, type 14."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats.base import Format
from atlas_lab.formats.ggml import F16_MAX, Blocks, half, halves, in_pieces, nearest, packed, total

BLOCK = 256
GROUP = 16
BYTES = 210
HALF = 32  # codes are stored with 32 added
EPSILON = np.float32(1e-15)  # a group, or a block's scales, below this counts as zero


class Q6K(Blocks):
    """210 bytes: u8 `ql[128]`, u8 `qh[64]`, i8 `scales[16]`, f16 `d`; a weight is d x scale x (q - 32), q 6 bits.

    Each half of 128 weights has 64 bytes of `ql` and 32 of `qh`. The low four bits of weights l, l + 32 are the low
    nibbles of bytes l and l + 32 (l below 32), those of l + 64 and l + 96 their high nibbles; byte l of `qh` holds the
    upper two bits of all four, l lowest. d may be negative.
    """

    name = "q6_k"
    family = "q6_k"
    geometry = packed(BLOCK, GROUP)
    block_bytes = BYTES
    largest = F16_MAX * 128

    def encode(self, x: np.ndarray) -> np.ndarray:
        """`quantize_row_q6_K_ref`: a scale for each group by `make_qx_quants` (least squares, weights x^2, 19 trials),
        rounded to int8 under d, then all codes again under the rounded ones."""
        return in_pieces(_encode, x, BYTES)

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        scale = half(blocks, 208).astype(np.float64)[:, None] * blocks[:, 192:208].view(np.int8)
        values = codes(blocks).astype(np.float64).reshape(-1, BLOCK // GROUP, GROUP)
        values -= HALF
        values *= scale[..., None]
        return values.reshape(len(blocks), BLOCK)

    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [("d", half(blocks, 208))]


def codes(blocks: np.ndarray) -> np.ndarray:
    """u8 codes 0 to 63, `[blocks, 256]`, of u8 blocks `[blocks, 210]`."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    q: np.ndarray = low | high << 4
    return q.reshape(-1, BLOCK)


def pack(q: np.ndarray) -> np.ndarray:
    """u8 codes `[blocks, 256]` to bytes `[blocks, 192]`: `ql` and `qh`."""
    quarters = q.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    ql = low[:, :, :2] | low[:, :, 2:] << 4
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate([ql.reshape(-1, 128), qh.reshape(-1, 64)], axis=1)


def _encode(x: np.ndarray) -> np.ndarray:
    """Float32 `[blocks, 256]` to u8 `[blocks, 210]`. Columns below are groups, `[16, 16 x blocks]`."""
    columns = np.ascontiguousarray(x.reshape(-1, GROUP).T)
    scale, fitted = _fit(columns)
    scale = scale.reshape(-1, BLOCK // GROUP)
    top = scale[np.arange(len(scale)), np.abs(scale).argmax(axis=1)]  # the first of the largest magnitude, signed
    factor = np.float32(-128) / top
    d = halves(np.float32(1) / factor)
    eight = np.minimum(nearest(factor[:, None] * scale), 127).astype(np.int8)
    step = (half(d, 0).astype(np.float32)[:, None] * eight).reshape(-1)
    q = np.clip(nearest(columns / step), -HALF, HALF - 1) + HALF
    q = np.where(step == 0, fitted, q)  # a step of 0 cannot choose codes: those of the fit stay
    out = np.concatenate([pack(q.T.astype(np.uint8).reshape(-1, BLOCK)), eight.view(np.uint8), d], axis=1)
    out[np.abs(top) < EPSILON] = 0
    return out


def _fit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`make_qx_quants` on float32 columns `[16, groups]`: scales `[groups]` and codes `[16, groups]`."""
    largest = x[np.abs(x).argmax(axis=0), np.arange(x.shape[1])]  # the first of the largest magnitude, signed
    weights = x * x
    weighted = weights * x
    chosen = np.float32(-HALF) / largest
    xq, qq = _sums(_levels(x, chosen), weights, weighted)
    scale = np.where(qq != 0, xq / qq, np.float32(0))
    best = scale * xq
    for trial in (*range(-9, 0), *range(1, 10)):
        factor = -(np.float32(HALF) + np.float32(0.1) * np.float32(trial)) / largest
        xq, qq = _sums(_levels(x, factor), weights, weighted)
        better = (qq > 0) & (xq * xq > best * qq)
        chosen = np.where(better, factor, chosen)
        scale = np.where(better, xq / qq, scale)
        best = np.where(better, scale * xq, best)
    zero = np.abs(largest) < EPSILON
    return np.where(zero, np.float32(0), scale), np.where(zero, np.float32(0), _levels(x, chosen) + np.float32(HALF))


def _levels(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Codes without the 32, as float32; |x x factor| is at most 33."""
    q: np.ndarray = x * factor
    np.rint(q, out=q)
    np.clip(q, np.float32(-HALF), np.float32(HALF - 1), out=q)
    return q


def _sums(q: np.ndarray, weights: np.ndarray, weighted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return total(weighted * q), total(weights * q * q)


FORMATS: tuple[Format, ...] = (Q6K(),)
