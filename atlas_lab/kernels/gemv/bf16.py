"""y = x·Wᵀ for one to three rows of x, BF16 weights: a warp holds `rows` rows of the weight and streams them once."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import activations, range_of_warp, rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 8  # weights a 16-byte load brings
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.family
def gemv_bf16(warps: int = 4, rows: int = 2, unroll: int = 4, m: int = 1, stream: bool = True):
    """W BF16 `[n, k]` row-major, x BF16 `[m, k]`, y BF16 `[m, n]`; k a multiple of 8. `unroll` loads a row are in
    flight; K is cut into 2**cuts ranges, `warps` or fewer.

    A lane sums K = 8·lane + 256·i + 0..7 of its range in ascending order, then lanes are added pairwise, 16 apart
    first, then the ranges in order.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    begin, end = rows_of_warp(warps, rows, m)
    bounds, fetch = range_of_warp(SPAN, CHUNK), activations(m, CHUNK)

    @L.device
    def add(acc, w, at, x, k, c):
        v = fetch(x, k, c)
        for r in L.unroll(rows):
            q = load(w, at[r] + c)
            for j in L.unroll(4):
                for i in L.unroll(m):
                    acc[r * m + i] += L.bf16_lo(q[j]) * L.bf16_lo(v[4 * i + j])
                    acc[r * m + i] += L.bf16_hi(q[j]) * L.bf16_hi(v[4 * i + j])

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, cuts: L.i32):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows * m, L.f32)
        first = begin(at, acc, n, k, cuts)
        x = L.grid_wait_for(x)
        c, stop = bounds(k, cuts)
        while c + SPAN * (unroll - 1) < stop:
            for u in L.unroll(unroll):
                add(acc, w, at, x, k, c + SPAN * u)
            c += SPAN * unroll
        while c < stop:
            add(acc, w, at, x, k, c)
            c += SPAN
        end(y, acc, first, n, cuts)

    return kernel
