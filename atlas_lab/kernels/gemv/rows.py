"""What the GEMVs share: the rows and the range of K that a warp holds, its activations, and how its sums leave it."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@functools.cache
def rows_of_warp(warps: int, rows: int, m: int):
    """Two device functions for blocks of `warps` warps of `rows` output rows, and `m` rows of x.

    `begin(at, acc, n, stride, cuts)` lets the next launch begin, empties the sums, finds where the rows start in
    weights of `stride` elements a row and returns the first row; 2**cuts warps in succession hold the same rows.
    `end(y, acc, first, n, cuts)` adds the lanes up, 16 apart first, then those warps in their order, and stores what
    exists of the rows in y `[m, n]`.
    `at` is a local array of `rows` i64, `acc` one of `rows·m` f32: row r of the weights times row i of x is r·m + i.
    """

    @L.device
    def begin(at, acc, n, stride, cuts):
        L.grid_launch_dependents()
        first = L.i32((L.i32(cuda.blockIdx.x * warps + L.warp_id()) >> cuts) * rows)
        for r in L.unroll(rows):
            # rows past the last repeat it; they are not stored
            at[r] = L.i64(min(L.i32(first + r), L.i32(n - 1))) * stride
        for i in L.unroll(rows * m):
            acc[i] = L.f32(0)
        return first

    @L.device
    def meet(y, acc, first, n, cuts):
        shared = L.shared(L.f32, warps * rows * m)
        lane = L.lane_id()
        if lane == 0:
            for i in L.unroll(rows * m):
                L.sts_f32(shared, L.warp_id() * (rows * m) + i, acc[i])
        cuda.syncthreads()
        each = L.i32(1) << cuts
        if (L.warp_id() & (each - 1)) == 0:
            for i in range(lane, rows * m, 32):
                at = L.warp_id() * (rows * m) + i
                total = L.lds_f32(shared, at)
                for s in range(1, each):
                    total += L.lds_f32(shared, at + s * (rows * m))
                row = first + i // m
                if row < n:
                    L.stg_bf16(y, (i % m) * n + row, total)

    @L.device
    def end(y, acc, first, n, cuts):
        for i in L.unroll(rows * m):
            acc[i] = L.warp_sum(acc[i])
        if cuts > 0:
            meet(y, acc, first, n, cuts)
        else:  # every warp by itself: it waits for no other
            for i in L.unroll(rows * m):
                row = L.i32(first + i // m)
                if L.lane_id() == i % 32 and row < n:
                    L.stg_bf16(y, L.i32((i % m) * n + row), acc[i])

    return begin, end


@functools.cache
def range_of_warp(span: int, chunk: int):
    """A device function `(k, cuts)`: where the lane starts and its warp stops when spans of K are cut into 2**cuts
    ranges that follow each other, the last ones shorter; a lane takes `chunk` weights of a span."""

    @L.device
    def bounds(k, cuts):
        each = L.i32(1) << cuts
        part = (((k + span - 1) // span + each - 1) >> cuts) * span
        start = (L.warp_id() & (each - 1)) * part
        return start + L.lane_id() * chunk, min(k, start + part)

    return bounds


@functools.cache
def activations(m: int, count: int):
    """A device function `(x, k, c)`: `count` BF16 from K = c of each of the m rows of x `[m, k]`, two a register, after
    `grid_wait_for`."""

    @L.device
    def fetch(x, k, c):
        v = ()
        for i in L.unroll(m):
            for j in L.unroll(count // 8):
                v = v + L.ld_waited_v4_b32(x, i * k + c + 8 * j)
        return v

    return fetch


@functools.cache
def dots(m: int, count: int, width: int):
    """A device function `(w, v, start)`: sums of the products of w, `count` f32, with K = start and on of each of the
    m rows of v, `width` BF16 a row, in ascending order; m f32."""

    @L.device
    def dot(w, v, start):
        out = ()
        for i in L.unroll(m):
            s = L.f32(0)
            for j in L.unroll(count // 2):
                pair = v[(i * width + start) // 2 + j]
                s += w[2 * j] * L.bf16_lo(pair)
                s += w[2 * j + 1] * L.bf16_hi(pair)
            out = out + (s,)
        return out

    return dot
