"""y = x·Wᵀ on warpgroups (wgmma), repacked NVFP4 weights rounded to E4M3, activations E4M3, tiles brought by TMA.

The product is computed transposed, as in `wgmma_nvfp4`: W is operand A, made E4M3 in registers while other products of
the warpgroup run; x is operand B. Between two stages a warpgroup adds the sums of the first; the other one multiplies
meanwhile.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import axpy
from atlas_lab.kernels.gemm.wgmma_lanes import ROUNDED_LIFT, rounded_weights, scales_in_lanes_order
from atlas_lab.kernels.gemm.wgmma_nvfp4 import alpha_of, bring_units, stage_bytes
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT


@L.family
def wgmma_nvfp4_fp8(bm: int, bn: int, stages: int, blocks: int = 1, cluster: int = 1, raster: int = 16):
    """x E4M3 `[m, k]` in the lanes' order (`quantize_fp8_rows`) as a map of boxes `[bm / cluster, 128]` swizzled by 128
    bytes, and its scales F32 `[m]`; W as `repacked_nvfp4` makes it, as a map of U8 `[ceil(n/16), 9·k/128, 128]` of
    boxes `[bn / 16, 9, 128]`; its F32 tensor scale, which divides where `divides` is not 0; y BF16 `[m, n]` row-major;
    any m and n, k a multiple of 128.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs, of neighbours in a row by the blocks of a cluster, which
    share their loads of x; `blocks` of them on an SM. An eighth of a code times its block scale is rounded to E4M3, to
    nearest even; sums run over 128 of K in the matrix unit, 32 at a time; each is added in FP32; x's scales, then the
    tensor scale, multiply what comes out.
    """
    consumers = bn // GROUP_ROWS
    w_at = bm * ROW
    stage = stage_bytes(bm, bn, ROW)
    out_at = stages * stage
    expected = w_at + bn // 16 * UNIT
    of_stages = ring(stages, expected, out_at + turn_bytes(bn), bm, cluster, consumers, apart=stage)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, wait, count = L.wgmma(L.e4m3, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    add = axpy(count)
    store = transposed_storer(bm, out_at, lift=ROUNDED_LIFT, by_row=True)
    parts_of = meeting(warps_of(bn), count, cluster)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_x(s, x, row0, step):
        of_stages.rows(s * stage, x, row0, step * SPAN, s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_units(of_stages, stage, w_at), bring_x)

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.e4m3],
        x_scales: L.In[L.f32],
        w: L.InMap[L.u8],
        tensor_scale: L.In[L.f32],
        y: L.Out[L.bf16],
        parts: L.InOut[L.f32],
        flags: L.InOut[L.u32],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        cut: L.i32,
        divides: L.i32,
    ):
        of_stages.begin()
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, x, m, n, k, cut)
        else:
            multiplying(m)
            tiles = L.dynamic_shared(L.u8, 0)
            warp = L.warp_id()
            mine = L.i32(w_at + UNIT * warp)
            alpha = alpha_of(tensor_scale, divides)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc, part = L.zeros(count), L.zeros(count)
                of_stages.take(s, phase)
                scales = scales_in_lanes_order(tiles, L.i32(s * stage + mine))
                a = rounded_weights(tiles, L.i32(s * stage + mine), 0, scales)
                for step in range(begin, end):
                    of_x = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    part = wait(part, 0)
                    acc = add(acc, part, L.f32(1))
                    L.wgmma_fence()
                    part = multiply(part, a[0], of_x, 0)
                    part = multiply(part, a[1], L.descriptor_advance(of_x, 32), 1)
                    L.wgmma_commit()
                    if step > begin:
                        of_stages.release(of_stages.before(s))
                    # two sets of registers: one is made while the products that read the other run
                    b = rounded_weights(tiles, L.i32(s * stage + mine), 1, scales)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    L.wgmma_fence()
                    part = multiply(part, b[0], L.descriptor_advance(of_x, 64), 1)
                    part = multiply(part, b[1], L.descriptor_advance(of_x, 96), 1)
                    L.wgmma_commit()
                    part = wait(part, 1)
                    s, phase = of_stages.after(s, phase)
                    if step + 1 < end:  # made here, it is made before the wait
                        of_stages.take(s, phase)
                        scales = scales_in_lanes_order(tiles, L.i32(s * stage + mine))
                        a = rounded_weights(tiles, L.i32(s * stage + mine), 0, scales)
                part = wait(part, 0)
                of_stages.release(of_stages.before(s))
                acc = add(acc, part, L.f32(1))
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    store(y, acc, warp, row0, L.i32(col0 + 16 * warp), m, n, n, n, (alpha, alpha, x_scales))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
