"""Q4_K: blocks of 256 weights, eight groups of 32 with a 6-bit scale and a 6-bit minimum each; `block_q4_K` of ggml,
type 12."""

from __future__ import annotations

import numpy as np

from atlas_lab.formats.base import Format
from atlas_lab.formats.ggml import EXACT, F16_MAX, Blocks, half, halves, in_pieces, nearest, packed, round_to, total

BLOCK = 256
GROUP = 32
BYTES = 144
TOP = 15  # the largest code
STEPS = 20


class Q4K(Blocks):
    """144 bytes: f16 `d`, f16 `dmin`, u8 `scales[12]`, u8 `qs[128]`.

    A weight of group j is d x sc[j] x q - dmin x m[j], q from 0 to 15. The 6-bit sc and m of groups 0 to 3 are the low
    bits of bytes 0 to 3 and 4 to 7; those of groups 4 to 7 have their low four bits in the nibbles of bytes 8 to 11 (sc
    low, m high) and the other two atop bytes 0 to 3 and 4 to 7. Byte l of the c-th 32 of `qs` holds weights 64c + l
    (low nibble) and 64c + 32 + l.
    """

    name = "q4_k"
    family = "q4_k"
    geometry = packed(BLOCK, GROUP)
    block_bytes = BYTES
    largest = F16_MAX * 63

    def encode(self, x: np.ndarray) -> np.ndarray:
        """`quantize_row_q4_K_ref`: scale and minimum of each group by `make_qkx2_quants`, rounded to 6 bits under d and
        dmin, then all codes again under the rounded ones."""
        return in_pieces(_encode, x, BYTES)

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        scale, low = group_values(blocks)
        values = codes(blocks).astype(np.float64)
        values *= scale[..., None]
        values -= low[..., None]
        return values.reshape(len(blocks), BLOCK)

    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [("d", half(blocks, 0)), ("dmin", half(blocks, 2))]


def codes(blocks: np.ndarray) -> np.ndarray:
    """u8 codes `[blocks, 8, 32]` of u8 blocks `[blocks, 144]`."""
    qs = blocks[:, 16:].reshape(-1, 4, 1, GROUP)
    return np.concatenate([qs & 15, qs >> 4], axis=2).reshape(-1, 8, GROUP)


