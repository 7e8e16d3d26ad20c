"""y = W·x for one row of activations, BF16 weights: a warp holds `rows` output rows and streams them once."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 8  # weights a 16-byte load brings
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.family
def gemv_bf16(warps: int = 4, rows: int = 2, unroll: int = 4, stream: bool = True):
    """W BF16 `[n, k]` row-major, x BF16 `[k]`, y BF16 `[n]`; k a multiple of 8. `unroll` loads a row are in flight.

    A lane sums K = 8·lane + 256·i + 0..7 in ascending order, then lanes are added pairwise, 16 apart first.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    begin, end = rows_of_warp(warps, rows)

    @L.device
    def add(acc, w, at, x, c):
        v = L.ldg_v4_b32(x, c)
        for r in L.unroll(rows):
            q = load(w, at[r] + c)
            for j in L.unroll(4):
                acc[r] += L.bf16_lo(q[j]) * L.bf16_lo(v[j])
                acc[r] += L.bf16_hi(q[j]) * L.bf16_hi(v[j])

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows, L.f32)
        first = begin(at, acc, n, k)
        if first >= n:
            return
        c = L.lane_id() * CHUNK
        while c + SPAN * (unroll - 1) < k:
            for u in L.unroll(unroll):
                add(acc, w, at, x, c + SPAN * u)
            c += SPAN * unroll
        while c < k:
            add(acc, w, at, x, c)
            c += SPAN
        end(y, acc, first, n)

    return kernel
