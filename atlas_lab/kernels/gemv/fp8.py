"""y = W·x for one row of activations, FP8 E4M3 weights with one scale for every 128x128 block."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.rows import rows_of_warp
from atlas_lab.kernels.lang import cuda

CHUNK = 16  # weights a 16-byte load brings
SPAN = 32 * CHUNK  # weights of a row one warp-wide load covers


@L.device
def _dot(q, a, b):
    """Sum of 16 products: weights in q (four words of four), activations in a and b (eight BF16 each)."""
    s = L.f32(0)
    for j in L.unroll(2):
        lo, hi = L.e4m3x4_f16x2(q[j])
        s += L.f16_lo(lo) * L.bf16_lo(a[2 * j])
        s += L.f16_hi(lo) * L.bf16_hi(a[2 * j])
        s += L.f16_lo(hi) * L.bf16_lo(a[2 * j + 1])
        s += L.f16_hi(hi) * L.bf16_hi(a[2 * j + 1])
    for j in L.unroll(2):
        lo, hi = L.e4m3x4_f16x2(q[2 + j])
        s += L.f16_lo(lo) * L.bf16_lo(b[2 * j])
        s += L.f16_hi(lo) * L.bf16_hi(b[2 * j])
        s += L.f16_lo(hi) * L.bf16_lo(b[2 * j + 1])
        s += L.f16_hi(hi) * L.bf16_hi(b[2 * j + 1])
    return s


@L.family
def gemv_fp8_block(warps: int = 4, rows: int = 2, unroll: int = 4, scale: L.Scalar = L.f32, stream: bool = True):
    """W E4M3 `[n, k]` row-major, scales F32 or BF16, x BF16 `[k]`, y BF16 `[n]`.

    `down` and `across` are how many scales lie between blocks of 128 rows and of 128 K: ceil(k/128) and 1, or 0 and 0
    for one scale of the whole tensor.

    k is a multiple of 16; `rows` divides 128, so that the rows of a warp share their scales. A lane sums 16 products
    of one block, multiplies by the block's scale and adds; lanes are added pairwise, 16 apart first.
    """
    load = L.ldg_v4_b32_stream if stream else L.ldg_v4_b32
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16
    begin, end = rows_of_warp(warps, rows)

    @L.device
    def add(acc, w, at, scales, across, x, c):
        a = L.ldg_v4_b32(x, c)
        b = L.ldg_v4_b32(x, c + 8)
        s = load_scale(scales, (c >> 7) * across)
        for r in L.unroll(rows):
            acc[r] += _dot(load(w, at[r] + c), a, b) * s

    @L.kernel(launch_bounds=(32 * warps, 1))
    def kernel(
        w: L.In[L.e4m3],
        scales: L.In[scale],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        n: L.i32,
        k: L.i32,
        down: L.i32,
        across: L.i32,
    ):
        at = cuda.local.array(rows, L.i64)
        acc = cuda.local.array(rows, L.f32)
        first = begin(at, acc, n, k)
        if first >= n:
            return
        grid = L.offset(scales, (first >> 7) * down)
        c = L.lane_id() * CHUNK
        while c + SPAN * (unroll - 1) < k:
            for u in L.unroll(unroll):
                add(acc, w, at, grid, across, x, c + SPAN * u)
            c += SPAN * unroll
        while c < k:
            add(acc, w, at, grid, across, x, c)
            c += SPAN
        end(y, acc, first, n)

    return kernel
