"""What a weight format is: the tensors it stores, how to make them, how to read them, and which values are legal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Tensors = Mapping[str, np.ndarray]


class FormatError(ValueError):
    """A tensor whose shape, dtype or values the format does not allow; one sentence."""


class Spec(NamedTuple):
    """Dtype name and shape of one stored tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """How scales cover a weight `[N, K]`.

    `kind` is `none`, `tensor` (one scale), `row` (one a row), `block` (a grid of `rows x cols` tiles),
    `group` (one for `cols` consecutive K of a row, under one scale for the whole tensor) or `packed` (one for
    `group` consecutive K, stored with its codes: a row is a sequence of blocks of `cols` weights). For two-level
    groups `reciprocal` says that the tensor scale is stored as a divisor (compressed-tensors) and not as
    a multiplier (ModelOpt).
    """

    kind: str
    rows: int = 0
    cols: int = 0
    reciprocal: bool = False
    group: int = 0

    def __str__(self) -> str:
        if self.kind == "block":
            return f"block({self.rows},{self.cols})"
        if self.kind == "group":
            return f"group({self.cols}), {'reciprocal' if self.reciprocal else 'direct'} tensor scale"
        if self.kind == "packed":
            return f"group({self.group})" + (f" in blocks of {self.cols}" if self.cols != self.group else "")
        return self.kind


NO_SCALE = Geometry("none")
PER_TENSOR = Geometry("tensor")
PER_ROW = Geometry("row")
BLOCK_128 = Geometry("block", 128, 128)
GROUP_16 = Geometry("group", 1, 16)
GROUP_16_RECIPROCAL = Geometry("group", 1, 16, reciprocal=True)


class Format(ABC):
    """One way of storing a weight `[N, K]`.

    `name` is how YAML and the command line spell it (`nvfp4`, `fp8_row`), `family` what arms start from
    (`nvfp4`, `fp8`, `bf16`), `geometry` where its scales are, `largest` a magnitude up to which `quantize`
    takes weights. Tensors are named by field (`weight`, `scale`, `global_scale`; `blocks` where scales and
    codes are stored together); the names in a checkpoint belong to `checkpoint/`.
    """

    name: str
    family: str
    geometry: Geometry
    largest: float = 2.0**127

    @abstractmethod
    def tensors(self, n: int, k: int) -> dict[str, Spec]:
        """The stored tensors of a weight `[n, k]`; raises FormatError where n or k cannot be stored."""

    @abstractmethod
    def quantize(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Float32 `[N, K]` to stored tensors, by the format's reference recipe."""

    def quantize_rows(self, w: np.ndarray, amax: np.float32 | None = None) -> dict[str, np.ndarray]:
        """`quantize` of some rows of a weight whose largest magnitude is `amax` (None: these are all its rows): a
        weight is quantized piece by piece, to the same tensors, whose scales over all of it are in every piece.

        A piece starts at a multiple of the geometry's `rows`.
        """
        return self.quantize(w)

    @abstractmethod
    def dequantize(self, t: Tensors) -> np.ndarray:
        """Stored tensors to the float64 `[N, K]` they stand for, exactly."""

    @abstractmethod
    def check(self, t: Tensors, label: str) -> None:
        """Raise FormatError, naming `label` and field, for a value no kernel may be handed (NaN codes,
        scales that are not finite and positive, sign bits in block scales)."""

    def bytes(self, n: int, k: int) -> int:
        """Stored bytes of a weight `[n, k]`, unrounded."""
        from atlas_lab.formats.dtypes import dtype

        return sum(dtype(s.dtype).bytes * int(np.prod(s.shape)) for s in self.tensors(n, k).values())
