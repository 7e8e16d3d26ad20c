"""y = x·Wᵀ on tensor cores (mma.sync), NVFP4 weights as checkpoints store them (W4A16).

K is permuted inside 32: lane 4g + t of a warp owns K 8t to 8t + 7, which are one register of codes as ldmatrix
brings them and 16 bytes of x; two products of 16 K use them. A code times its block scale has six significant bits
at most, so that the BF16 weights are exact; the tensor scale is applied to the sums.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import BK, PLAIN, W_SWIZZLE, X_QUADS, block_of, copier, storer
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
    copy_x = copier(bm, X_ROW, threads, 16, X_QUADS)
    copy_w = copier(bn, W_ROW, threads, w_vector, W_SWIZZLE[W_ROW])
    copy_s = copier(bn, S_ROW, threads, s_vector, PLAIN)
    load_w = L.ldmatrix_tile(nt // 2, 16 * W_ROW)
    multiply = L.mma_tile(L.bf16, mt, nt)
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
        steps = L.i32((k + BK - 1) // BK)
        for s in L.unroll(stages - 1):
            if s < steps:
                copy_x(L.offset(tiles, s * stage), xb, row0, m, 2 * k, s * X_ROW)
                copy_w(L.offset(tiles, s * stage + w_base), w, col0, n, k >> 1, s * W_ROW)
                copy_s(L.offset(tiles, s * stage + s_base), sb, col0, n, k >> 4, s * S_ROW)
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
        for step in range(steps):
            L.cp_async_wait(stages - 2)
            cuda.syncthreads()
            ahead = L.i32(step) + stages - 1
            if ahead < steps:
                to = L.i32(ahead % stages) * stage
                copy_x(L.offset(tiles, to), xb, row0, m, 2 * k, ahead * X_ROW)
                copy_w(L.offset(tiles, to + w_base), w, col0, n, k >> 1, ahead * W_ROW)
                copy_s(L.offset(tiles, to + s_base), sb, col0, n, k >> 4, ahead * S_ROW)
            L.cp_async_commit()
            at = L.i32(step % stages) * stage
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
                acc = multiply(acc, a0, b0)
                acc = multiply(acc, a1, b1)
        alpha = L.ldg_f32(tensor_scale, 0)
        if reciprocal:
            alpha = L.div_rn(L.f32(1), alpha)
        store(y, acc, row0 + wm + (lane >> 2), col0 + wn + 2 * t, m, n, alpha)

    return kernel
