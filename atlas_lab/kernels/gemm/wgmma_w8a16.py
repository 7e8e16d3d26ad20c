"""y = x·Wᵀ on warpgroups (wgmma), E4M3 weights as stored and BF16 activations (W8A16), tiles brought by TMA.

The product is computed transposed, as in `wgmma_nvfp4`: W is operand A, made BF16 in registers while other products of
the warpgroup run; x is operand B. Between two stages a warpgroup scales and adds the sums of the first; the other one
multiplies meanwhile.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import axpy
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, fetch_maps, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_scales import begun, moved, scale, scale_at
from atlas_lab.kernels.gemm.wgmma_transposed import HALVES, bring_halves, transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk

BK = ROW  # K of one stage: a column of W's grid of scales
RUN = BK // 4  # of which a lane owns


@L.device
def first_byte(warp, lane):
    """Where in a tile of W the 32 K of a lane in row g of its warp's 16 begin."""
    g = L.i32(lane >> 2)
    return L.i32((16 * warp + g) * ROW + 16 * (2 * (lane & 3) ^ g))


@L.device
def weights(tiles, at, half):
    """The four fragments (m64n*k16) of a half of the lane's 32 K of rows g and g + 8, which begin at byte `at`."""
    here = at ^ (16 * half)  # chunks of 16 bytes are exchanged by XOR with the row: no two of 8 lanes share a bank
    p, q = L.lds_v4_b32(tiles, here), L.lds_v4_b32(tiles, here + 8 * ROW)
    out = ()
    for j in L.unroll(4):
        a, b = L.e4m3x4_bf16x2(p[j]), L.e4m3x4_bf16x2(q[j])
        out = out + ((a[0], b[0], a[1], b[1]),)
    return out


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage: 128 of K of bm rows of x, in two tiles, and of bn rows of W."""
    return 2 * bm * ROW + bn * ROW


@L.family
def wgmma_w8a16(bm: int, bn: int, stages: int, blocks: int = 1, cluster: int = 1, raster: int = 16):
    """x BF16 `[m, k rounded up to 128]` in the lanes' order (`order_for_lanes(32)`) as a map of boxes `[bm / cluster,
    64]`, W E4M3 `[n, k]` as one of boxes `[bn, 128]`, both swizzled by 128 bytes; y BF16 `[m, n]` row-major; any m and
    n, k a multiple of 16.

    `scales` are the bytes of F32, or of BF16 where `narrow` is not 0: one for 128x128 of W, `down` and `across`
    elements apart (0: one for all), or one a row where `by_row` is not 0.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs, of neighbours in a row by the blocks of a cluster, which
    share their loads of x; `blocks` of them on an SM. Weights are exact in BF16; sums run over 128 of K in the matrix
    unit, 16 at a time; each, times its scale, is added in FP32; scales of rows multiply what comes out.
    """
    consumers = bn // GROUP_ROWS
    w_at = 2 * bm * ROW
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, stage, out_at + turn_bytes(bn), bm, cluster, consumers, tiles=HALVES)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, wait, count = L.wgmma(L.bf16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    add = axpy(count)
    store = transposed_storer(bm, out_at, lift=1.0)
    parts_of = meeting(warps_of(bn), count, cluster)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        L.tma_load_2d(L.dynamic_shared(L.u8, 0), s * stage + w_at, w, (col0, step * BK), of_stages.full(), s)

    bring_x = bring_halves(of_stages, bm, stage)
    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.bf16],
        w: L.InMap[L.e4m3],
        scales: L.In[L.u8],
        y: L.Out[L.bf16],
        parts: L.InOut[L.f32],
        flags: L.InOut[L.u32],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        cut: L.i32,
        down: L.i32,
        across: L.i32,
        by_row: L.i32,
        narrow: L.i32,
    ):
        fetch_maps(x, w)
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
            lane = L.lane_id()
            mine = L.i32(w_at + first_byte(warp, lane))
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                grid = L.i32((min(col0, L.i32(n - 1)) >> 7) * down)
                acc, part, factor = L.zeros(count), L.zeros(count), L.f32(0)
                held = (L.f32(1), L.f32(1))
                if by_row == 0:
                    held = begun(scales, grid, begin, end, across, narrow)
                of_stages.take(s, phase)
                a = weights(tiles, L.i32(s * stage + mine), 0)
                for step in range(begin, end):
                    at = L.i32(s * stage + mine)
                    x0 = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    x1 = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                    part = wait(part, 0)
                    acc = add(acc, part, factor)
                    L.wgmma_fence()
                    for j in L.unroll(4):
                        part = multiply(part, a[j], L.descriptor_advance(x0, 32 * j), L.i32(j > 0))
                    L.wgmma_commit()
                    if step > begin:
                        of_stages.release(of_stages.before(s))
                    if by_row == 0:
                        held = moved(held, scales, grid, step, begin, end, across, narrow)
                    # two sets of registers: one is made while the products that read the other run
                    b = weights(tiles, at, 1)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    L.wgmma_fence()
                    for j in L.unroll(4):
                        part = multiply(part, b[j], L.descriptor_advance(x1, 32 * j), 1)
                    L.wgmma_commit()
                    part = wait(part, 1)
                    factor = scale(held, step, begin)
                    s, phase = of_stages.after(s, phase)
                    if step + 1 < end:  # made here, it is made before the wait
                        of_stages.take(s, phase)
                        a = weights(tiles, L.i32(s * stage + mine), 0)
                part = wait(part, 0)
                of_stages.release(of_stages.before(s))
                acc = add(acc, part, factor)
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    upper, lower = L.f32(1), L.f32(1)
                    if by_row:
                        row = L.i32(col0 + 16 * warp + (lane >> 2))
                        upper = scale_at(scales, min(row, L.i32(n - 1)), narrow)
                        lower = scale_at(scales, min(L.i32(row + 8), L.i32(n - 1)), narrow)
                    store(y, acc, warp, row0, col0 + 16 * warp, m, n, n, n, (upper, lower))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
