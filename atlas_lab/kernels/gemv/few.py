"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, weights as checkpoints store them, each byte read once.

A block computes 16 columns of y: its warps take spans of K in turn, `depth` of them in flight.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import axpy
from atlas_lab.kernels.gemv.columns import TILE, activations, finish, product
from atlas_lab.kernels.lang import cuda


@L.family
def few_fp8_block(warps: int = 8, depth: int = 5, columns: int = 1, scale: L.Scalar = L.f32, blocks: int = 2):
    """W E4M3 `[n, k]`, scales F32 or BF16 (`down` and `across` as in `gemv_fp8_block`), x BF16 `[m, k]`, y BF16
    `[m, n]`; m at most 8·columns, k a multiple of 16.

    Weights become BF16 in registers, exactly; sums over 64 of K are scaled and added.
    """
    fetch, multiply, store = activations(columns, 16), product(columns, 16), finish(warps, columns)
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16
    scaled_add = axpy(4 * columns)

    @L.kernel(launch_bounds=(32 * warps, blocks))
    def kernel(
        w: L.In[L.e4m3],
        scales: L.In[scale],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        down: L.i32,
        across: L.i32,
    ):
        lane = L.lane_id()
        row = L.i32(cuda.blockIdx.x * TILE + (lane >> 2))
        # rows past the last repeat it; they are not stored
        upper = L.offset(w, L.i64(min(row, n - 1)) * k)
        lower = L.offset(w, L.i64(min(row + 8, n - 1)) * k)
        grid = L.offset(scales, L.i64(cuda.blockIdx.x * TILE >> 7) * down)
        sums = L.zeros(4 * columns)
        for start in range(L.warp_id() * 64, k, warps * depth * 64):
            q = ()
            f = ()
            for u in L.unroll(depth):
                span = L.i32(start + u * warps * 64)
                at = L.i32(span + 16 * (lane & 3))
                at = at if at < k else L.i32(0)
                q = q + L.ldg_v4_b32(upper, at) + L.ldg_v4_b32(lower, at)
                f = f + (load_scale(grid, (min(span, k - 1) >> 7) * across),)
            for u in L.unroll(depth):
                at = L.i32(start + u * warps * 64 + 16 * (lane & 3))
                v = fetch(x, m, k, at, at < k)
                part = L.zeros(4 * columns)
                for j in L.unroll(4):
                    a = L.e4m3x4_bf16x2(q[8 * u + j])
                    b = L.e4m3x4_bf16x2(q[8 * u + 4 + j])
                    part = multiply(part, (a[0], b[0], a[1], b[1]), v, j)
                sums = scaled_add(sums, part, f[u])
        store(y, sums, L.f32(1), m, n)

    return kernel


@L.family
def few_nvfp4(warps: int = 8, depth: int = 5, columns: int = 1, reciprocal: bool = False, blocks: int = 2):
    """Codes U8 `[n, k/2]`, block scales E4M3 `[n, k/16]`, one F32 tensor scale, x BF16 `[m, k]`, y BF16 `[m, n]`; m at
    most 8·columns, k a multiple of 32. A code times its block scale is exact in BF16. `reciprocal` says that the tensor
    scale divides."""
    fetch, multiply, store = activations(columns, 32), product(columns, 32), finish(warps, columns)

    @L.kernel(launch_bounds=(32 * warps, blocks))
    def kernel(
        w: L.In[L.u8],
        scales: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        x: L.In[L.bf16],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
    ):
        lane = L.lane_id()
        row = L.i32(cuda.blockIdx.x * TILE + (lane >> 2))
        # rows past the last repeat it; they are not stored
        above, below = L.i64(min(row, n - 1)), L.i64(min(row + 8, n - 1))
        upper, lower = L.offset(w, above * (k >> 1)), L.offset(w, below * (k >> 1))
        upper_scale, lower_scale = L.offset(scales, above * (k >> 4)), L.offset(scales, below * (k >> 4))
        sums = L.zeros(4 * columns)
        for start in range(L.warp_id() * 128, k, warps * depth * 128):
            q = ()
            f = ()
            for u in L.unroll(depth):
                at = L.i32(start + u * warps * 128 + 32 * (lane & 3))
                at = at if at < k else L.i32(0)
                q = q + L.ldg_v4_b32(upper, at >> 1) + L.ldg_v4_b32(lower, at >> 1)
                f = f + (L.ldg_b16(upper_scale, at >> 4), L.ldg_b16(lower_scale, at >> 4))
            for u in L.unroll(depth):
                at = L.i32(start + u * warps * 128 + 32 * (lane & 3))
                v = fetch(x, m, k, at, at < k)
                s = L.e4m3x4_bf16x2(f[2 * u] | (f[2 * u + 1] << 16))
                for j in L.unroll(4):
                    # words 0 and 1 are the first group of 16, 2 and 3 the second
                    pick = 0x1010 if j < 2 else 0x3232
                    g, h = L.prmt(s[0], 0, pick), L.prmt(s[1], 0, pick)
                    a = L.e2m1x8_bf16x2(q[8 * u + j])
                    b = L.e2m1x8_bf16x2(q[8 * u + 4 + j])
                    for i in L.unroll(2):
                        c, d = 2 * i, 2 * i + 1
                        rows = (L.bmul2(a[c], g), L.bmul2(b[c], h), L.bmul2(a[d], g), L.bmul2(b[d], h))
                        sums = multiply(sums, rows, v, 2 * j + i)
        alpha = L.ldg_f32(tensor_scale, 0)
        if reciprocal:
            alpha = L.div_rn(L.f32(1), alpha)
        store(y, sums, alpha, m, n)

    return kernel
