"""y = x·Wᵀ on tensor cores (mma.sync), FP8 E4M3 weights with one scale for every 128x128 block (W8A16).

K is permuted inside 16: lane 4g + t of a warp owns K 4t to 4t + 3, which are one register of weights as ldmatrix
brings them and 8 bytes of x. Weights become BF16 in registers, exactly.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import BK, PIECES, W_SWIZZLE, X_PAIRS, axpy, block_of, copier, following, storer
from atlas_lab.kernels.lang import cuda

X_ROW, W_ROW = 2 * BK, BK  # bytes of a row of a stage


@L.family
def gemm_fp8_block(
    bm: int,
    bn: int,
    warps_m: int,
    warps_n: int,
    stages: int = 3,
    x_vector: int = 16,
    w_vector: int = 16,
    pairs: bool = True,
    scale: L.Scalar = L.f32,
    blocks: int = 1,
    raster: int = 32,
):
    """x BF16 `[m, k]`, W E4M3 `[n, k]`, scales F32 or BF16 (`down` and `across` as in `gemv_fp8_block`), y BF16
    `[m, n]`; any m, n, k that `x_vector`, `w_vector` (bytes that divide a row) and `pairs` (n even) allow; bn divides
    128.

    Sums run over 128 of K in FP32, are multiplied by the block's scale and added up in FP32.
    """
    threads = 32 * warps_m * warps_n
    mt, nt = bm // warps_m // 16, bn // warps_n // 8
    stage = bm * X_ROW + bn * W_ROW
    begin_x, bring_x = copier(bm, X_ROW, threads, x_vector, X_PAIRS)
    begin_w, bring_w = copier(bn, W_ROW, threads, w_vector, W_SWIZZLE[W_ROW])
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16
    load_w = L.ldmatrix_tile(nt, 8 * W_ROW)
    multiply = L.mma_tile(L.bf16, mt, nt)
    after = following(stage, stages)
    store = storer(mt, nt, pairs)
    count = 4 * mt * nt
    scaled_add = axpy(count)

    @L.kernel(launch_bounds=(threads, blocks))
    def kernel(
        x: L.In[L.bf16],
        w: L.In[L.e4m3],
        scales: L.In[scale],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        down: L.i32,
        across: L.i32,
    ):
        row0, col0 = block_of(m, n, bm, bn, raster)
        grid = (col0 >> 7) * down
        tiles = L.dynamic_shared(L.u8, 0)
        xb = L.cast(x, L.u8)
        wb = L.cast(w, L.u8)
        my_x = begin_x(row0, 2 * k)
        my_w = begin_w(col0, k)
        steps = L.i32((k + BK - 1) // BK)
        for s in L.unroll(stages - 1):
            if s < steps:
                for piece in L.unroll(PIECES):
                    bring_x(L.offset(tiles, s * stage), xb, my_x, m - row0, 2 * k, s * X_ROW, piece)
                    bring_w(L.offset(tiles, s * stage + bm * X_ROW), wb, my_w, n - col0, k, s * W_ROW, piece)
            L.cp_async_commit()
        lane = L.lane_id()
        warp = L.warp_id()
        t = lane & 3
        wm = L.i32(warp // warps_n) * (bm // warps_m)
        wn = L.i32(warp % warps_n) * (bn // warps_n)
        a_row = wm + (lane >> 2)
        a_at = a_row * X_ROW + ((t & 1) << 3)
        a_mask = (a_row & 3) << 1
        w_row = wn + (lane & 7)
        w_at = bm * X_ROW + w_row * W_ROW + (((lane >> 3) ^ ((w_row >> 1) & 3)) << 4)
        acc = L.zeros(count)
        part = L.zeros(count)
        at = L.i32(0)
        to = L.i32((stages - 1) * stage)
        for step in range(steps):
            L.cp_async_wait(stages - 2)
            cuda.syncthreads()
            ahead = L.i32(step + stages - 1)
            raw = load_w(tiles, at + w_at)
            for j in L.unroll(PIECES):
                a = ()
                for i in L.unroll(mt):
                    here = at + a_at + 16 * i * X_ROW + (((2 * j + (t >> 1)) ^ a_mask) << 4)
                    u = L.lds_v2_b32(tiles, here)
                    v = L.lds_v2_b32(tiles, here + 8 * X_ROW)
                    a = a + (u[0], v[0], u[1], v[1])
                b = ()
                for i in L.unroll(nt):
                    b = b + L.e4m3x4_bf16x2(raw[4 * i + j])
                bring_x(L.offset(tiles, to), xb, my_x, m - row0, 2 * k, ahead * X_ROW, j)
                bring_w(L.offset(tiles, to + bm * X_ROW), wb, my_w, n - col0, k, ahead * W_ROW, j)
                part = multiply(part, a, b)
            L.cp_async_commit()
            at = after(at)
            to = after(to)
            if step & 1 or step == steps - 1:
                acc = scaled_add(acc, part, load_scale(scales, grid + (step >> 1) * across))
                part = L.zeros(count)
        store(y, acc, row0 + wm + (lane >> 2), col0 + wn + 2 * t, m, n, n, L.f32(1))

    return kernel
