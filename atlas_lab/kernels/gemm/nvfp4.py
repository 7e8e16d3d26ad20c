"""y = x·Wᵀ on tensor cores (mma.sync), NVFP4 weights as checkpoints store them (W4A16).

K is permuted inside 32: lane 4g + t of a warp owns K 8t to 8t + 7, which are one register of codes as ldmatrix
brings them and 16 bytes of x; two products of 16 K use them. A code times its block scale has six significant bits
at most, so that the BF16 weights are exact; the tensor scale is applied to the sums.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import BK, PIECES, PLAIN, W_SWIZZLE, X_QUADS, block_of, copier, following, storer
from atlas_lab.kernels.lang import cuda

X_ROW, W_ROW, S_ROW = 2 * BK, BK // 2, BK // 16  # bytes of a row of a stage


@L.family
def gemm_nvfp4(
    bm: int,
    bn: int,
    warps_m: int,
    warps_n: int,
    stages: int = 3,
    w_vector: int = 16,
    s_vector: int = 4,
    pairs: bool = True,
    reciprocal: bool = False,
    blocks: int = 1,
    raster: int = 32,
):
    """x BF16 `[m, k]`, codes U8 `[n, k/2]`, block scales E4M3 `[n, k/16]`, one F32 tensor scale, y BF16 `[m, n]`; k a
    multiple of 16, any m, n; `w_vector` and `s_vector` are bytes that divide a row of codes and of scales.

    `reciprocal` says that the tensor scale divides (compressed-tensors) and does not multiply (ModelOpt). Sums run in
    ascending K, 16 at a time, in FP32.
    """
    threads = 32 * warps_m * warps_n
    mt, nt = bm // warps_m // 16, bn // warps_n // 8
    w_base = bm * X_ROW
    s_base = w_base + bn * W_ROW
    stage = s_base + bn * S_ROW
    begin_x, bring_x = copier(bm, X_ROW, threads, 16, X_QUADS)
    begin_w, bring_w = copier(bn, W_ROW, threads, w_vector, W_SWIZZLE[W_ROW])
    begin_s, bring_s = copier(bn, S_ROW, threads, s_vector, PLAIN)
    load_w = L.ldmatrix_tile(nt // 2, 16 * W_ROW)
    multiply = L.mma_tile(L.bf16, mt, nt)
    after = following(stage, stages)
    store = storer(mt, nt, pairs)
    count = 4 * mt * nt

    @L.kernel(launch_bounds=(threads, blocks))
    def kernel(
        x: L.In[L.bf16],
        w: L.In[L.u8],
        scales: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
    ):
        row0, col0 = block_of(m, n, bm, bn, raster)
        tiles = L.dynamic_shared(L.u8, 0)
        xb = L.cast(x, L.u8)
        sb = L.cast(scales, L.u8)
        my_x = begin_x(row0, 2 * k)
        my_w = begin_w(col0, k >> 1)
        my_s = begin_s(col0, k >> 4)
        steps = L.i32((k + BK - 1) // BK)
        for s in L.unroll(stages - 1):
            if s < steps:
                for piece in L.unroll(PIECES):
                    bring_x(L.offset(tiles, s * stage), xb, my_x, m - row0, 2 * k, s * X_ROW, piece)
                    bring_w(L.offset(tiles, s * stage + w_base), w, my_w, n - col0, k >> 1, s * W_ROW, piece)
                    bring_s(L.offset(tiles, s * stage + s_base), sb, my_s, n - col0, k >> 4, s * S_ROW, piece)
            L.cp_async_commit()
        lane = L.lane_id()
        warp = L.warp_id()
        t = lane & 3
        wm = L.i32(warp // warps_n) * (bm // warps_m)
        wn = L.i32(warp % warps_n) * (bn // warps_n)
        a_row = wm + (lane >> 2)
        a_at = a_row * X_ROW
        a_mask = (a_row & 1) << 2
        w_row = wn + (lane & 7) + ((lane >> 4) << 3)
        w_at = w_base + w_row * W_ROW + ((((lane >> 3) & 1) ^ ((w_row >> 2) & 1)) << 4)
        s_at = s_base + (wn + (lane >> 2)) * S_ROW
        pick = 0x1010 + (t >> 1) * 0x2222
        acc = L.zeros(count)
        at = L.i32(0)
        to = L.i32((stages - 1) * stage)
        for step in range(steps):
            L.cp_async_wait(stages - 2)
            cuda.syncthreads()
            ahead = L.i32(step + stages - 1)
            raw = load_w(tiles, at + w_at)
            group = ()
            for i in L.unroll(nt):
                group = group + L.e4m3x4_bf16x2(L.lds_b32(tiles, at + s_at + 8 * i * S_ROW))
            for j in L.unroll(2):
                a0 = ()
                a1 = ()
                for i in L.unroll(mt):
                    here = at + a_at + 16 * i * X_ROW + (((4 * j + t) ^ a_mask) << 4)
                    u = L.lds_v4_b32(tiles, here)
                    v = L.lds_v4_b32(tiles, here + 8 * X_ROW)
                    a0 = a0 + (u[0], v[0], u[1], v[1])
                    a1 = a1 + (u[2], v[2], u[3], v[3])
                b0 = ()
                b1 = ()
                for i in L.unroll(nt):
                    g = L.prmt(group[2 * i + j], 0, pick)
                    q = L.e2m1x8_bf16x2(raw[2 * i + j])
                    b0 = b0 + (L.bmul2(q[0], g), L.bmul2(q[1], g))
                    b1 = b1 + (L.bmul2(q[2], g), L.bmul2(q[3], g))
                for half in L.unroll(2):
                    piece = 2 * j + half
                    bring_x(L.offset(tiles, to), xb, my_x, m - row0, 2 * k, ahead * X_ROW, piece)
                    bring_w(L.offset(tiles, to + w_base), w, my_w, n - col0, k >> 1, ahead * W_ROW, piece)
                    bring_s(L.offset(tiles, to + s_base), sb, my_s, n - col0, k >> 4, ahead * S_ROW, piece)
                acc = multiply(acc, a0, b0)
                acc = multiply(acc, a1, b1)
            L.cp_async_commit()
            at = after(at)
            to = after(to)
        alpha = L.ldg_f32(tensor_scale, 0)
        if reciprocal:
            alpha = L.div_rn(L.f32(1), alpha)
        store(y, acc, row0 + wm + (lane >> 2), col0 + wn + 2 * t, m, n, n, alpha)

    return kernel
