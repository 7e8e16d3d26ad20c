"""Parts of the tile GEMMs: copies of tiles into swizzled shared memory, scaled sums, stores, the order of blocks.

A tile of shared memory is rows of `row_bytes`; the 16-byte chunks of row r are permuted by XOR with
`((r >> shift) & mask) * step`, so that the rows one instruction reads together lie in different banks.
"""

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

BK = 64  # K of one stage
PIECES = 4  # parts a tile's copy is divided into, to be issued between products


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


class Copier(NamedTuple):
    """Two device functions that bring tiles of a matrix whose rows are `pitch` bytes.

    `begin(first_row, pitch)` is what a thread knows of its chunks for the whole kernel; `copy(dst, src, mine,
    row_count, pitch, first_byte, piece)` brings one of PIECES parts of the tile that starts at byte `first_byte` of
    each row, `row_count` rows of which exist. The rest of the tile becomes zero.
    """

    begin: L.DeviceFunction
    copy: L.DeviceFunction


@functools.cache
def copier(rows: int, row_bytes: int, threads: int, vector: int, swizzle: Swizzle) -> Copier:
    """Copies of `rows` x `row_bytes` to shared memory, `vector` bytes at a time: pitch must be a multiple of it.

    From 4 bytes on they are asynchronous. Raises ValueError where the threads do not cover whole rows.
    """
    columns = row_bytes // vector
    stride, rest = divmod(threads, columns)  # rows that one copy of all threads covers
    shift, mask, step = swizzle
    period = (mask + 1) << shift if mask else 1
    steps = -(-rows // stride)
    if rest or (vector >= 4 and steps > 1 and stride % period):
        raise ValueError(f"copier: {threads} threads do not cover rows of {columns} chunks swizzled by {swizzle}")

    @L.device
    def place(row, col):
        return row * row_bytes + (((col >> 4) ^ (((row >> shift) & mask) * step)) << 4) + (col & 15)

    @L.device
    def begin(first_row, pitch):
        row = L.i32(L.i32(cuda.threadIdx.x) // columns)
        col = L.i32(L.i32(cuda.threadIdx.x) % columns) * vector
        return L.i64(first_row + row) * pitch + col, place(row, col), row, col

    if vector >= 4:
        move = _COPIES[vector]

        @L.device
        def copy(dst, src, mine, row_count, pitch, first_byte, piece):
            at, to, row, col = mine
            for s in L.unroll(steps):
                if s % PIECES == piece and (stride * (s + 1) <= rows or row + s * stride < rows):
                    here = L.i32(first_byte + col) < pitch and L.i32(row + s * stride) < row_count
                    from_ = at + L.i64(s * stride) * pitch + first_byte
                    move(dst, to + s * stride * row_bytes, src, from_ if here else L.i64(0), vector if here else 0)

        return Copier(begin, copy)

    load, store = _LOADS[vector]

    @L.device
    def copy_plain(dst, src, mine, row_count, pitch, first_byte, piece):
        at, _, row, col = mine
        if piece == 0:
            for s in range(row, rows, stride):
                value = L.u32(0)
                if first_byte + col < pitch and s < row_count:
                    value = load(src, at + L.i64(s - row) * pitch + first_byte)
                store(dst, place(s, col), value)

    return Copier(begin, copy_plain)


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
    """A device function that stores a warp's accumulators as BF16: `(y, acc, row, col, m, n, pitch, alpha)`,
    of rows `pitch` elements apart.

    `row`, `col` are the lane's first (row lane/4, column 2·(lane%4) of the warp's tile). `pairs` stores two columns
    at a time: n and pitch must be even.
    """

    @L.device
    def run(y, acc, row, col, m, n, pitch, alpha):
        for i in L.unroll(m_tiles):
            for j in L.unroll(n_tiles):
                for h in L.unroll(2):
                    at = 4 * (i * n_tiles + j) + 2 * h
                    r = row + 16 * i + 8 * h
                    c = col + 8 * j
                    if r < m and c < n:
                        to = L.i64(r) * pitch + c
                        if pairs:
                            L.stg_bf16x2(y, to, acc[at] * alpha, acc[at + 1] * alpha)
                        else:
                            L.stg_bf16(y, to, acc[at] * alpha)
                            if c + 1 < n:
                                L.stg_bf16(y, to + 1, acc[at + 1] * alpha)

    return run


@functools.cache
def following(stage: int, stages: int):
    """A device function: the byte offset of the stage after the one at `at`, in a ring."""

    @L.device
    def run(at):
        return L.i32(at + stage) if at < (stages - 1) * stage else L.i32(0)

    return run


@L.device
def tile_at(i, m, n, bm, bn, raster):
    """Row and column of tile i: `raster` row tiles share their weights' columns before the next column."""
    rows = L.i32((m + bm - 1) // bm)
    columns = L.i32((n + bn - 1) // bn)
    band = i // (raster * columns)
    inside = i % (raster * columns)
    height = min(rows - band * raster, raster)
    return (band * raster + inside % height) * bm, inside // height * bn


@L.device
def block_of(m, n, bm, bn, raster):
    """Row and column of this block's tile."""
    return tile_at(L.i32(cuda.blockIdx.x), m, n, bm, bn, raster)
