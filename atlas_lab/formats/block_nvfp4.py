"""NVFP4 as GGML stores it: blocks of 64 weights, four E4M3 scales and 64 E2M1 codes; `block_nvfp4`, type 40.

The same scales and codes as `nvfp4` in another order: from one to the other is a shuffle of bits. The tensor scale is
not in the blocks; a converter writes it beside them as the f32 tensor `<name>.scale`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from atlas_lab.formats import checks, e2m1, e4m3, scan
from atlas_lab.formats.base import Spec, Tensors
from atlas_lab.formats.ggml import Blocks, packed, refuse
from atlas_lab.formats.nvfp4 import Nvfp4

BLOCK = 64
GROUP = 16
BYTES = 36
GLOBAL = "global_scale"


def _scale_values() -> np.ndarray:
    """What each byte of `d` stands for in `ggml_ue4m3_to_fp32` (twice it: the codes there are doubled): as E4M3 without
    a sign, but 0x7F is 0 and 0xFF, by its bits, 480."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[0x7F] = 0
    values.setflags(write=False)
    return values


SCALES = _scale_values()


class BlockNvfp4(Blocks):
    """36 bytes: u8 `d[4]`, one scale for 16 weights each, u8 `qs[32]`: byte 8s + j holds weights 16s + j (low nibble)
    and 16s + 8 + j of the block.

    `global_scale` f32 `[]` or `[1]`, a multiplier, may be absent: it is then 1.
    """

    name = "block_nvfp4"
    family = "block_nvfp4"
    geometry = packed(BLOCK, GROUP)
    block_bytes = BYTES

    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """N of 1 or more, K a multiple of 64; FormatError otherwise."""
        return {**super().tensors(n, k), GLOBAL: Spec("f32", ())}

    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """As `nvfp4` quantizes, shuffled; raises FormatError as it does, and where K is no multiple of 64.

        ggml's own quantizer knows no tensor scale, and loses small weights for it.
        """
        return self.quantize_rows(w)

    def quantize_rows(self, w: np.ndarray, amax: np.float32 | None = None) -> dict[str, np.ndarray]:
        checks.dims(self.name, *checks.source(w, self.name), BLOCK)
        made = Nvfp4().quantize_rows(w, amax)
        return {"blocks": from_nvfp4(made["weight"], made["scale"]), GLOBAL: made["global_scale"]}

    def dequantize(self, t: Tensors) -> np.ndarray:
        """e2m1 x scale x global_scale as float64 `[N, K]`, exactly; raises FormatError for a missing field, wrong dtype
        or shape."""
        values = super().dequantize(t)
        if GLOBAL in t:
            values *= np.float64(_global_scale(t, self.name).reshape(()))
        return values

    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError for a missing field, wrong dtype or shape, a scale that is no code from 0x00 to 0x7E, a
        tensor scale that is not finite and positive."""
        blocks = self.structure(t, label)
        for rows in scan.row_chunks(blocks.shape[0], blocks.shape[1] * self.block):
            for s in range(4):
                d = np.ascontiguousarray(blocks[rows, :, s]).view(ml_dtypes.float8_e4m3fn)
                bad = e4m3.is_no_magnitude(d)
                refuse(d, bad, f"{label}.blocks: found d[{s}] =", "a code from 0x00 to 0x7E", rows.start)
        if GLOBAL in t:
            checks.positive(_global_scale(t, label), f"{label}.{GLOBAL}")

    def encode(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError("needs the whole tensor: see quantize")

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        values: np.ndarray = e2m1.VALUES[_codes(blocks)]
        values *= SCALES[blocks[:, :4]][..., None]
        return values.reshape(len(blocks), BLOCK)

    def scales(self, blocks: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return []


def from_nvfp4(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`nvfp4` codes u8 `[N, K/2]` and scales e4m3 `[N, K/16]`, K a multiple of 64, to blocks u8 `[N, K/64 x 36]`.

    Signs of scales are dropped, as converters do; a legal scale has none.
    """
    n, k = weight.shape[0], 2 * weight.shape[1]
    checks.dims("block_nvfp4", n, k, BLOCK)
    out = np.empty((n, k // BLOCK, BYTES), np.uint8)
    out[..., :4] = np.ascontiguousarray(scale).view(np.uint8).reshape(n, -1, 4) & 0x7F
    for rows in scan.row_chunks(n, k):
        codes = e2m1.unpack(weight[rows]).reshape(-1, k // BLOCK, 4, 2, 8)
        out[rows, :, 4:] = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(-1, k // BLOCK, 32)
    return out.reshape(n, -1)


def to_nvfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks u8 `[N, K/64 x 36]` to `nvfp4` codes u8 `[N, K/2]` and scales e4m3 `[N, K/16]`; undoes `from_nvfp4`."""
    n = blocks.shape[0]
    parts = blocks.reshape(n, -1, BYTES)
    count = parts.shape[1]
    weight = np.empty((n, count * BLOCK // 2), np.uint8)
    for rows in scan.row_chunks(n, count * BLOCK):
        weight[rows] = e2m1.pack(_codes(parts[rows].reshape(-1, BYTES)).reshape(-1, count * BLOCK))
    scale = np.ascontiguousarray(parts[..., :4]).reshape(n, -1)
    return weight, scale.view(ml_dtypes.float8_e4m3fn)


def _codes(blocks: np.ndarray) -> np.ndarray:
    """u8 codes `[blocks, 4, 16]` of u8 blocks `[blocks, 36]`, in the order of the weights."""
    qs = blocks[:, 4:].reshape(-1, 4, 8)
    return np.concatenate([qs & 15, qs >> 4], axis=2)


def _global_scale(t: Tensors, label: str) -> np.ndarray:
    n, k = FORMATS[0].weight_shape(t["blocks"].shape)
    return checks.field(t, label, GLOBAL, ("f32",), ((), (1,)), (n, k))


FORMATS: tuple[BlockNvfp4, ...] = (BlockNvfp4(),)
