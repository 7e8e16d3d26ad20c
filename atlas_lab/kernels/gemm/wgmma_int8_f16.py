"""y = x·Wᵀ on warpgroups (wgmma), int8 weights and activations (W8A8), both under a scale for 32 of K of a row, as
integers in F16.

Codes are exact in F16 and sums over 32 of K, below 2^19, in FP32, so that the matrix unit hands out floats: a sum takes
the product of both scales and a fused addition, where one of s8 products takes a conversion too.

The product is computed transposed, as in `wgmma_w8a16`: W is operand A, made in registers while products run. Row g of
a warp's 16 is row 2g of W, row g + 8 row 2g + 1: what half a warp loads of every other row lies in all banks. Two sets
of sums: one is scaled while the other is multiplied, from a part's first stage to its last. What shared memory holds is
loaded an item before it is used, scales of x as soon as those in their place are used.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_int8_scale import GROUP, GROUPS, add_scaled, some_of
from atlas_lab.kernels.gemm.wgmma_nvfp4 import ATOM
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import HALVES, bring_halves, transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.columns import opaque

BK = ROW  # K of one stage
BESIDE = 4 * GROUPS  # bytes of a stage's scales for each row of x and of W
# a code with its sign's bit flipped, in the low bits of 1024 in F16, is 1024 + 128 + code
SIGNS, ABOVE, LESS = 0x80808080, 0x64646464, 0xE480E480


@L.device
def _codes(word, above):
    """Four codes: two F16 pairs."""
    flipped = L.u32(word ^ SIGNS)
    return L.hadd2(L.prmt(flipped, above, 0x4140), LESS), L.hadd2(L.prmt(flipped, above, 0x4342), LESS)


@L.device
def first_byte(lane):
    """Where among 16 rows of W the lane's 8 columns of 32 begin, of the first of its two rows."""
    g, t = L.i32(lane >> 2), L.i32(lane & 3)
    return L.i32(2 * ROW * g + 16 * (t >> 1 ^ 2 * (g & 3)) + 8 * (t & 1))


@L.device
def words(tiles, at, group):
    """The lane's 8 columns of 32 of K, number `group` of a stage, of two rows of W of 128 bytes, whose 16-byte chunks
    TMA exchanges by XOR with the row; in group 0 they begin at byte `at`."""
    here = at ^ (32 * group)
    return L.lds_v2_b32(tiles, here), L.lds_v2_b32(tiles, (here ^ 16) + ROW)


@L.device
def weights(held, above):
    """The two fragments (m64n*k16) of the columns that `words` returns."""
    p, q = held
    out = ()
    for j in L.unroll(2):
        a, b = _codes(p[j], above), _codes(q[j], above)
        out = out + ((a[0], b[0], a[1], b[1]),)
    return out


