"""y = x·Wᵀ on warpgroups (wgmma), Q4_K weights repacked as mma.sync takes them, x quantized to q8_1 (MMQ).

A sum over a group of 32 of K is one of integers, sc·q times x's codes, below 2^22: F16 holds the factors exactly and
the matrix unit adds them up in FP32, so that sums are what s8 products would give. They come out as floats, and with
sc in them: a multiply-add with x's scale is all that a group takes, where sums in s32 would take a conversion, then
two scales. d follows once for 256 of K.

The second part of a weight, dmin·m, is a product of 16: m of a block's eight groups, twice, times the upper and the
lower parts of x's sums.

The product is computed transposed, as in `wgmma_w8a16`: W is operand A, made in registers while products run.
"""

from __future__ import annotations

import functools
from typing import Any

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.columns import opaque, scaled_rows
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.quantize.q8_1 import GROUP, SUMS
from atlas_lab.kernels.quantize.repack_q4_k import REST, SCALES, SPAN, UNIT

GROUPS = SPAN // GROUP
QUARTER = ROW // 2  # K of a tile of x
LINES = UNIT // ROW  # rows of W's map that a unit is
SIX = 0x3F3F3F3F  # a scale's bits of a byte
# F16 pairs: a code in bits 3 to 6 of 1024 is 1024 + 8q; a byte below it 1024 + sc.
CODE, MAGIC, ABOVE = 0x00780078, 0x64006400, 0x64646464
EIGHTH, LESS_EIGHTH, LESS_1024 = 0x30003000, 0xD800D800, 0xE400E400  # 1/8, -128, -1024
# BF16 pairs: 128, whose low bits a minimum fills; 128 - (128 + m) = -m
WHOLE, NEGATIVE = 0x43004300, 0xBF80BF80


