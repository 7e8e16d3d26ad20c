"""y = x·Wᵀ on block-scaled tensor cores (mma.sync m16n8k64), NVFP4 weights as stored and NVFP4 activations (W4A4).

Rows of a stage are 64 bytes of codes, which ldmatrix brings as it brings 16-bit operands: 16 bytes are 32 of K. A lane
reads the scales of its rows as words of four, one for 16 of K each.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import PIECES, PLAIN, W_SWIZZLE, block_of, copier, following, storer
from atlas_lab.kernels.lang import cuda

BK = 128  # K of one stage
ROW, S_ROW = BK // 2, BK // 16  # bytes of a row of a stage: codes and scales


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage."""
    return (bm + bn) * (ROW + S_ROW)


@functools.cache
def scales_of(tiles: int, step: int):
    """A device function `(shared, at)`: words of scales of `tiles` rows, `step` rows apart."""

    @L.device
    def run(shared, at):
        out = ()
        for i in L.unroll(tiles):
            out = out + (L.lds_b32(shared, at + i * step * S_ROW),)
        return out

    return run


@L.family
def gemm_nvfp4_w4a4(
    bm: int,
    bn: int,
    warps_m: int,
    warps_n: int,
    stages: int = 3,
    pairs: bool = True,
    blocks: int = 1,
    raster: int = 32,
):
    """x as codes U8 `[m, k/2]` and scales E4M3 `[m, k/16]`, W as codes U8 `[n, k/2]` and scales E4M3 `[n, k/16]`, an
    F32 tensor scale, which divides where `divides` is not 0, y BF16 `[m, n]`; k a multiple of 64, any m, n (even with
    `pairs`).

    Products with both scales are exact; sums run in ascending K, 64 at a time, in FP32; the tensor scale multiplies
    the sums.
    """
    threads = 32 * warps_m * warps_n
    mt, nt = bm // warps_m // 16, bn // warps_n // 8
    w_base = bm * ROW
    x_scales = w_base + bn * ROW
    w_scales = x_scales + bm * S_ROW
    stage = stage_bytes(bm, bn)
    begin_x, bring_x = copier(bm, ROW, threads, 16, W_SWIZZLE[ROW])
    begin_w, bring_w = copier(bn, ROW, threads, 16, W_SWIZZLE[ROW])
    begin_xs, bring_xs = copier(bm, S_ROW, threads, 4, PLAIN)
    begin_ws, bring_ws = copier(bn, S_ROW, threads, 4, PLAIN)
    load_x, load_w = L.ldmatrix_tile(mt, 16 * ROW), L.ldmatrix_tile(nt // 2, 16 * ROW)
    scales_of_x, scales_of_w = scales_of(mt, 16), scales_of(nt, 8)
    multiply = L.mma_nvfp4_tile(mt, nt)
    after = following(stage, stages)
    store = storer(mt, nt, pairs)
    count = 4 * mt * nt

    @L.kernel(launch_bounds=(threads, blocks))
    def kernel(
        x: L.In[L.u8],
        x_scale: L.In[L.e4m3],
        w: L.In[L.u8],
        w_scale: L.In[L.e4m3],
        tensor_scale: L.In[L.f32],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        divides: L.i32,
    ):
        row0, col0 = block_of(m, n, bm, bn, raster)
        tiles = L.dynamic_shared(L.u8, 0)
        xs, ws = L.cast(x_scale, L.u8), L.cast(w_scale, L.u8)
        my_x, my_w = begin_x(row0, k >> 1), begin_w(col0, k >> 1)
        my_xs, my_ws = begin_xs(row0, k >> 4), begin_ws(col0, k >> 4)
        steps = L.i32((k + BK - 1) // BK)
        for s in L.unroll(stages - 1):
            if s < steps:
                for piece in L.unroll(PIECES):
                    bring_x(L.offset(tiles, s * stage), x, my_x, m - row0, k >> 1, s * ROW, piece)
                    bring_w(L.offset(tiles, s * stage + w_base), w, my_w, n - col0, k >> 1, s * ROW, piece)
                    bring_xs(L.offset(tiles, s * stage + x_scales), xs, my_xs, m - row0, k >> 4, s * S_ROW, piece)
                    bring_ws(L.offset(tiles, s * stage + w_scales), ws, my_ws, n - col0, k >> 4, s * S_ROW, piece)
            L.cp_async_commit()
        lane = L.lane_id()
        warp = L.warp_id()
        g, t = lane >> 2, lane & 3
        wm = L.i32(warp // warps_n) * (bm // warps_m)
        wn = L.i32(warp % warps_n) * (bn // warps_n)
        x_row = wm + (lane & 15)
        x_at = L.i32(x_row * ROW + (((lane >> 4) ^ ((x_row >> 1) & 3)) << 4))
        w_row = wn + (lane & 7) + ((lane >> 4) << 3)
        w_at = L.i32(w_row * ROW + ((((lane >> 3) & 1) ^ ((w_row >> 1) & 3)) << 4))
        xs_at = x_scales + (wm + g + ((t & 1) << 3)) * S_ROW
        ws_at = w_scales + (wn + g) * S_ROW
        acc = L.zeros(count)
        at = L.i32(0)
        to = L.i32((stages - 1) * stage)
        for step in range(steps):
            L.cp_async_wait(stages - 2)
            cuda.syncthreads()
            ahead = L.i32(step + stages - 1)
            for half in L.unroll(2):
                a = load_x(tiles, at + (x_at ^ (32 * half)))
                b = load_w(tiles, at + w_base + (w_at ^ (32 * half)))
                a_scales = scales_of_x(tiles, at + xs_at + 4 * half)
                b_scales = scales_of_w(tiles, at + ws_at + 4 * half)
                for i in L.unroll(2):
                    piece = 2 * half + i
                    bring_x(L.offset(tiles, to), x, my_x, m - row0, k >> 1, ahead * ROW, piece)
                    bring_w(L.offset(tiles, to + w_base), w, my_w, n - col0, k >> 1, ahead * ROW, piece)
                    bring_xs(L.offset(tiles, to + x_scales), xs, my_xs, m - row0, k >> 4, ahead * S_ROW, piece)
                    bring_ws(L.offset(tiles, to + w_scales), ws, my_ws, n - col0, k >> 4, ahead * S_ROW, piece)
                acc = multiply(acc, a, b, a_scales, b_scales)
            L.cp_async_commit()
            at = after(at)
            to = after(to)
        alpha = L.ldg_f32(tensor_scale, 0)
        if divides:
            alpha = L.div_rn(L.f32(1), alpha)
        store(y, acc, row0 + wm + g, col0 + wn + 2 * t, m, n, n, alpha)

    return kernel
