"""NVFP4: E2M1 codes under one E4M3 scale for 16 consecutive K of a row, under one float32 scale for the tensor.

Two conventions store the same codes and block scales: ModelOpt keeps the tensor scale as a multiplier (`nvfp4`),
compressed-tensors its reciprocal, a divisor (`nvfp4_ct`). Read as the other, weights grow by orders of magnitude.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from atlas_lab.formats import checks, e2m1, e4m3, scan
from atlas_lab.formats.base import GROUP_16, GROUP_16_RECIPROCAL, Format, Spec, Tensors

GROUP = GROUP_16.cols
RANGE = np.float32(e2m1.MAX * e4m3.MAX)  # 2688, the largest weight under a tensor scale of 1
TINY = np.finfo(np.float32).tiny  # 2^-126


class Nvfp4(Format):
    """`weight`: u8 `[N, K/2]`, low nibble first; `scale`: e4m3 `[N, K/16]`, not negative; `global_scale`: f32 `[]`.

    A weight is e2m1 x scale x global_scale. A block scale of 0 is legal. `global_scale` may be `[]` or `[1]` as stored.

    Quantized as by the max calibration of NVIDIA Model-Optimizer, `quantization/qtensor/nvfp4_tensor.py`.
    """

    name = "nvfp4"
    family = "nvfp4"
    geometry = GROUP_16
    global_shape: checks.Shape = ()

    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """N of 1 or more, K a multiple of 16; FormatError otherwise."""
        checks.dims(self.name, n, k, GROUP)
        return {
            "weight": Spec("u8", (n, k // 2)),
            "scale": Spec("e4m3", (n, k // GROUP)),
            "global_scale": Spec("f32", self.global_shape),
        }

    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 `[N, K]` to codes, block scales and tensor scale, by the recipe of the convention, bit for bit.

        v = w / step, then E2M1 of v to nearest even; the methods below are what the conventions differ in.

        Raises FormatError where K is no multiple of 16 and, with row and column, for NaN or infinity.
        """
        return self.quantize_rows(w)

    def quantize_rows(self, w: np.ndarray, amax: np.float32 | None = None) -> dict[str, np.ndarray]:
        n, k = checks.source(w, self.name)
        checks.dims(self.name, n, k, GROUP)
        tensor_scale = self.tensor_scale(scan.amax(w) if amax is None else amax)
        weight, scale = self.encode(w, tensor_scale)
        return {"weight": weight, "scale": scale, "global_scale": np.full(self.global_shape, tensor_scale, np.float32)}

    def encode(self, w: np.ndarray, tensor_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
        """Finite float32 `[N, K]`, K a multiple of 16, to codes u8 `[N, K/2]` and block scales e4m3 `[N, K/16]` under a
        tensor scale that is given: what lies past 2688 times its multiplier saturates."""
        n, k = w.shape
        weight = np.empty((n, k // 2), np.uint8)
        scale = np.empty((n, k // GROUP), ml_dtypes.float8_e4m3fn)
        for rows in scan.row_chunks(n, k):
            blocks = w[rows].reshape(-1, k // GROUP, GROUP)
            scale[rows] = self.block_scales(_block_amax(blocks), tensor_scale)
            scaled = blocks / self.step(scale[rows].astype(np.float32), tensor_scale)[..., None]
            scaled += np.float32(0)  # −0 becomes +0: only values below zero get a sign, as in both references
            weight[rows] = e2m1.pack(e2m1.encode(scaled).reshape(-1, k))
        return weight, scale

    def dequantize(self, t: Tensors) -> np.ndarray:
        """e2m1 x scale x global_scale as float64 `[N, K]`, exactly (for `nvfp4_ct` the quotient, rounded once).

        Raises FormatError for a missing field, wrong dtype or shape.
        """
        packed, scale, tensor_scale = self._structure(t, self.name)
        n, k = packed.shape[0], 2 * packed.shape[1]
        wide = np.float64(tensor_scale.reshape(()))
        out = np.empty((n, k), np.float64)
        for rows in scan.row_chunks(n, k):
            blocks = e2m1.decode(packed[rows]).reshape(-1, k // GROUP, GROUP)
            blocks *= e4m3.decode(scale[rows])[..., None]
            out[rows] = self.unscale(blocks, wide).reshape(-1, k)
        return out

    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError for a missing field, wrong dtype or shape, a block scale that is NaN or carries a sign, a
        tensor scale that is not finite and positive."""
        _, scale, tensor_scale = self._structure(t, label)
        checks.value(scale, f"{label}.scale", e4m3.is_no_magnitude, "a code from 0x00 to 0x7E")
        checks.positive(tensor_scale, f"{label}.global_scale")

    def _structure(self, t: Tensors, label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, k = checks.weight(t, label, "u8")
        k *= 2
        checks.dims(f"{label}.weight", n, k, GROUP)
        scale = checks.field(t, label, "scale", ("e4m3",), ((n, k // GROUP),), (n, k))
        return t["weight"], scale, checks.field(t, label, "global_scale", ("f32",), ((), (1,)), (n, k))

    def tensor_scale(self, amax: np.float32) -> np.float32:
        """amax / 2688, and 1 where that is 0 or subnormal (amax below 3.2e-35): every weight then becomes 0.

        The reference divides by it unchecked: NaN scales for a tensor of zeros.
        """
        scale = amax / RANGE
        return scale if scale >= TINY else np.float32(1)

    def block_scales(self, amax: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
        """amax / (6 x tensor scale) as E4M3; a zero becomes 1.0, anything below 2^-9 becomes 2^-9."""
        scale = amax / (np.float32(e2m1.MAX) * tensor_scale)
        return e4m3.encode(np.where(scale == 0, np.float32(1), np.maximum(scale, np.float32(e4m3.MIN))))

    def step(self, scale: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
        """What code 2 (the value 1) stands for in each block, rounded to float32."""
        return scale * tensor_scale

    def unscale(self, blocks: np.ndarray, tensor_scale: np.float64) -> np.ndarray:
        return blocks * tensor_scale


class Nvfp4CompressedTensors(Nvfp4):
    """The fields of `nvfp4`, with `global_scale` f32 `[1]` as a divisor: a weight is e2m1 x scale / global_scale.

    Quantized as by compressed-tensors, `quantization/utils/helpers.py` and `quantization/lifecycle/forward.py`.
    """

    name = "nvfp4_ct"
    geometry = GROUP_16_RECIPROCAL
    global_shape = (1,)

    def tensor_scale(self, amax: np.float32) -> np.float32:
        """2688 x (1 / amax), and 1 where that overflows (amax 0 or below 7.9e-36): every weight then becomes 0.

        The reciprocal is rounded by itself: torch divides a number by a tensor so.
        """
        with np.errstate(over="ignore"):
            scale = RANGE * (np.float32(1) / np.maximum(amax, TINY))
        return scale if np.isfinite(scale) else np.float32(1)

    def block_scales(self, amax: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
        """amax / 6 x tensor scale as E4M3; whatever rounds to zero becomes 0.125 (and its weights 0)."""
        scale = e4m3.encode(tensor_scale * (amax / np.float32(e2m1.MAX)))
        return np.where(scale.view(np.uint8) == 0, ml_dtypes.float8_e4m3fn(0.125), scale)

    def step(self, scale: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
        return scale / tensor_scale

    def unscale(self, blocks: np.ndarray, tensor_scale: np.float64) -> np.ndarray:
        return blocks / tensor_scale


def _block_amax(blocks: np.ndarray) -> np.ndarray:
    """Largest magnitude over the last axis, a power of two long; halving is twice as fast as a reduction that short."""
    a = np.abs(blocks)
    while a.shape[-1] > 1:
        half = a.shape[-1] // 2
        a = np.maximum(a[..., :half], a[..., half:])
    largest: np.ndarray = a[..., 0]
    return largest


FORMATS: tuple[Format, ...] = (Nvfp4(), Nvfp4CompressedTensors())