def group_values(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d x sc and dmin x m, float64 `[blocks, 8]`, of u8 blocks `[blocks, 144]`."""
    sc, m = unpack_scales(blocks[:, 4:16])
    return half(blocks, 0).astype(np.float64)[:, None] * sc, half(blocks, 2).astype(np.float64)[:, None] * m


def unpack_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit sc and m `[blocks, 8]` of bytes `[blocks, 12]`."""
    sc = np.concatenate([b[:, :4] & 63, b[:, 8:] & 15 | b[:, :4] >> 6 << 4], axis=1)
    m = np.concatenate([b[:, 4:8] & 63, b[:, 8:] >> 4 | b[:, 4:8] >> 6 << 4], axis=1)
    return sc, m


def pack_scales(sc: np.ndarray, m: np.ndarray) -> np.ndarray:
    """u8 sc and m `[blocks, 8]`, below 64, to bytes `[blocks, 12]`."""
    parts = [sc[:, :4] | sc[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return np.concatenate(parts, axis=1)


def _encode(x: np.ndarray) -> np.ndarray:
    """Float32 `[blocks, 256]` to u8 `[blocks, 144]`. Columns below are groups, `[32, 8 x blocks]`."""
    columns = np.ascontiguousarray(x.reshape(-1, GROUP).T)
    fit = _Fit(columns)
    scale, low = fit.scale.reshape(-1, 8), fit.minimum.reshape(-1, 8)
    d, sc = _six_bits(scale)
    dmin, m = _six_bits(-low)
    step = (half(d, 0).astype(np.float32)[:, None] * sc).reshape(-1)
    shift = (half(dmin, 0).astype(np.float32)[:, None] * m).reshape(-1)
    final = _codes_under(columns, step, shift)
    kept = np.flatnonzero(step == 0)  # a step of 0 cannot choose codes: those of the fit stay
    final[:, kept] = fit.codes(kept)
    q = final.T.astype(np.uint8).reshape(-1, 4, 2, GROUP)
    qs = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, BLOCK // 2)
    return np.concatenate([d, dmin, pack_scales(sc, m), qs], axis=1)


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of float32 `[blocks, 8]`: the bytes of max / 63 as f16, and u8 `[blocks, 8]` values in steps of it, 63 at most.

    A negative value wraps around as the reference's unsigned byte does, and so becomes 63.
    """
    top = np.fmax(values, 0).max(axis=1)
    per = np.where(top > 0, np.float32(63) / top, np.float32(0))
    six = nearest(per[:, None] * values).astype(np.uint8)
    return halves(top / np.float32(63)), np.minimum(six, 63)


def _codes_under(x: np.ndarray, step: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """`(x + shift) / step` to the nearest code, as float32 `[32, groups]`; no meaning where step is 0."""
    v = (x + shift) / step
    return round_to(v, TOP, np.flatnonzero(~(np.abs(v).max(axis=0) <= EXACT)))


class _Fit:
    """`make_qkx2_quants` on float32 columns `[32, groups]`: weighted least squares over 21 trial ranges.

    `scale`, and `minimum` of 0 or below. An accepted trial's minimum is the start of the next trial's range; its codes
    are not kept but made again from the range they came from.
    """

    def __init__(self, x: np.ndarray) -> None:
        self._x = x
        w = np.abs(x)
        w += np.sqrt(total(x * x) / np.float32(GROUP))
        self._work = [np.empty_like(x) for _ in range(2)]
        self._weights, self._sum_w, self._sum_x = w, total(w), total(w * x)
        self.minimum = np.minimum(x.min(axis=0), 0)
        self._high = x.max(axis=0)
        self._flat = self._high == self.minimum
        self._reach = np.maximum(np.abs(x.min(axis=0)), np.abs(self._high))
        factor = np.float32(TOP) / (self._high - self.minimum)
        self.scale = np.float32(1) / factor
        self._from, self._factor = self.minimum, factor
        error = self._error(self._levels(factor, self._work[0]), self.scale, self.minimum)
        for step in range(STEPS + 1):
            error = self._trial(step, error)
        self.scale = np.where(self._flat, np.float32(0), self.scale)

    def codes(self, groups: np.ndarray) -> np.ndarray:
        """The chosen codes of some groups, float32 `[32, some]`; 0 where all weights are equal and not above 0."""
        v = (self._x[:, groups] - self._from[groups]) * self._factor[groups]
        return np.where(self._flat[groups], np.float32(0), round_to(v, TOP, np.arange(len(groups))))

    def _levels(self, factor: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Codes `[32, groups]` of the range that starts at the last accepted minimum."""
        np.subtract(self._x, self.minimum, out=out)
        out *= factor
        bound = (self._reach + np.abs(self.minimum)) * np.abs(factor)
        return round_to(out, TOP, np.flatnonzero(~(bound <= EXACT)))

    def _trial(self, step: int, error: np.ndarray) -> np.ndarray:
        """Take the codes of a range, solve for scale and minimum; returns the least error so far, `[groups]`."""
        width = np.float32(-1) + np.float32(0.1) * np.float32(step) + np.float32(TOP)
        factor = width / (self._high - self.minimum)
        q, wq = self._work
        self._levels(factor, q)
        np.multiply(self._weights, q, out=wq)
        sum_q, sum_qq, sum_xq = total(wq), total(wq * q), total(np.multiply(wq, self._x, out=wq))
        det = self._sum_w * sum_qq - sum_q * sum_q
        scale = (self._sum_w * sum_xq - self._sum_x * sum_q) / det
        minimum = (sum_qq * self._sum_x - sum_q * sum_xq) / det
        above = minimum > 0
        minimum = np.where(above, np.float32(0), minimum)
        scale = np.where(above, sum_xq / sum_qq, scale)
        found = self._error(q, scale, minimum)
        better = (det > 0) & (found < error) & ~self._flat
        self._from = np.where(better, self.minimum, self._from)
        self._factor = np.where(better, factor, self._factor)
        self.scale = np.where(better, scale, self.scale)
        self.minimum = np.where(better, minimum, self.minimum)
        return np.where(better, found, error)

    def _error(self, q: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        """Weighted squared error of codes `q`, which are overwritten."""
        q *= scale
        q += minimum
        q -= self._x
        np.multiply(q, q, out=q)
        q *= self._weights
        return total(q)


FORMATS: tuple[Format, ...] = (Q4K(),)
