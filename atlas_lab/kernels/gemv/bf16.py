"""y = W·x for one row of activations, BF16 weights: a warp holds `rows` output rows and streams them once."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

CHUNK = 8  # weights a 16-byte load brings
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.family
def gemv_bf16(warps: int = 4, rows: int = 2, unroll: int = 4, stream: bool = True):
    """W BF16 `[n, k]` row-major, x BF16 `[k]`, y BF16 `[n]`; k a multiple of 8. `unroll` loads a row are in flight.

    A lane sums K = 8·lane + 256·i + 0..7 in ascending order, then lanes are added pairwise, 16 apart first.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
        first = (cuda.blockIdx.x * warps + L.warp_id()) * rows
        if first >= n:
            return
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows, L.f32)
        for r in L.unroll(rows):
            # rows past the last repeat it; they are not stored
            at[r] = L.i64(min(first + r, n - 1)) * k
            acc[r] = L.f32(0)
        c = L.lane_id() * CHUNK
        while c + SPAN * (unroll - 1) < k:
            for u in L.unroll(unroll):
                v = L.ldg_v4_b32(x, c + SPAN * u)
                for r in L.unroll(rows):
                    q = load(w, at[r] + c + SPAN * u)
                    for j in L.unroll(4):
                        acc[r] += L.bf16_lo(q[j]) * L.bf16_lo(v[j])
                        acc[r] += L.bf16_hi(q[j]) * L.bf16_hi(v[j])
            c += SPAN * unroll
        while c < k:
            v = L.ldg_v4_b32(x, c)
            for r in L.unroll(rows):
                q = load(w, at[r] + c)
                for j in L.unroll(4):
                    acc[r] += L.bf16_lo(q[j]) * L.bf16_lo(v[j])
                    acc[r] += L.bf16_hi(q[j]) * L.bf16_hi(v[j])
            c += SPAN
        for r in L.unroll(rows):
            total = L.warp_sum(acc[r])
            if L.lane_id() == 0 and first + r < n:
                L.stg_bf16(y, first + r, total)

    return kernel
