"""Transposing a matrix of one-byte elements: codes and scales of weights, from rows of K to rows of N."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

TILE = 64  # rows and columns a block moves
THREADS = 256
PITCH = TILE // 4 + 1  # words of a row in shared memory: 17, so that a column of words lies in different banks


@L.device
def _word(x, at, have):
    """Four elements from `at`, of which the first `have` exist; the others are 0."""
    w = L.u32(0)
    for i in L.unroll(4):
        if i < have:
            w = L.u32(w | L.ldg_b8(x, at + i) << (8 * i))
    return w


@L.family
def transpose_bytes(dtype: L.Scalar = L.u8, load: int = 16, store: int = 4):
    """x `[rows, cols]` to y `[cols, rows]`, elements of one byte. Grid `(ceil(cols/64), ceil(rows/64))`.

    `load` is 16 where cols is a multiple of 16, else 1; `store` is 4 where rows is a multiple of 4, else 1.
    """

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(x: L.In[dtype], y: L.Out[dtype], rows: L.i32, cols: L.i32):
        tile = L.shared(L.u32, TILE * PITCH)
        t = L.i32(cuda.threadIdx.x)
        top, left = L.i32(cuda.blockIdx.y) * TILE, L.i32(cuda.blockIdx.x) * TILE
        # a thread brings 16 columns of one row
        r, c = t >> 2, (t & 3) * 16
        at = L.i64(top + r) * cols + (left + c)
        if load == 16:
            v = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
            if top + r < rows and left + c < cols:
                v = L.ldg_v4_b32(x, at)
            for j in L.unroll(4):
                L.sts_b32(tile, r * PITCH + (c >> 2) + j, v[j])
        else:
            for j in L.unroll(4):
                have = L.i32(0)
                if top + r < rows:
                    have = L.i32(cols - (left + c + 4 * j))
                L.sts_b32(tile, r * PITCH + (c >> 2) + j, _word(x, at + 4 * j, have))
        cuda.syncthreads()
        # and takes 4 x 4: word j of rows 4i to 4i + 3
        i, j = t & 15, t >> 4
        a = L.lds_b32(tile, (4 * i) * PITCH + j)
        b = L.lds_b32(tile, (4 * i + 1) * PITCH + j)
        c0 = L.lds_b32(tile, (4 * i + 2) * PITCH + j)
        d = L.lds_b32(tile, (4 * i + 3) * PITCH + j)
        ab, cd = L.prmt(a, b, 0x5140), L.prmt(c0, d, 0x5140)  # columns 0 and 1
        ef, gh = L.prmt(a, b, 0x7362), L.prmt(c0, d, 0x7362)  # columns 2 and 3
        out = (L.prmt(ab, cd, 0x5410), L.prmt(ab, cd, 0x7632), L.prmt(ef, gh, 0x5410), L.prmt(ef, gh, 0x7632))
        row = top + 4 * i
        for q in L.unroll(4):
            column = left + 4 * j + q
            if column < cols:
                to = L.i64(column) * rows + row
                if store == 4:
                    if row < rows:
                        L.stg_b32(y, to, out[q])
                else:
                    for e in L.unroll(4):
                        if row + e < rows:
                            L.stg_b8(y, to + e, out[q] >> (8 * e))

    return kernel
