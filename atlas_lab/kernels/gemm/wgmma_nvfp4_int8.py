"""y = x·Wᵀ on warpgroups (wgmma), repacked NVFP4 codes as int8, exactly, activations int8 with a scale for 32 of K.

NVFP4 is int8 under a scale for 16 of K: twice a code is an integer of at most 12 in magnitude (llama.cpp's MMQ without
native FP4). The product is computed transposed, as in `wgmma_nvfp4_w4a8`: a product takes 32 of K, a block scale covers
16, so half of each fragment of W is zero. Two sets of sums of integers: one is made float32, scaled and added while the
product of the other runs.
"""

import functools

import numpy as np

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_int8_scale import fused
from atlas_lab.kernels.gemm.wgmma_lanes import INTEGERS_LIFT, integers_of_groups, scales_in_order, scales_of_group
from atlas_lab.kernels.gemm.wgmma_nvfp4 import alpha_of, bring_units, stage_bytes
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT

GROUPS = SPAN // 32  # scales of x of a stage
BLOCKS = SPAN // 16  # block scales of W


@functools.cache
def scaled_by_both(count: int):
    """`(acc, sums, rows, columns) -> acc + sums·(row scale·column scale)`, each a fused multiply-add: accumulators of
    64 rows of W, sums of integers below 2^24, the scales of a thread's two rows and of its columns of x."""
    halves, columns_of = [(i >> 1) & 1 for i in range(count)], [2 * (i >> 2) + (i & 1) for i in range(count)]

    def emit(e, *v):
        acc, sums, rows, columns = v[:count], v[count : 2 * count], v[2 * count : 2 * count + 2], v[2 * count + 2 :]
        out = []
        for i in range(count):
            factor = e.f32("mul.rn.f32 $0, $1, $2;", rows[halves[i]], columns[columns_of[i]])
            value = e.asm("cvt.rn.f32.s32 $0, $1;", [acc[i].type], [sums[i]])[0]
            out.append(e.f32("fma.rn.f32 $0, $1, $2, $3;", value, factor, acc[i]))
        return out

    def run(acc, sums, rows, columns):
        with np.errstate(all="ignore"):
            factor = np.array(rows, np.float32)[halves] * np.array(columns, np.float32)[columns_of]
            value = np.array(sums, np.int32).astype(np.float32)
            return tuple(fused(value, factor, np.array(acc, np.float32)))

    vec = L.Vec(L.f32, count)
    # ordered, as `scaled_sums`
    return L.intrinsic(
        f"scaled_by_both_{count}",
        (vec, L.Vec(L.i32, count), L.Vec(L.f32, 2), L.Vec(L.f32, count // 2)),
        vec,
        ptx=emit,
        numpy=run,
        effect="synchronises",
        section="9.7.3 fma, 9.7.9 cvt",
    )


@L.family
def wgmma_nvfp4_int8(bm: int, bn: int, stages: int, blocks: int = 1, raster: int = 16):
    """x I8 `[m, k]` (`quantize_int8_groups`) as a map of boxes `[bm, 128]` swizzled by 128 bytes, and its scales F32
    `[k/32, m]` as one of boxes `[4, bm]`; W as `repacked_nvfp4` makes it, as a map of U8 `[ceil(n/16), 9·k/128, 128]`
    of boxes `[bn / 16, 9, 128]`; its F32 tensor scale, which divides where `divides` is not 0; y BF16 `[m, n]`
    row-major; any m and n, k a multiple of 128.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs; `blocks` of them on an SM. Sums over 16 of K are exact;
    each, times the product of its block scale and x's, is added in FP32, in ascending K; a half, for twice the codes,
    and the tensor scale multiply what comes out.
    """
    consumers = bn // GROUP_ROWS
    w_at = bm * ROW
    stage, of_scales = stage_bytes(bm, bn, ROW), 4 * GROUPS * bm
    scales_at = stages * stage
    out_at = scales_at + stages * of_scales
    expected = w_at + bn // 16 * UNIT + of_scales
    of_stages = ring(stages, expected, out_at + turn_bytes(bn), bm, 1, consumers, apart=stage)
    of_tiles = walk(bm, bn, raster, 1)
    count = bm // 2
    multiply, wait = L.wgmma(L.i8, bm, a_registers=True), L.wgmma_wait(count, L.i32)
    add = scaled_by_both(count)
    store = transposed_storer(bm, out_at, lift=INTEGERS_LIFT)
    parts_of = meeting(warps_of(bn), count, 1)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_x(s, maps, row0, step):
        x, x_scales = maps
        of_stages.rows(s * stage, x, row0, step * SPAN, s)
        at = scales_at + s * of_scales
        L.tma_load_2d(L.dynamic_shared(L.u8, 0), at, x_scales, (step * GROUPS, row0), of_stages.full(), s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_units(of_stages, stage, w_at), bring_x)

    @L.device
    def begun(sums, codes, of_x, i):
        """Begins the product of group i of a stage's eight: the first or the second half of 32 of K."""
        half = L.descriptor_advance(of_x, 32 * (i // 2))
        L.wgmma_fence()
        if i % 2 == 0:
            sums = multiply(sums, (codes[i][0], codes[i][1], L.u32(0), L.u32(0)), half, 0)
        else:
            sums = multiply(sums, (L.u32(0), L.u32(0), codes[i][0], codes[i][1]), half, 0)
        L.wgmma_commit()
        return sums

    @L.device
    def of_columns(s, group):
        """x's scales of a thread's columns: of each 8 rows of x, 2t and 2t + 1."""
        scales, out = L.dynamic_shared(L.u32, scales_at), ()
        at = L.i32(s * (of_scales // 4) + group * bm + 2 * (L.lane_id() & 3))
        for j in L.unroll(bm // 8):
            v = L.lds_v2_b32(scales, at + 8 * j)
            out = out + (L.bits_f32(v[0]), L.bits_f32(v[1]))
        return out

    @L.device
    def with_stage(acc, s, mine):
        """The accumulators with a stage added to them; nobody reads the stage after it."""
        tiles = L.dynamic_shared(L.u8, 0)
        at = L.i32(s * stage + mine)
        of_x = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
        scales = scales_in_order(tiles, at)
        codes = integers_of_groups(tiles, at, 0)
        p, q = begun(L.zeros_i32(count), codes, of_x, 0), begun(L.zeros_i32(count), codes, of_x, 1)
        columns = of_columns(s, 0)
        for i in L.unroll(BLOCKS):
            factors = scales_of_group(scales[i % 4], i // 4)
            if i % 2 == 0:
                if i > 0:
                    columns = of_columns(s, i // 2)
                if i + 2 == BLOCKS:
                    L.cuda.syncwarp()  # all lanes have what they read: the stage is released after this
                p = wait(p, 1)
                acc = add(acc, p, factors, columns)
                if i + 2 == BLOCKS // 2:
                    codes = codes + integers_of_groups(tiles, at, 1)
                if i + 2 < BLOCKS:
                    p = begun(p, codes, of_x, i + 2)
            else:
                q = wait(q, 1 if i + 1 < BLOCKS else 0)
                if i + 1 == BLOCKS:
                    of_stages.release(s)
                acc = add(acc, q, factors, columns)
                if i + 2 < BLOCKS:
                    q = begun(q, codes, of_x, i + 2)
        return acc

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.i8],
        x_scales: L.InMap[L.f32],
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
                load(w, (x, x_scales), m, n, k, cut)
        else:
            multiplying(m)
            warp = L.warp_id()
            mine = L.i32(w_at + UNIT * warp)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc = L.zeros(count)
                for _ in range(begin, end):
                    of_stages.take(s, phase)
                    acc = with_stage(acc, s, mine)
                    s, phase = of_stages.after(s, phase)
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    alpha = alpha_of(tensor_scale, divides)  # here: sums of 80 rows of x leave no register for it
                    store(y, acc, warp, row0, L.i32(col0 + 16 * warp), m, n, n, n, (alpha, alpha))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
