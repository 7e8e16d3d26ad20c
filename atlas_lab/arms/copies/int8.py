"""int8 with one scale for 32 weights of a row: what integer tensor cores multiply; 1.125 bytes a weight."""

from __future__ import annotations

import numpy as np

from atlas_lab.arms.copies.shapes import TWO_LEVEL, is_reciprocal, multiples, require
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import checks, int8_groups
from atlas_lab.formats.int8_groups import GROUP
from atlas_lab.formats.scan import row_chunks
from atlas_lab.kernels.quantize import int8


def can_int8(p: Projection) -> Verdict:
    """A weight of any format, K a multiple of 32."""
    return multiples(p, k_multiple=GROUP)


def int8_32(p: Projection) -> Derived:
    """`q` i8 `[N, K]`, `scale` f32 `[N, K/32]`. Key `int8_32`. Raises CopyError. From NVFP4 it is built on the device.

    Of the weight's values in float32: scale = max|w| / 127 of each 32, q = w / scale to nearest even, clamped to ±127;
    where the scale is 0, q is 0.
    """
    require(can_int8(p), "int8", p)
    w = p.weight
    kernel = int8.nvfp4_to_int8(is_reciprocal(p))

    def device(call: BuildCall) -> list[Launch]:
        s, o = call.source, call.out
        count = o.q.elements // GROUP
        args = (s.weight, s.scale, s.global_scale, o.q, o.scale, count)
        return [Launch(kernel, grid=-(-count // int8.THREADS), block=int8.THREADS, args=args, label="int8")]

    return Derived(
        "int8_32",
        source=w,
        build=quantize,
        dequantize=dequantize,
        device=device if w.family == "nvfp4" and w.geometry in TWO_LEVEL else None,
        q=Tensor("i8", (p.n, p.k)),
        scale=Tensor("f32", (p.n, p.k // GROUP)),
    )


def quantize(w: np.ndarray) -> dict[str, np.ndarray]:
    """float32 `[N, K]` to the copy's tensors; raises FormatError, with row and column, for NaN or infinity."""
    n, k = checks.source(w, "int8_32")
    q, scale = np.empty((n, k), np.int8), np.empty((n, k // GROUP), np.float32)
    for rows in row_chunks(n, k):
        q[rows], scale[rows] = int8_groups.quantize(w[rows])
    return {"q": q, "scale": scale}


def dequantize(t: Arrays) -> np.ndarray:
    """q x scale as float64 `[N, K]`, exactly."""
    return int8_groups.dequantize(t["q"], t["scale"])
