"""y = x·Wᵀ on warpgroups (wgmma), int8 weights and activations (W8A8), both under a scale for 32 of K of a row, tiles
brought by TMA.

A product is 32 of K and has scales of its own, so that each sum of integers is made a float, scaled and added by a
thread: three instructions for 32 multiply-adds, which take longer than the product. Two sets of sums: one is scaled
while the other is made. For few rows of x, which wait for W.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_int8_scale import (
    COLUMNS,
    COUNT,
    GROUP,
    GROUPS,
    HELD,
    column_scales,
    joined,
    scaled_sums,
)
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_BYTES, GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES, row_storer
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk

BK = ROW  # K of one stage
BESIDE = 4 * GROUPS  # bytes of a stage's scales for each row of x and of W


@L.family
def wgmma_int8(bn: int, stages: int, sub: bool = False, raster: int = 16):
    """x I8 `[m, k]` and W I8 `[n, k]` as maps of boxes `[64, 128]` and `[bn, 128]` swizzled by 128 bytes; scales of x
    F32 `[k/32, m]` as a map of boxes `[4, 64]`, of W F32 `[n, k/32]` as one of boxes `[bn, 4]`; y BF16 `[m, n]`
    row-major; any m and n, k a multiple of 128.

    Tiles of 64 x bn outputs, of which a warpgroup has 64 columns; bn is a multiple of 64. Sums over 32 of K are exact;
    each, times the product of both scales, is added in FP32 in ascending K; with `sub` to a sum of its own 128 of K,
    which then joins the sum of all.
    """
    consumers = bn // COLUMNS
    w_at = GROUP_BYTES
    scales_at = w_at + bn * ROW
    stage = (GROUP_ROWS + bn) * (ROW + BESIDE)
    out_at = stages * stage
    bars_at = out_at + 4 * consumers * WARP_BYTES
    of_stages = ring(stages, stage, bars_at, GROUP_ROWS, 1, consumers)
    of_tiles = walk(GROUP_ROWS, bn, raster, 1)
    multiply, wait = L.wgmma(L.i8, COLUMNS), L.wgmma_wait(COUNT, L.i32)
    add, begin, join = scaled_sums(), scaled_sums(fresh=True), joined(COUNT)
    store = row_storer(COLUMNS, out_at)
    parts_of = meeting(warps_of(bn), COUNT, 1)
    loading, multiplying = roles(bn)

    @L.device
    def bring_w(s, maps, col0, step):
        w, w_scales = maps
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + w_at, w, (col0, step * BK), full, s)
        L.tma_load_2d(tiles, s * stage + scales_at + GROUP_ROWS * BESIDE, w_scales, (col0, step * GROUPS), full, s)

    @L.device
    def bring_x(s, maps, row0, step, boxes):
        x, x_scales = maps
        of_stages.rows(s * stage, x, row0, step * BK, s, boxes)
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + scales_at, x_scales, (step * GROUPS, row0), full, s)

    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.device
    def product(sums, operands, g):
        """Begins that of group g of a stage."""
        a, b = operands
        L.wgmma_fence()
        sums = multiply(sums, L.descriptor_advance(a, GROUP * g), L.descriptor_advance(b, GROUP * g), 0)
        L.wgmma_commit()
        return sums

    @L.device
    def operands_of(s, group):
        tiles = L.dynamic_shared(L.u8, 0)
        a = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
        return a, L.matrix_descriptor(tiles, s * stage + w_at + group * (COLUMNS * ROW), 128, 16, 1024)

    @L.device
    def row_scales(at, g):
        """x's scales of a thread's two rows."""
        scales = L.dynamic_shared(L.f32, scales_at)
        at = at + g * GROUP_ROWS
        return L.lds_f32(scales, at), L.lds_f32(scales, at + 8)

    @L.device
    def add_stage(acc, s, group, mine, own):
        """The accumulators with a stage added to them, with `sub` by a sum of its own."""
        operands, scales = operands_of(s, group), L.dynamic_shared(L.f32, scales_at)
        at = L.i32(s * (stage // 4))
        p, q = L.zeros_i32(COUNT), L.zeros_i32(COUNT)
        part = L.zeros(COUNT) if sub else acc
        p = product(p, operands, 0)
        q = product(q, operands, 1)
        columns = column_scales(scales, at + own)
        for g in L.unroll(GROUPS):
            if g == HELD:
                columns = column_scales(scales, at + own + g)
            rows = row_scales(at + mine, g)
            if g % 2 == 0:
                p = wait(p, 1)
                part = (
                    begin(part, p, rows, columns, g % HELD) if sub and g == 0 else add(part, p, rows, columns, g % HELD)
                )
                if g + 2 < GROUPS:
                    p = product(p, operands, g + 2)
            else:
                q = wait(q, 1 if g + 1 < GROUPS else 0)
                part = add(part, q, rows, columns, g % HELD)
                if g + 2 < GROUPS:
                    q = product(q, operands, g + 2)
        return join(acc, part) if sub else part

    @L.kernel(launch_bounds=(threads_of(bn), 1))
    def kernel(
        x: L.InMap[L.i8],
        w: L.InMap[L.i8],
        x_scales: L.InMap[L.f32],
        w_scales: L.InMap[L.f32],
        y: L.Out[L.bf16],
        parts: L.InOut[L.f32],
        flags: L.InOut[L.u32],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        cut: L.i32,
    ):
        of_stages.begin(m)
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load((w, w_scales), (x, x_scales), m, n, k, cut)
        else:
            multiplying()
            warp = L.i32(L.warp_id())
            lane = L.i32(L.lane_id())
            mine = L.i32(16 * (warp & 3) + (lane >> 2))  # its first row of 64, and 8 further
            own = L.i32(
                GROUP_ROWS * GROUPS + (COLUMNS * group + 2 * (lane & 3)) * GROUPS
            )  # W's scales of its first column
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc = L.zeros(COUNT)
                for _ in range(begin, end):
                    of_stages.take(s, phase)
                    acc = add_stage(acc, s, group, mine, own)
                    L.cuda.syncwarp()  # all lanes have their scales
                    of_stages.release(s)
                    s, phase = of_stages.after(s, phase)
                row = L.i32(row0 + 16 * (warp & 3))
                col = L.i32(col0 + COLUMNS * group)
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    store(y, acc, warp, row, col, m, n, n, n)
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
