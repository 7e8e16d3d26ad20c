"""The two products of a LoRA addend s·B(A·x), of a rank r of some tens: on CUDA cores, sums in FP32.

Nothing between them is rounded but to FP32. Both read x's rows one at a time, so that a row's addend does not depend
on how many there are.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

WARPS = 4  # of a block: rows of A, one each
THREADS = 32 * WARPS
VECTOR = 8  # elements of a 16-byte load
STEP = 32 * VECTOR  # of K that a warp takes at a time


@L.device
def added_products(total, a, b):
    """The sum plus the products of 8 elements each, as pairs."""
    for j in L.unroll(4):
        total = L.fma_rn(L.bf16_lo(a[j]), L.bf16_lo(b[j]), total)
        total = L.fma_rn(L.bf16_hi(a[j]), L.bf16_hi(b[j]), total)
    return total


@L.family
def low_rank_in(vector: bool = True):
    """t = x·Aᵀ: x BF16 `[m, k]`, A BF16 `[r, k]`, t F32 `[m, r]`. A warp has an output: lane l adds elements 8l to
    8l + 7 of each 256 of K in turn (without `vector`, element l of each 32), then the lanes' sums meet.

    With `vector` k is a multiple of 8. The grid is `(m, ceil(r / 4))`. A dependent launch may start at once.
    """

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(x: L.In[L.bf16], a: L.In[L.bf16], t: L.Out[L.f32], k: L.i32, r: L.i32):
        row, j = L.i64(cuda.blockIdx.x), L.i32(cuda.blockIdx.y * WARPS + L.warp_id())
        lane, total = L.lane_id(), L.f32(0)
        L.grid_launch_dependents()
        x = L.grid_wait_for(x)
        if j < r:
            if vector:
                column = L.i32(VECTOR * lane)
                while column < k:
                    of_x = L.ld_waited_v4_b32(x, row * k + column)
                    total = added_products(total, of_x, L.ldg_v4_b32(a, L.i64(j) * k + column))
                    column = L.i32(column + STEP)
            else:
                column = L.i32(lane)
                while column < k:
                    of_x = L.ld_waited_bf16(x, row * k + column)
                    total = L.fma_rn(of_x, L.ldg_bf16(a, L.i64(j) * k + column), total)
                    column = L.i32(column + 32)
        total = L.warp_sum(total)
        if j < r and lane == 0:
            L.stg_f32(t, row * r + j, total)

    return kernel


@L.family
def low_rank_out():
    """delta = s·t·Bᵀ: t F32 `[m, r]`, B BF16 `[n, r]`, delta BF16 `[m, n]`. A thread has an output: the sum over r in
    ascending order, times s, rounded once.

    The grid is `(m, ceil(n / 128))`. A dependent launch may start at once.
    """

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(t: L.In[L.f32], b: L.In[L.bf16], delta: L.Out[L.bf16], n: L.i32, r: L.i32, s: L.f32):
        row, column = L.i64(cuda.blockIdx.x), L.i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        L.grid_launch_dependents()
        t = L.grid_wait_for(t)
        if column < n:
            total = L.f32(0)
            for j in range(r):
                total = L.fma_rn(L.ld_waited_f32(t, row * r + j), L.ldg_bf16(b, L.i64(column) * r + j), total)
            L.stg_bf16(delta, row * n + column, L.mul_rn(total, s))

    return kernel