def filled(bm: int, bn: int) -> int:
    """Bytes that come to a stage: 128 of K of bm rows of x, in two tiles, and of bn rows of W, and their scales."""
    return 2 * bm * ROW + bn * ROW + (bm + bn) * BESIDE


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage."""
    return -(-filled(bm, bn) // ATOM) * ATOM


@L.family
def wgmma_int8_f16(bm: int, bn: int, stages: int, blocks: int = 1, raster: int = 16):
    """x as `quantize_int8_lanes` makes it: codes F16 `[m, k]` as a map of boxes `[bm, 64]` swizzled by 128 bytes,
    scales F32 `[k/32, m rounded up to 16]` as one of boxes `[4, bm]`. W I8 `[n, k]` as a map of boxes `[bn, 128]`
    swizzled by 128 bytes, its scales F32 `[n, k/32]` as one of boxes `[bn, 4]`; y BF16 `[m, n]` row-major; any m and n,
    k a multiple of 128.

    Tiles of bm (a multiple of 16) x bn outputs, of which a warpgroup has `blocks` times 64 rows of W, so that x's
    scales, which every lane loads, serve them all. Sums over 32 of K are exact; each, times the product of both scales,
    is added in FP32 in ascending K: the bits of `wgmma_int8`.
    """
    rows = bn // blocks
    consumers, items = rows // GROUP_ROWS, GROUPS * blocks
    w_at = 2 * bm * ROW
    w_scales_at = w_at + bn * ROW
    x_scales_at = w_scales_at + bn * BESIDE
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, filled(bm, bn), out_at + turn_bytes(rows), bm, 1, consumers, tiles=HALVES, apart=stage)
    of_tiles = walk(bm, bn, raster, 1)
    count, total = bm // 2, bm // 2 * blocks
    multiply, wait = L.wgmma(L.f16, bm, a_registers=True), L.wgmma_wait(count)
    add, add_load = add_scaled(bm, blocks), add_scaled(bm, blocks, loads=True)
    of_both, scales_of_both = some_of(total, total + bm // 4), some_of(bm // 4, total + bm // 4)
    store = transposed_storer(bm, out_at, lift=1.0, paired=True)
    block = some_of(count, total)
    parts_of = meeting(warps_of(rows), total, 1)
    bring_codes = bring_halves(of_stages, bm, stage)
    loading, multiplying = roles(rows)

    @L.device
    def bring_w(s, maps, col0, step):
        w, w_scales = maps
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + w_at, w, (col0, step * BK), full, s)
        L.tma_load_2d(tiles, s * stage + w_scales_at, w_scales, (col0, step * GROUPS), full, s)

    @L.device
    def bring_x(s, maps, row0, step, boxes):
        codes, scales = maps
        bring_codes(s, codes, row0, step, boxes)
        tiles, full = L.dynamic_shared(L.u8, 0), of_stages.full()
        L.tma_load_2d(tiles, s * stage + x_scales_at, scales, (step * GROUPS, row0), full, s)

    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.device
    def product(part, a, s, item):
        """Begins that of an item of a stage: a group of K of all blocks of W, then the next."""
        x = L.matrix_descriptor(L.dynamic_shared(L.u8, 0), s * stage, 128, 16, 1024)
        group = item // blocks
        here = L.descriptor_advance(x, group // 2 * (bm * ROW) + 2 * GROUP * (group % 2))
        L.wgmma_fence()
        part = multiply(part, a[0], here, 0)
        part = multiply(part, a[1], L.descriptor_advance(here, GROUP), 1)
        L.wgmma_commit()
        return part

    @L.device
    def w_factors(at, item):
        """W's scales of the lane's two rows of an item's block and group; `at`: those of its first row of a stage."""
        scales = L.dynamic_shared(L.f32, w_scales_at)
        at = at + item % blocks * (GROUP_ROWS * GROUPS) + item // blocks
        return L.lds_f32(scales, at), L.lds_f32(scales, at + GROUPS)

    @L.device
    def loaded(at, item):
        """What `words` returns of an item; `at`: the lane's first of a stage."""
        return words(L.dynamic_shared(L.u8, 0), at + item % blocks * (GROUP_ROWS * ROW), item // blocks)

    @L.kernel(launch_bounds=(threads_of(rows), 1))
    def kernel(
        x: L.InMap[L.f16],
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
            of_x = L.dynamic_shared(L.f32, x_scales_at)
            warp, lane = L.warp_id(), L.lane_id()
            above = opaque(ABOVE, k)
            mine = L.i32(GROUP_ROWS * blocks * group + 16 * (warp & 3))  # its first row of W
            of_w = L.i32(w_at + ROW * mine + first_byte(lane))
            scales_at = L.i32(GROUPS * (mine + 2 * (lane >> 2)))
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc, p, q = L.zeros(total), L.zeros(count), L.zeros(count)
                rows_x, factors = L.zeros(bm // 4), (L.f32(0), L.f32(0))
                of_stages.take(s, phase)
                first, second = loaded(L.i32(s * stage + of_w), 0), loaded(L.i32(s * stage + of_w), 1)
                for step in range(begin, end):
                    here, at, w_at_lane = s, L.i32(s * stage + of_w), L.i32((s * stage >> 2) + scales_at)
                    x_at = L.i32((s * stage >> 2) + 4 * (lane & 3))
                    held, coming = loaded(at, 2), w_factors(w_at_lane, 0)
                    q = wait(q, 0)
                    p = product(p, weights(first, above), here, 0)
                    both = add_load(acc, q, rows_x, factors, of_x, x_at, blocks - 1)
                    acc, rows_x, factors = of_both(both, 0), scales_of_both(both, total), coming
                    q = product(q, weights(second, above), here, 1)
                    for i in L.unroll(items - 1):
                        ahead, coming = held, w_factors(w_at_lane, i + 1)
                        if i + 3 < items:
                            ahead = loaded(at, i + 3)
                        elif step + 1 < end:
                            if i + 3 == items:
                                s, phase = of_stages.after(s, phase)
                                of_stages.take(s, phase)
                            ahead = loaded(L.i32(s * stage + of_w), i + 3 - items)
                        if i % 2 == 0:
                            part = p = wait(p, 1)
                        else:
                            part = q = wait(q, 1)
                        if (i + 1) % blocks:
                            acc = add(acc, part, rows_x, factors, i % blocks)
                        else:
                            next_x = x_at + (i + 1) // blocks * bm
                            both = add_load(acc, part, rows_x, factors, of_x, next_x, i % blocks)
                            acc, rows_x = of_both(both, 0), scales_of_both(both, total)
                        if i + 2 < items:
                            if i % 2 == 0:
                                p = product(p, weights(held, above), here, i + 2)
                            else:
                                q = product(q, weights(held, above), here, i + 2)
                        first, second = held, ahead
                        held, factors = ahead, coming
                    q = wait(q, 0)
                    L.cuda.syncwarp()  # all lanes have their scales
                    of_stages.release(here)
                acc = add(acc, q, rows_x, factors, blocks - 1)
                s, phase = of_stages.after(s, phase)
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    for b in L.unroll(blocks):
                        col = L.i32(col0 + mine + GROUP_ROWS * b)
                        store(y, block(acc, b * count), warp, row0, col, m, n, n, n, (L.f32(1), L.f32(1)))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
