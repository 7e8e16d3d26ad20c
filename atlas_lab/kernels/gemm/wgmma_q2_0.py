"""y = x·Wᵀ on warpgroups (wgmma), Q2_0 weights in groups of 128 repacked as mma.sync takes them, x quantized to q8_1
(MMQ).

As `wgmma_q4_k`: codes less 1 and those of x are exact in F16, and so are their sums over 32 of K in FP32; each is added
times x's scale, those of a group times the weight's.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_nvfp4 import ATOM
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_q4_k import add_scaled
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import HALVES, bring_halves, transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.columns import opaque, scaled_rows
from atlas_lab.kernels.quantize.q8_1 import GROUP
from atlas_lab.kernels.quantize.repack_q2_0 import CODES, ROWS, SPAN

GROUPS = SPAN // GROUP
UNIT = CODES + 2 * ROWS  # bytes of 16 rows of W by 128 columns: codes, a scale a row
LINE = 32  # bytes of a row of W's map
LINES = UNIT // LINE  # rows of it that a unit is
# 1024 + code·4^p in F16 pairs becomes code - 1 by one exact multiply-add: 4^-p, and -(1024·4^-p + 1).
MAGIC = 0x64006400
SCALE = (0x3C003C00, 0x34003400, 0x2C002C00, 0x24002400)
SHIFT = (0xE401E401, 0xDC04DC04, 0xD410D410, 0xCC40CC40)


@L.device
def _codes(word, magic):
    """Eight codes less 1, of the low bits of both halves: four F16 pairs."""
    out = ()
    for p in L.unroll(4):
        out = out + (L.hfma2(L.u32(word & (0x00030003 << (2 * p)) | magic), SCALE[p], SHIFT[p]),)
    return out


@L.device
def weights(tiles, unit, group, magic):
    """The two fragments (m64n*k16) of 32 of K of the unit at byte `unit`: codes less 1. Of the 16 columns whose codes a
    lane holds in the lanes' order two lanes take 8 each."""
    lane = L.lane_id()
    t = lane & 3
    q = L.lds_v2_b32(tiles, unit + 16 * (lane - t + 2 * (group % 2) + (t >> 1)) + 8 * (group // 2))
    down = L.u32(8 * (t & 1))
    a, b = _codes(L.u32(q[0] >> down), magic), _codes(L.u32(q[1] >> down), magic)
    return (a[0], b[0], a[1], b[1]), (a[2], b[2], a[3], b[3])


def filled(bm: int, bn: int) -> int:
    """Bytes that come to a stage: 128 of K of bm rows of x, in two tiles, and of bn rows of W, and x's scales."""
    return 2 * bm * ROW + bn // 16 * UNIT + 4 * GROUPS * bm


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage."""
    return -(-filled(bm, bn) // ATOM) * ATOM


@L.family
def wgmma_q2_0(bm: int, bn: int, stages: int, blocks: int = 1, raster: int = 16):
    """x as `quantize_q8_1` makes it, without sums: codes F16 `[m, k]` as a map of boxes `[bm, 64]` swizzled by 128
    bytes, scales F32 `[k/32, m rounded up to 16]` as one of boxes `[4, bm]`. W as `repacked_q2_0` makes groups of 128,
    as a map of U8 `[ceil(n/16), 17·k/128, 32]` of boxes `[bn / 16, 17, 32]`; y BF16 `[m, n]` row-major; any m and n, k
    a multiple of 128.

    Tiles of bm (a multiple of 32) x bn (64 or 128) outputs, `blocks` of them on an SM. Sums over 32 of K are exact;
    each, times x's scale, is added in FP32; those of 128 of K are added times the weight's.
    """
    consumers = bn // GROUP_ROWS
    scales_at = 2 * bm * ROW
    w_at = scales_at + 4 * GROUPS * bm
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, filled(bm, bn), out_at + turn_bytes(bn), bm, 1, consumers, tiles=HALVES, apart=stage)
    of_tiles = walk(bm, bn, raster, 1)
    multiply, wait, count = L.wgmma(L.f16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    add, scaled = add_scaled(bm), scaled_rows(bm // 8)
    store = transposed_storer(bm, out_at, lift=1.0)
    parts_of = meeting(warps_of(bn), count, 1)
    bring_codes = bring_halves(of_stages, bm, stage)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        tiles = L.dynamic_shared(L.u8, 0)
        L.tma_load_3d(tiles, s * stage + w_at, w, (col0 >> 4, step * LINES, 0), of_stages.full(), s)

    @L.device
    def bring_x(s, maps, row0, step):
        codes, scales = maps
        bring_codes(s, codes, row0, step)
        tiles = L.dynamic_shared(L.u8, 0)
        L.tma_load_2d(tiles, s * stage + scales_at, scales, (step * GROUPS, row0), of_stages.full(), s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_w, bring_x)

    @L.device
    def products(part, a, s, group):
        """Those of a group: half a tile of 64 of K."""
        tiles = L.dynamic_shared(L.u8, 0)
        x = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
        here = L.descriptor_advance(x, group // 2 * (bm * ROW) + 64 * (group % 2))
        L.wgmma_fence()
        part = multiply(part, a[0], here, 0)
        part = multiply(part, a[1], L.descriptor_advance(here, 32), 1)
        L.wgmma_commit()
        return part

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.f16],
        x_scales: L.InMap[L.f32],
        w: L.InMap[L.u8],
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
                load(w, (x, x_scales), m, n, k, cut)
        else:
            multiplying(m)
            tiles, factors = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.f32, scales_at)
            warp, lane = L.warp_id(), L.lane_id()
            magic = opaque(MAGIC, k)
            of_unit = L.i32(w_at + UNIT * warp)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc, part = L.zeros(count), L.zeros(count)
                of_stages.take(s, phase)
                a = weights(tiles, L.i32(s * stage + of_unit), 0, magic)
                for step in range(begin, end):
                    unit = L.i32(s * stage + of_unit)
                    mine = L.i32((s * stage >> 2) + 4 * (lane & 3))
                    block = L.zeros(count)
                    part = products(part, a, s, 0)
                    for g in L.unroll(1, GROUPS):  # what is multiplied next is made while the group before is
                        b = weights(tiles, unit, g, magic)
                        part = wait(part, 0)
                        block = add(factors, mine + bm * (g - 1), block, part)
                        part = products(part, b, s, g)
                    d = L.lds_b32(tiles, unit + CODES + 4 * (lane >> 2))
                    done = s
                    s, phase = of_stages.after(s, phase)
                    if step + 1 < end:  # made here, it is made before the wait
                        of_stages.take(s, phase)
                        a = weights(tiles, L.i32(s * stage + of_unit), 0, magic)
                    part = wait(part, 0)
                    block = add(factors, mine + bm * (GROUPS - 1), block, part)
                    L.cuda.syncwarp()  # all lanes have read it
                    of_stages.release(done)
                    acc = scaled(acc, block, L.f16_lo(d), L.f16_hi(d))
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    store(y, acc, warp, row0, L.i32(col0 + 16 * warp), m, n, n, n, (L.f32(1), L.f32(1)))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
