"""Stored weights of random bits, and every copy that can be made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from atlas_lab.arms import copies
from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import Projection, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import FORMATS


def projection(role: str, n: int, k: int, fmt: str, layer: int = 0, **dtypes: str) -> Projection:
    """A projection of handles; `dtypes` changes those of single fields."""
    f = FORMATS[fmt]
    fields = tuple(
        (field, Tensor(dtypes.get(field, s.dtype), s.shape, f"layers.{layer}.{role}.{field}"))
        for field, s in f.tensors(n, k).items()
    )
    return Projection(layer, role, n, k, WeightSource(f.name, f.family, f.geometry, fields))


class Files:
    """Stored tensors of projections by name: every legal bit pattern of codes and scales may occur."""

    def __init__(self, *projections: Projection, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays = {t.name: self._random(p, f, t) for p in projections for f, t in p.weight.fields}

    def read(self, t: Tensor) -> np.ndarray:
        return self.arrays[t.name]

    def of(self, p: Projection) -> dict[str, np.ndarray]:
        return {f: self.arrays[t.name] for f, t in p.weight.fields}

    def _random(self, p: Projection, field: str, t: Tensor) -> np.ndarray:
        if t.dtype == "u8":
            bits = self.rng.integers(0, 256, t.shape, np.uint8)
            if p.weight.family == "q2_0":  # d of each block is finite
                bits.reshape(p.n * p.k // p.weight.geometry.cols, -1)[:, 1] &= 0xFB
            if p.weight.family == "q4_k":  # and dmin
                bits.reshape(p.n * p.k // p.weight.geometry.cols, -1)[:, 1:4:2] &= 0xFB
            return bits
        if t.dtype == "e4m3":
            top = 0x7F if field == "scale" else 256
            codes = self.rng.integers(0, top, t.shape, np.uint8)
            codes[codes & 0x7F == 0x7F] = 0
            if field == "scale":
                codes[self.rng.random(t.shape) < 0.1] = 0
            return codes.view(ml_dtypes.float8_e4m3fn)
        host = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}[t.dtype]
        values = self.rng.standard_normal(t.shape) if field == "weight" else self.rng.uniform(0.001, 4, t.shape)
        return np.asarray(values).astype(host)


class Kind(NamedTuple):
    name: str
    fmt: str
    make: Callable[[Projection], Derived]
    shapes: Sequence[tuple[int, int]]
    dtypes: dict[str, str] = {}  # noqa: RUF012 - of a tuple, never changed


def _both(name: str, make: Any, shapes: Sequence[tuple[int, int]]) -> list[Kind]:
    return [Kind(f"{name}-{fmt}", fmt, make, shapes) for fmt in ("nvfp4", "nvfp4_ct")]


KINDS = [
    *_both("transposed", copies.transposed_nvfp4, [(64, 128), (65, 48), (36, 272), (1, 16)]),
    *_both("repacked", copies.repacked_nvfp4, [(16, 128), (40, 384)]),
    Kind("repacked-q2_0_g64", "q2_0_g64", copies.repacked_q2_0, [(5, 128), (16, 256), (40, 384)]),
    Kind("repacked-q2_0_g128", "q2_0_g128", copies.repacked_q2_0, [(5, 128), (16, 256), (40, 384)]),
    Kind("repacked-q4_k", "q4_k", copies.repacked_q4_k, [(5, 256), (16, 512), (40, 768)]),
    *_both("block_nvfp4", copies.block_nvfp4, [(1, 64), (5, 192), (40, 256)]),
    *_both("int8", copies.int8_32, [(1, 32), (9, 96), (16, 256)]),
    Kind("fp8", "fp8", copies.transposed_fp8, [(64, 64), (70, 90), (130, 144)]),
    Kind("fp8-bf16-scales", "fp8", copies.transposed_fp8, [(130, 144)], {"scale": "bf16"}),
    Kind("fp8_row", "fp8_row", copies.transposed_fp8, [(12, 32)]),
    Kind("fp8_tensor", "fp8_tensor", copies.transposed_fp8, [(12, 33)]),
]
HOST_KINDS = [
    Kind("int8-bf16", "bf16", copies.int8_32, [(3, 64)]),
    Kind("int8-fp8", "fp8", copies.int8_32, [(3, 64)]),
    Kind("q4_k", "nvfp4", copies.q4_k, [(3, 256)]),
    Kind("q4_k-f32", "nvfp4_ct", lambda p: copies.q4_k(p, "f32"), [(2, 512)]),
]
