"""Parts of the kernels that multiply few rows of activations on tensor cores: 16 rows of weights are the operand A of
m16n8k16, activations the 8 columns of B, so that each weight byte is read once for all of them.

Lane 4g + t of a warp owns rows g and g + 8 of the weights, row g of each 8 rows of x, and the t-th run of K of a span.
K is permuted: a product takes 4 consecutive K of a lane's run, and both operands agree on which.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

TILE = 16  # rows of weights a block computes


@functools.cache
def activations(columns: int, run: int):
    """A device function `(x, m, k, at, inside)`: the lane's `run` K from `at` of its row in each 8 rows of x `[m, k]`,
    as `columns` times run/2 registers of two BF16; zeros for rows past m and where `inside` is false."""
    loads = run // 8

    @L.device
    def fetch(x, m, k, at, inside):
        found = ()
        for c in L.unroll(columns):
            row = L.i32((L.lane_id() >> 2) + 8 * c)
            for i in L.unroll(loads):
                v = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
                if inside and row < m:
                    v = L.ldg_v4_b32(x, L.i64(row) * k + at + 8 * i)
                found = found + v
        return found

    return fetch


@functools.cache
def product(columns: int, run: int):
    """A device function `(sums, rows, v, j)`: sums of all columns plus 16 rows of weights (four registers of A) times
    the j-th 4 K of the activations `v` that `activations` found."""
    registers = run // 2
    multiply = L.mma_m16n8k16_bf16

    @L.device
    def add(sums, rows, v, j):
        out = ()
        for c in L.unroll(columns):
            one = (sums[4 * c], sums[4 * c + 1], sums[4 * c + 2], sums[4 * c + 3])
            out = out + multiply(one, rows, (v[registers * c + 2 * j], v[registers * c + 2 * j + 1]))
        return out

    return add


@functools.cache
def finish(warps: int, columns: int):
    """A device function `(y, sums, alpha, m, n)`: adds the warps' sums in the order of the warps, times alpha, and
    stores what exists of this block's 16 columns of y BF16 `[m, n]`."""
    size = 8 * columns * TILE

    @L.device
    def store(y, sums, alpha, m, n):
        # warp, row of x, row of weights
        shared = L.shared(L.f32, warps * size)
        lane = L.lane_id()
        first = L.warp_id() * size + (lane >> 2)
        for c in L.unroll(columns):
            for i in L.unroll(4):
                L.sts_f32(shared, first + (8 * c + 2 * (lane & 3) + (i & 1)) * TILE + 8 * (i >> 1), sums[4 * c + i])
        cuda.syncthreads()
        for i in range(L.i32(cuda.threadIdx.x), size, 32 * warps):
            total = L.f32(0)
            for s in L.unroll(warps):
                total += L.lds_f32(shared, s * size + i)
            row = L.i32(i >> 4)
            column = L.i32(cuda.blockIdx.x * TILE + (i & 15))
            if row < m and column < n:
                L.stg_bf16(y, L.i64(row) * n + column, L.mul_rn(total, alpha))

    return store
