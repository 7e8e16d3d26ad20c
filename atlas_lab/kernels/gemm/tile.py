"""Parts of the tile GEMMs: copies of tiles into swizzled shared memory, fragments, the epilogue.

A tile of shared memory is rows of `row_bytes`; the 16-byte chunks of row r are permuted by XOR with
`((r >> shift) & mask) * step`, so that the rows one instruction reads together lie in different banks.
"""

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

BK = 64  # K of one stage


class Swizzle(NamedTuple):
    """Chunk c of row r lies at chunk `c ^ (((r >> shift) & mask) * step)`."""

    shift: int
    mask: int
    step: int


# Rows of 128 bytes of x: read by ldmatrix (8 rows, one chunk), 8 bytes a lane (4 rows, two chunks), or 16 bytes a
# lane (2 rows, four chunks). Rows of 128, 64 and 32 bytes of weights: read by ldmatrix.
X_LDMATRIX, X_PAIRS, X_QUADS = Swizzle(0, 7, 1), Swizzle(0, 3, 2), Swizzle(0, 1, 4)
W_SWIZZLE = {128: Swizzle(0, 7, 1), 64: Swizzle(1, 3, 1), 32: Swizzle(2, 1, 1)}
PLAIN = Swizzle(0, 0, 0)

_COPIES = {16: L.cp_async_16, 8: L.cp_async_8, 4: L.cp_async_4}
_LOADS = {2: (L.ldg_b16, L.sts_b16), 1: (L.ldg_b8, L.sts_b8)}


@functools.cache
def copier(rows: int, row_bytes: int, threads: int, vector: int, swizzle: Swizzle):
    """A device function that copies a tile: `(dst, src, first_row, row_count, pitch, first_byte)`.

    `dst` is the tile in shared memory and `src` the matrix, both pointers to u8; rows are `pitch` bytes apart and as
    long. What lies outside the matrix becomes zero. `vector` bytes move at a time: pitch must be a multiple of it.
    From 4 bytes on the copies are asynchronous.
    """
    columns = row_bytes // vector
    total = rows * columns
    shift, mask, step = swizzle

    @L.device
    def place(row, col):
        return row * row_bytes + (((col >> 4) ^ (((row >> shift) & mask) * step)) << 4) + (col & 15)

    if vector >= 4:
        steps = -(-total // threads)
        copy = _COPIES[vector]

        @L.device
        def run(dst, src, first_row, row_count, pitch, first_byte):
            for s in L.unroll(steps):
                i = L.i32(cuda.threadIdx.x) + s * threads
                if i < total:
                    row = L.i32(i // columns)
                    col = L.i32(i % columns) * vector
                    inside = first_row + row < row_count and first_byte + col < pitch
                    at = L.i64(0)
                    if inside:
                        at = L.i64(first_row + row) * pitch + first_byte + col
                    copy(dst, place(row, col), src, at, vector if inside else 0)

        return run

    load, store = _LOADS[vector]

    @L.device
    def run_plain(dst, src, first_row, row_count, pitch, first_byte):
        for i in range(L.i32(cuda.threadIdx.x), total, threads):
            row = L.i32(i // columns)
            col = L.i32(i % columns) * vector
            value = L.u32(0)
            if first_row + row < row_count and first_byte + col < pitch:
                value = load(src, L.i64(first_row + row) * pitch + first_byte + col)
            store(dst, place(row, col), value)

    return run_plain


@functools.cache
def axpy(count: int):
    """`(acc, part, s) -> acc + part·s`, elementwise, each a fused multiply-add."""

    def emit(e, *v):
        return [e.f32("fma.rn.f32 $0, $1, $2, $3;", v[count + i], v[2 * count], v[i]) for i in range(count)]

    def run(acc, part, s):
        return tuple(L.fma_rn(p, s, a) for a, p in zip(acc, part, strict=True))

    vec = L.Vec(L.f32, count)
    return L.intrinsic(f"axpy_{count}", (vec, vec, L.f32), vec, ptx=emit, numpy=run, section="9.7.3 fma")


@functools.cache
def storer(m_tiles: int, n_tiles: int, pairs: bool):
    """A device function that stores a warp's accumulators as BF16: `(y, acc, row, col, m, n, alpha)`.

    `row`, `col` are the lane's first (row lane/4, column 2·(lane%4) of the warp's tile). `pairs` stores two columns
    at a time: n must be even.
    """

    @L.device
    def run(y, acc, row, col, m, n, alpha):
        for i in L.unroll(m_tiles):
            for j in L.unroll(n_tiles):
                for h in L.unroll(2):
                    at = 4 * (i * n_tiles + j) + 2 * h
                    r = row + 16 * i + 8 * h
                    c = col + 8 * j
                    if r < m and c < n:
                        to = L.i64(r) * n + c
                        if pairs:
                            L.stg_bf16x2(y, to, acc[at] * alpha, acc[at + 1] * alpha)
                        else:
                            L.stg_bf16(y, to, acc[at] * alpha)
                            if c + 1 < n:
                                L.stg_bf16(y, to + 1, acc[at + 1] * alpha)

    return run


@L.device
def block_of(m, n, bm, bn, raster):
    """Row and column of this block's tile: `raster` row tiles share their weights' columns before the next column."""
    rows = L.i32((m + bm - 1) // bm)
    columns = L.i32((n + bn - 1) // bn)
    band = L.i32(cuda.blockIdx.x) // (raster * columns)
    inside = L.i32(cuda.blockIdx.x) % (raster * columns)
    height = min(rows - band * raster, raster)
    return (band * raster + inside % height) * bm, inside // height * bn
