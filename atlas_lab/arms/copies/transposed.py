"""Transposed weights, whose rows are K: a tile GEMM that walks down K reads N contiguously."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atlas_lab.arms.copies.launches import copied, transpose
from atlas_lab.arms.copies.shapes import multiples, named, require, two_level
from atlas_lab.core.building import BuildCall
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats import get


def can_transpose_nvfp4(p: Projection) -> Verdict:
    """NVFP4 of either convention."""
    return two_level(p)


def transposed_nvfp4(p: Projection) -> Derived:
    """`weight` u8 `[K/2, N]`: byte [j, n] holds columns 2j (low nibble) and 2j + 1 of row n; `scale` e4m3 `[K/16, N]`;
    `global_scale` as stored. Key `nvfp4_t`. Raises CopyError."""
    require(can_transpose_nvfp4(p), "transposed NVFP4", p)
    w = p.weight

    def dequantize(t: Arrays) -> np.ndarray:
        stored = {"weight": t["weight"].T, "scale": t["scale"].T, "global_scale": t["global_scale"]}
        return get(w.format).dequantize(stored)

    return Derived(
        named("nvfp4_t", p),
        source=w.packed,
        build=_flip("weight", "scale"),
        dequantize=dequantize,
        device=_device("weight", "scale"),
        weight=Tensor("u8", (p.k // 2, p.n)),
        scale=Tensor("e4m3", (p.k // 16, p.n)),
        global_scale=w["global_scale"],
    )


def can_transpose_fp8(p: Projection) -> Verdict:
    """FP8 under scales of any geometry."""
    if p.weight.family != "fp8":
        return no("source", "made of FP8", found=p.weight.format, allowed="fp8")
    return multiples(p)


def transposed_fp8(p: Projection) -> Derived:
    """`weight` e4m3 `[K, N]`; `scale` as stored: its grid, rows or single value are of N and K as before. Key `fp8_t`.
    Raises CopyError."""
    require(can_transpose_fp8(p), "transposed FP8", p)
    w = p.weight

    def dequantize(t: Arrays) -> np.ndarray:
        return get(w.format).dequantize({"weight": t["weight"].T, "scale": t["scale"]})

    return Derived(
        "fp8_t",
        source=w.packed,
        build=_flip("weight"),
        dequantize=dequantize,
        device=_device("weight"),
        weight=Tensor("e4m3", (p.k, p.n)),
        scale=w["scale"],
    )


def _flip(*fields: str) -> Callable[[Arrays], Arrays]:
    """A build that transposes some fields and keeps the others."""
    return lambda t: {f: np.ascontiguousarray(a.T) if f in fields else a for f, a in t.items()}


def _device(*fields: str) -> Callable[[BuildCall], list[Launch]]:
    """The same on the device."""

    def launches(call: BuildCall) -> list[Launch]:
        return [(transpose if f in fields else copied)(call.source[f], call.out[f]) for f in call.out]

    return launches