@functools.cache
def add_scaled(bm: int):
    """`(scales, i, acc, part) -> acc + part·scale`, each a fused multiply-add: accumulators of a transposed product by
    bm rows of x, whose scales lie from element i of shared memory on, a lane's four of each 16 rows side by side."""
    count = bm // 2

    def emit(e: Any, address: Any, *v: Any) -> list[Any]:
        acc, part, out = v[:count], v[count:], []
        for j in range(0, count, 8):
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {8 * j}];"
            scales = e.asm(text, [acc[0].type] * 4, [address])
            for i in range(j, j + 8):
                out.append(e.f32("fma.rn.f32 $0, $1, $2, $3;", part[i], scales[_scale_of(i)], acc[i]))
        return out

    def run(p: L.Pointer, i: int, acc: Any, part: Any) -> tuple[Any, ...]:
        read = [current().read(p, i + 2 * j, L.f32, 4) for j in range(0, count, 8)]
        return tuple(L.fma_rn(w, read[j // 8][_scale_of(j)], a) for j, (a, w) in enumerate(zip(acc, part, strict=True)))

    vec = L.Vec(L.f32, count)
    return L.intrinsic(
        f"add_scaled_{bm}", (SHARED, vec, vec), vec, ptx=emit, numpy=run, effect="reads", section="9.7.9 ld, 9.7.3 fma"
    )


def _scale_of(i: int) -> int:
    """Which of its four scales an accumulator of 16 rows of x is multiplied by."""
    return i >> 1 & 2 | i & 1


@L.device
def _factors(word, byte):
    """An eighth of a scale, and -128 times it, as F16 pairs."""
    eighth = L.hfma2(L.prmt(word, ABOVE, 0x4040 + 0x101 * byte), EIGHTH, LESS_EIGHTH)
    return eighth, L.hmul2(eighth, LESS_1024)


@L.device
def _codes(word, factors, magic):
    """Eight codes times their scale: four F16 pairs."""
    return (
        L.hfma2(L.u32(word & CODE | magic), factors[0], factors[1]),
        L.hfma2(L.u32(L.u32(word >> 4) & CODE | magic), factors[0], factors[1]),
        L.hfma2(L.u32(L.u32(word >> 8) & CODE | magic), factors[0], factors[1]),
        L.hfma2(L.u32(L.shf_l(word, word, 4) & CODE | magic), factors[0], factors[1]),
    )


@L.device
def weights(tiles, unit, group, scales, magic):
    """The two fragments (m64n*k16) of a group of the unit at byte `unit`: sc·q, exact in F16."""
    q = L.lds_v2_b32(tiles, unit + 256 * group + 8 * L.lane_id())
    a = _codes(q[0], _factors(scales[group % 2] & SIX, group // 2), magic)
    b = _codes(q[1], _factors(scales[2 + group % 2] & SIX, group // 2), magic)
    return (a[0], b[0], a[1], b[1]), (a[2], b[2], a[3], b[3])


@L.device
def minimums(scales, rest):
    """The fragment of a block's minimums, negative, exact in BF16: lane t has those of groups 2t and 2t + 1, twice."""
    pick = L.u32(0x0400 + 0x0101 * (L.lane_id() & 3))  # the lane's byte of two words, each to the low byte of a half
    nibbles = L.prmt(rest[2], rest[3], pick)
    upper = L.u32(L.u32(L.prmt(scales[0], scales[1], pick) >> 2) & 0x00300030 | nibbles & 0x000F000F)
    lower = L.u32(L.u32(L.prmt(scales[2], scales[3], pick) >> 2) & 0x00300030 | L.u32(nibbles >> 4) & 0x000F000F)
    e, f = L.bfma2(L.u32(upper | WHOLE), NEGATIVE, WHOLE), L.bfma2(L.u32(lower | WHOLE), NEGATIVE, WHOLE)
    return e, f, e, f


def x_bytes(bm: int) -> int:
    """Bytes of a stage's codes of bm rows of x, 256 of K in four tiles."""
    return SPAN // QUARTER * bm * ROW


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage: 256 of K of bm rows of x, of bn rows of W, x's scales and its sums."""
    return x_bytes(bm) + bn // 16 * UNIT + 4 * GROUPS * bm + 2 * SUMS * bm


@L.family
def wgmma_q4_k(bm: int, bn: int, stages: int, blocks: int = 1, cluster: int = 1, raster: int = 16):
    """x as `quantize_q8_1` makes it: codes F16 `[m, k]` as a map of boxes `[bm / cluster, 64]` swizzled by 128 bytes,
    scales F32 `[k/32, m rounded up to 16]` as one of boxes `[8, bm]`, sums BF16 `[m, k/16]` as one of boxes `[bm, 16]`
    swizzled by 32 bytes. W as `repacked_q4_k` makes it, as a map of U8 `[ceil(n/16), 18·k/256, 128]` of boxes
    `[bn / 16, 18, 128]`; y BF16 `[m, n]` row-major; any m and n, k a multiple of 256.

    Tiles of bm (a multiple of 32) x bn (64 or 128) outputs, of neighbours in a row by the blocks of a cluster, which
    share their loads of x's codes; `blocks` of them on an SM. sc·q times x's codes are exact, and their sums over 32
    of K; each, times x's scale, is added in FP32; those of 256 of K, times d, then the second part, times dmin.
    """
    consumers = bn // GROUP_ROWS
    w_at = x_bytes(bm)
    scales_at = w_at + bn // 16 * UNIT
    sums_at = scales_at + 4 * GROUPS * bm
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, stage, out_at + turn_bytes(bn), bm, cluster, consumers, tiles=SPAN // QUARTER)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, multiply_sums = L.wgmma(L.f16, bm, a_registers=True), L.wgmma(L.bf16, bm, a_registers=True)
    wait, count = L.wgmma_wait(bm // 2), bm // 2
    add, scaled = add_scaled(bm), scaled_rows(bm // 8)
    store = transposed_storer(bm, out_at, lift=1.0)
    parts_of = meeting(warps_of(bn), count, cluster)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        L.tma_load_3d(L.dynamic_shared(L.u8, 0), s * stage + w_at, w, (col0 >> 4, step * LINES, 0), of_stages.full(), s)

    @L.device
    def bring_x(s, maps, row0, step):
        codes, scales, sums = maps
        tiles = L.dynamic_shared(L.u8, 0)
        for quarter in L.unroll(SPAN // QUARTER):
            of_stages.rows(s * stage + quarter * (bm * ROW), codes, row0, step * SPAN + quarter * QUARTER, s)
        L.tma_load_2d(tiles, s * stage + scales_at, scales, (step * GROUPS, row0), of_stages.full(), s)
        L.tma_load_2d(tiles, s * stage + sums_at, sums, (row0, step * SUMS), of_stages.full(), s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_w, bring_x)

    @L.device
    def products(part, a, x, group):
        """Those of a group: half a tile of 64 of K."""
        here = L.descriptor_advance(x, group // 2 * (bm * ROW) + 64 * (group % 2))
        part = multiply(part, a[0], here, 0)
        return multiply(part, a[1], L.descriptor_advance(here, 32), 1)

    @L.device
    def ends(tiles, s, warp, lane):
        """What a lane's rows of a unit end in: scales and the upper bits of minimums; d, dmin, the lower bits."""
        at = L.i32(s * stage + w_at + UNIT * warp + 16 * (lane >> 2))
        return L.lds_v4_b32(tiles, at + SCALES), L.lds_v4_b32(tiles, at + REST)

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.f16],
        x_scales: L.InMap[L.f32],
        x_sums: L.InMap[L.bf16],
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
                load(w, (x, x_scales, x_sums), m, n, k, cut)
        else:
            multiplying(m)
            tiles = L.dynamic_shared(L.u8, 0)
            warp, lane = L.warp_id(), L.lane_id()
            magic = opaque(MAGIC, k)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc, part = L.zeros(count), L.zeros(count)
                of_stages.take(s, phase)
                head, rest = ends(tiles, s, warp, lane)
                a = weights(tiles, L.i32(s * stage + w_at + UNIT * warp), 0, head, magic)
                for step in range(begin, end):
                    unit = L.i32(s * stage + w_at + UNIT * warp)
                    of_x = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    mine = L.i32((s * stage + scales_at + 16 * (lane & 3)) >> 2)
                    block = L.zeros(count)
                    L.wgmma_fence()
                    part = products(part, a, of_x, 0)
                    L.wgmma_commit()
                    for g in L.unroll(1, GROUPS):  # what is multiplied next is made while the group before is
                        b = weights(tiles, unit, g, head, magic)
                        part = wait(part, 0)
                        block = add(L.cast(tiles, L.f32), mine + bm * (g - 1), block, part)
                        L.wgmma_fence()
                        part = products(part, b, of_x, g)
                        L.wgmma_commit()
                    b = minimums(head, rest)
                    part = wait(part, 0)
                    block = add(L.cast(tiles, L.f32), mine + bm * (GROUPS - 1), block, part)
                    L.cuda.syncwarp()  # all lanes have read: the stage is released after its products
                    L.wgmma_fence()
                    of_sums = L.matrix_descriptor(tiles, s * stage + sums_at, 32, 16, 256)
                    part = multiply_sums(part, b, of_sums, 0)
                    L.wgmma_commit()
                    acc = scaled(acc, block, L.f16_lo(rest[0]), L.f16_hi(rest[0]))
                    upper, lower = L.f16_lo(rest[1]), L.f16_hi(rest[1])
                    done = s
                    s, phase = of_stages.after(s, phase)
                    if step + 1 < end:  # made here, it is made before the wait
                        of_stages.take(s, phase)
                        head, rest = ends(tiles, s, warp, lane)
                        a = weights(tiles, L.i32(s * stage + w_at + UNIT * warp), 0, head, magic)
                    part = wait(part, 0)
                    of_stages.release(done)
                    acc = scaled(acc, part, upper, lower)
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    store(y, acc, warp, row0, col0 + 16 * warp, m, n, n, n, (L.f32(1), L.f32(1)))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
