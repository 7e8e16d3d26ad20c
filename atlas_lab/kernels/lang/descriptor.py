"""Matrix descriptors: where in shared memory an operand of `wgmma` lies, as 64 bits.

    0-13 start address / 16    16-29 leading byte offset / 16    32-45 stride byte offset / 16
    49-51 base offset, here 0  62-63 swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes

An operand has rows (of M or N) and 32 bytes of K a row; it is read in 16-byte chunks. W is the swizzle in chunks (8,
4, 2, or 1 without). Offsets in bytes before the swizzle, which then exchanges chunks by bits of the whole address (bits
4-6 xor bits 7-9 at 128 bytes, 4-5 xor 7-8 at 64, 4 xor 7 at 32):

    K-major, row r, chunk c of K     swizzled:  16·W·(r % 8) + stride·(r // 8) + 16·c
                                     none:      16·(r % 8) + stride·(r // 8) + leading·c
    transposed (16-bit types),       swizzled:  16·(c % W) + leading·(c // W) + 16·W·(k % 8) + stride·(k // 8)
    chunk c of 8 rows, k             none:      stride·c + 16·(k % 8) + leading·(k // 8)

So a K-major tile with 128-byte rows (64 bf16), swizzled by 128 bytes as TMA writes it, has leading 16 (not read) and
stride 1024, and starts at a multiple of 1024; the next 16 bf16 of K are 32 bytes on (`descriptor_advance`), 64 rows on
are 8192 bytes. Source: PTX ISA 9.7.15.5.1, matrix descriptor and canonical layouts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.op import SM90A, Const, Effect, Op
from atlas_lab.kernels.lang.types import Pointer, i32, u64

_SECTION = "9.7.15.5.1.2 matrix descriptor"
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
_WIDTHS = {mode: width for width, mode in _MODES.items()}
ADDRESSES = 1 << 18  # bytes of shared memory that a descriptor can name


class Descriptor(NamedTuple):
    """A descriptor's fields, in bytes."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int


def decode(bits: int) -> Descriptor:
    """The fields of 64 bits."""
    start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return Descriptor(start, leading, stride, bits >> 49 & 7, _WIDTHS[bits >> 62 & 3])


def _constant(swizzle: int, leading: int, stride: int) -> int:
    """All bits but the address; raises ValueError for what a descriptor cannot say."""
    if swizzle not in _MODES:
        raise ValueError(f"matrix_descriptor: found swizzle {swizzle}, expected 0, 32, 64 or 128 bytes")
    for name, value in (("leading", leading), ("stride", stride)):
        if value % 16 or not 0 <= value < ADDRESSES:
            raise ValueError(
                f"matrix_descriptor: found {name} {value}, expected a multiple of 16 bytes from 0 to {ADDRESSES - 16}"
            )
    return _MODES[swizzle] << 62 | stride >> 4 << 32 | leading >> 4 << 16


@functools.lru_cache(maxsize=256)
def _offsets(swizzle: int, leading: int, stride: int, rows: int, transposed: bool) -> np.ndarray:
    """Byte offsets of chunks before the swizzle: [rows, 2], transposed [rows / 8, 16 of K]."""
    width = swizzle or 16
    if not transposed:
        r, c = np.arange(rows)[:, None], np.arange(2)
        return np.asarray(width * (r % 8) + stride * (r // 8) + (16 if swizzle else leading) * c)
    c, k = np.arange(rows // 8)[:, None], np.arange(16)
    if not swizzle:
        return np.asarray(stride * c + 16 * (k % 8) + leading * (k // 8))
    w = swizzle // 16
    return np.asarray(16 * (c % w) + leading * (c // w) + width * (k % 8) + stride * (k // 8))


def chunks(d: Descriptor, rows: int, transposed: bool) -> np.ndarray:
    """Shared addresses of the 16-byte chunks of an operand: [rows, 2], transposed [rows / 8, 16 of K]."""
    linear = (d.start + _offsets(d.swizzle, d.leading, d.stride, rows, transposed)) % ADDRESSES
    mask = d.swizzle // 16 - 1 if d.swizzle else 0
    return np.asarray(linear ^ (linear >> 3 & mask << 4))


def _descriptor(p: Pointer, i: int, swizzle: int, leading: int, stride: int) -> int:
    """The descriptor of a matrix that starts at element i of p: `swizzle` (0, 32, 64, 128), `leading` and `stride` in
    bytes, known at compile time. Raises ValueError for what a descriptor cannot say."""
    fixed = _constant(swizzle, leading, stride)
    return fixed | current().shared_address(p, i) % ADDRESSES >> 4


def _emit_descriptor(e: Any, address: Any, swizzle: int, leading: int, stride: int) -> Any:
    b = e.builder
    start = b.lshr(b.and_(address, e.const(ADDRESSES - 1)), e.const(4))
    return b.or_(e.wide(start), e.wide(_constant(swizzle, leading, stride)))


def _advance(d: int, nbytes: int) -> int:
    """The descriptor of the matrix `nbytes` further on, a multiple of 16. Raises ValueError for another number."""
    if nbytes % 16:
        raise ValueError(f"descriptor_advance: found {nbytes} bytes, expected a multiple of 16")
    return d & ~0x3FFF | (d + (nbytes >> 4)) & 0x3FFF


def _emit_advance(e: Any, d: Any, nbytes: Any) -> Any:
    return e.builder.add(d, e.wide(e.builder.ashr(nbytes, e.const(4)), signed=True))


matrix_descriptor = Op(
    "matrix_descriptor",
    (SHARED, Const("swizzle"), Const("leading"), Const("stride")),
    u64,
    ptx=_emit_descriptor,
    numpy=_descriptor,
    effect=Effect.READ,
    needs=SM90A,
    section=_SECTION,
)
descriptor_advance = Op(
    "descriptor_advance", (u64, i32), u64, ptx=_emit_advance, numpy=_advance, needs=SM90A, section=_SECTION
)
