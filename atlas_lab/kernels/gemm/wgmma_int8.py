"""y = x·Wᵀ on warpgroups (wgmma), int8 weights and activations (W8A8), both under a scale for 32 of K of a row, tiles
brought by TMA.

A product is 32 of K and has scales of its own, so that each sum of integers is made a float, scaled and added by a
thread: three instructions for 32 multiply-adds, which take longer than the product. Two sets of sums: one is
scaled while the other is made.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_int8_scale import (
    COLUMNS,
    COUNT,
    GROUP,
    GROUPS,
    HELD,
    block_of,
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
def wgmma_int8(bm: int, bn: int, stages: int, sub: bool = False, raster: int = 16):
    """x I8 `[m, k]` and W I8 `[n, k]` as maps of boxes `[bm, 128]` and `[bn, 128]` swizzled by 128 bytes; scales of x
    F32 `[k/32, m]` as a map of boxes `[4, bm]`, of W F32 `[n, k/32]` as one of boxes `[bn, 4]`; y BF16 `[m, n]`
    row-major; any m and n, k a multiple of 128.

    Each warpgroup has 64 columns and all rows of a tile, so that W's scales, which every lane loads, serve them all:
    bm and bn are multiples of 64. Sums over 32 of K are exact; each, times the product of both scales, is added in FP32
    in ascending K; with `sub` to a sum of its own 128 of K, which then joins the sum of all. Raises ValueError for
    `sub` in tiles of more than 64 rows, whose sums registers do not hold.
    """
    if sub and bm != GROUP_ROWS:
        raise ValueError(f"wgmma_int8: found {bm} rows of x with sums of their own for a stage, expected {GROUP_ROWS}")
    blocks, consumers = bm // GROUP_ROWS, bn // COLUMNS
    items, total = GROUPS * blocks, COUNT * blocks
    w_at = bm * ROW
    scales_at = (bm + bn) * ROW
    stage = (bm + bn) * (ROW + BESIDE)
    out_at = stages * stage
    bars_at = out_at + 4 * consumers * WARP_BYTES
    of_stages = ring(stages, stage, bars_at, bm, 1, consumers)
    of_tiles = walk(bm, bn, raster, 1)
    multiply, wait = L.wgmma(L.i8, COLUMNS), L.wgmma_wait(COUNT, L.i32)
    add, begin, join = scaled_sums(blocks), scaled_sums(1, fresh=True), joined(COUNT)
    take_block = block_of(blocks)
    store = row_storer(COLUMNS, out_at)
    parts_of = meeting(warps_of(bn), total, 1)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_w(s, maps, col0, step):
        w, w_scales = maps
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + w_at, w, (col0, step * BK), full, s)
        L.tma_load_2d(tiles, s * stage + scales_at + bm * BESIDE, w_scales, (col0, step * GROUPS), full, s)

    @L.device
    def bring_x(s, maps, row0, step):
        x, x_scales = maps
        of_stages.rows(s * stage, x, row0, step * BK, s)
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + scales_at, x_scales, (step * GROUPS, row0), full, s)

    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.device
    def product(sums, operands, g, r):
        """Begins that of group g of a stage and block r of rows."""
        a, b = operands
        L.wgmma_fence()
        a = L.descriptor_advance(a, GROUP * g + GROUP_BYTES * r)
        sums = multiply(sums, a, L.descriptor_advance(b, GROUP * g), 0)
        L.wgmma_commit()
        return sums

    @L.device
    def operands_of(s, group):
        tiles = L.dynamic_shared(L.u8, 0)
        a = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
        return a, L.matrix_descriptor(tiles, s * stage + w_at + group * (COLUMNS * ROW), 128, 16, 1024)

    @L.device
    def row_scales(at, g, r):
        """x's scales of a thread's two rows of a block."""
        scales = L.dynamic_shared(L.f32, scales_at)
        at = at + g * bm + r * GROUP_ROWS
        return L.lds_f32(scales, at), L.lds_f32(scales, at + 8)

    @L.device
    def by_group(acc, s, group, mine, own):
        """The accumulators with a stage added to them: a group of K in all blocks of rows, then the next."""
        operands, scales = operands_of(s, group), L.dynamic_shared(L.f32, scales_at)
        at = L.i32(s * (stage // 4))
        p, q = L.zeros_i32(COUNT), L.zeros_i32(COUNT)
        p = product(p, operands, 0, 0)
        q = product(q, operands, 1 // blocks, 1 % blocks)
        columns = column_scales(scales, at + own)
        for i in L.unroll(items):
            if i % (HELD * blocks) == 0 and i > 0:
                columns = column_scales(scales, at + own + i // blocks)
            rows = row_scales(at + mine, i // blocks, i % blocks)
            if i % 2 == 0:
                p = wait(p, 1)
                acc = add(acc, p, rows, columns, i % blocks, i // blocks % HELD)
                if i + 2 < items:
                    p = product(p, operands, (i + 2) // blocks, (i + 2) % blocks)
            else:
                q = wait(q, 1 if i + 1 < items else 0)
                acc = add(acc, q, rows, columns, i % blocks, i // blocks % HELD)
                if i + 2 < items:
                    q = product(q, operands, (i + 2) // blocks, (i + 2) % blocks)
        return acc

    @L.device
    def in_parts(acc, s, group, mine, own):
        """The same for one block of rows, with the stage's sum."""
        operands, scales = operands_of(s, group), L.dynamic_shared(L.f32, scales_at)
        at = L.i32(s * (stage // 4))
        p, q, part = L.zeros_i32(COUNT), L.zeros_i32(COUNT), L.zeros(COUNT)
        p = product(p, operands, 0, 0)
        q = product(q, operands, 1, 0)
        columns = column_scales(scales, at + own)
        rows = row_scales(at + mine, 0, 0)
        p = wait(p, 1)
        part = begin(part, p, rows, columns, 0, 0)
        p = product(p, operands, 2, 0)
        rows = row_scales(at + mine, 1, 0)
        q = wait(q, 1)
        part = add(part, q, rows, columns, 0, 1)
        q = product(q, operands, 3, 0)
        columns = column_scales(scales, at + own + HELD)
        rows = row_scales(at + mine, 2, 0)
        p = wait(p, 1)
        part = add(part, p, rows, columns, 0, 0)
        rows = row_scales(at + mine, 3, 0)
        q = wait(q, 0)
        part = add(part, q, rows, columns, 0, 1)
        return join(acc, part)

    add_stage = in_parts if sub else by_group

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
        of_stages.begin()
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load((w, w_scales), (x, x_scales), m, n, k, cut)
        else:
            multiplying(m)
            warp = L.i32(L.warp_id())
            lane = L.i32(L.lane_id())
            mine = L.i32(16 * (warp & 3) + (lane >> 2))  # its first row of 64, and 8 further
            own = L.i32(bm * GROUPS + (COLUMNS * group + 2 * (lane & 3)) * GROUPS)  # W's scales of its first column
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc = L.zeros(total)
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
                    for r in L.unroll(blocks):
                        store(y, take_block(acc, r), warp, L.i32(row + GROUP_ROWS * r), col, m, n, n, n)
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
