"""Accumulators of a thread rounded to 16 bits, all at once."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.kernels.lang.fragments import Fragment
from atlas_lab.kernels.lang.op import Needs, Op, Vec
from atlas_lab.kernels.lang.types import Scalar, bf16, f16, f32, u32

_HOST: dict[Scalar, Any] = {bf16: ml_dtypes.bfloat16, f16: np.float16}
_NAN = 0x7FFF


@functools.cache
def pack_tile(dtype: Scalar, count: int) -> Op:
    """`Vec(f32, count) -> Vec(u32, count / 2)`: neighbours rounded (nearest, ties to even) to pairs of bf16 or f16, the
    first in the low half; what `bf16x2` and `f16x2` do. Raises ValueError for another type or an odd count.

    Of accumulators of `mma` and `wgmma` register 2·j + h holds row h, two columns of tile j: as `stmatrix_x4` and A
    fragments of another product take them.
    """
    if dtype not in _HOST or count % 2:
        raise ValueError(f"pack_tile: found {count} of {dtype}, expected an even number of bf16 or f16")

    def run(values: Any) -> tuple[int, ...]:
        row = values.array[values.lane] if isinstance(values, Fragment) else np.array(tuple(values), np.float32)
        with np.errstate(over="ignore"):
            codes = row.astype(_HOST[dtype]).view(np.uint16)
        codes[np.isnan(row)] = _NAN
        return tuple(codes.view(np.uint32).tolist())

    def emit(e: Any, *values: Any) -> list[Any]:
        text = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
        return [e.u32(text, lo, hi) for lo, hi in zip(values[::2], values[1::2], strict=True)]

    run.__doc__ = f"Pairs of {dtype}."
    return Op(
        f"pack_tile_{count}_{dtype}",
        (Vec(f32, count),),
        Vec(u32, count // 2),
        ptx=emit,
        numpy=run,
        needs=Needs((8, 0)),
        section="9.7.9 Data Movement: cvt",
    )
