"""Launches that builds have in common."""

from __future__ import annotations

from atlas_lab.core.launch import Launch
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.quantize import copy
from atlas_lab.kernels.quantize import transpose as tr

SCALARS = {"u8": L.u8, "i8": L.i8, "e4m3": L.e4m3, "bf16": L.bf16, "f32": L.f32, "f16": L.f16}


def transpose(x: Tensor, y: Tensor) -> Launch:
    """x `[rows, cols]` of one-byte elements to y `[cols, rows]`."""
    rows, cols = x.shape
    kernel = tr.transpose_bytes(SCALARS[x.dtype], 16 if cols % 16 == 0 else 1, 4 if rows % 4 == 0 else 1)
    grid = (-(-cols // tr.TILE), -(-rows // tr.TILE))
    return Launch(kernel, grid=grid, block=tr.THREADS, args=(x, y, rows, cols), label="transpose")


def copied(x: Tensor, y: Tensor) -> Launch:
    """x to y, of equal dtype and count, in the widest units that both ends allow."""
    size, at = x.bytes, x.offset | y.offset
    unit = next(u for u in (16, 4, 2, 1) if size % u == 0 and at % u == 0 and u >= dtype(x.dtype).bytes)
    count = size // unit
    kernel = copy.copy_elements(SCALARS[x.dtype], unit)
    grid = -(-count // (copy.THREADS * copy.UNROLL))
    return Launch(kernel, grid=grid, block=copy.THREADS, args=(x, y, count), label="copy")
