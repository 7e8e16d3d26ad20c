"""y = x·Wᵀ on tensor cores (mma.sync), BF16 weights, tiles brought by cp.async."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import BK, PIECES, W_SWIZZLE, X_LDMATRIX, block_of, copier, following, storer
from atlas_lab.kernels.lang import cuda

ROW = 2 * BK  # bytes of a row of a stage


@L.family
def gemm_bf16(
    bm: int,
    bn: int,
    warps_m: int,
    warps_n: int,
    stages: int = 3,
    x_vector: int = 16,
    w_vector: int = 16,
    pairs: bool = True,
    blocks: int = 1,
    raster: int = 32,
):
    """x BF16 `[m, k]`, W BF16 `[n, k]`, y BF16 `[m, n]`, all row-major; any m, n, k that `x_vector`, `w_vector`
    (bytes that divide a row) and `pairs` (n even) allow.

    Tiles of bm x bn outputs, `stages` of 64 K in flight; sums run in ascending K, 16 at a time, in FP32.
    """
    threads = 32 * warps_m * warps_n
    mt, nt = bm // warps_m // 16, bn // warps_n // 8
    stage = (bm + bn) * ROW
    begin_x, bring_x = copier(bm, ROW, threads, x_vector, X_LDMATRIX)
    begin_w, bring_w = copier(bn, ROW, threads, w_vector, W_SWIZZLE[ROW])
    load_a = L.ldmatrix_tile(mt, 16 * ROW)
    load_b = L.ldmatrix_tile(nt // 2, 16 * ROW)
    multiply = L.mma_tile(L.bf16, mt, nt)
    after = following(stage, stages)
    store = storer(mt, nt, pairs)
    count = 4 * mt * nt

    @L.kernel(launch_bounds=(threads, blocks))
    def kernel(x: L.In[L.bf16], w: L.In[L.bf16], y: L.Out[L.bf16], m: L.i32, n: L.i32, k: L.i32):
        row0, col0 = block_of(m, n, bm, bn, raster)
        tiles = L.dynamic_shared(L.u8, 0)
        xb = L.cast(x, L.u8)
        wb = L.cast(w, L.u8)
        pitch = 2 * k
        my_x = begin_x(row0, pitch)
        my_w = begin_w(col0, pitch)
        steps = L.i32((k + BK - 1) // BK)
        for s in L.unroll(stages - 1):
            if s < steps:
                for piece in L.unroll(PIECES):
                    bring_x(L.offset(tiles, s * stage), xb, my_x, m - row0, pitch, s * ROW, piece)
                    bring_w(L.offset(tiles, s * stage + bm * ROW), wb, my_w, n - col0, pitch, s * ROW, piece)
            L.cp_async_commit()
        lane = L.lane_id()
        warp = L.warp_id()
        wm = L.i32(warp // warps_n) * (bm // warps_m)
        wn = L.i32(warp % warps_n) * (bn // warps_n)
        a_row = wm + (lane & 15)
        a_at = a_row * ROW
        a_chunk = lane >> 4
        b_row = wn + (lane & 7) + ((lane >> 4) << 3)
        b_at = bm * ROW + b_row * ROW
        b_chunk = (lane >> 3) & 1
        acc = L.zeros(count)
        at = L.i32(0)
        to = L.i32((stages - 1) * stage)
        for t in range(steps):
            L.cp_async_wait(stages - 2)
            cuda.syncthreads()
            ahead = L.i32(t + stages - 1)
            for j in L.unroll(PIECES):
                a = load_a(tiles, at + a_at + (((2 * j + a_chunk) ^ (a_row & 7)) << 4))
                b = load_b(tiles, at + b_at + (((2 * j + b_chunk) ^ (b_row & 7)) << 4))
                bring_x(L.offset(tiles, to), xb, my_x, m - row0, pitch, ahead * ROW, j)
                bring_w(L.offset(tiles, to + bm * ROW), wb, my_w, n - col0, pitch, ahead * ROW, j)
                acc = multiply(acc, a, b)
            L.cp_async_commit()
            at = after(at)
            to = after(to)
        store(y, acc, row0 + wm + (lane >> 2), col0 + wn + 2 * (lane & 3), m, n, n, L.f32(1))

    return kernel
