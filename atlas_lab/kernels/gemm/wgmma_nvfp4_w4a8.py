"""y = x·Wᵀ on warpgroups (wgmma), repacked NVFP4 codes as E4M3, activations E4M3, block scales on the sums in float32.

The product is computed transposed, as in `wgmma_nvfp4_fp8`. A product takes 32 of K, a block scale covers 16: half of
each fragment of W is zero. Two sets of sums: one is scaled and added while the product of the other runs.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_lanes import CODES_LIFT, codes_of_groups, scales_in_order, scales_of_group
from atlas_lab.kernels.gemm.wgmma_nvfp4 import alpha_of, bring_units, stage_bytes
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT


@functools.cache
def axpy_of_rows(count: int):
    """`(acc, part, factors) -> acc + part·factor`, each a fused multiply-add: accumulators of 64 rows, the factors of a
    thread's two."""

    def emit(e, *v):
        acc, part, factors = v[:count], v[count : 2 * count], v[2 * count :]
        return [e.f32("fma.rn.f32 $0, $1, $2, $3;", part[i], factors[(i >> 1) & 1], acc[i]) for i in range(count)]

    def run(acc, part, factors):
        f = tuple(factors)
        return tuple(L.fma_rn(p, f[(i >> 1) & 1], a) for i, (a, p) in enumerate(zip(acc, part, strict=True)))

    vec = L.Vec(L.f32, count)
    operands = (vec, vec, L.Vec(L.f32, 2))
    return L.intrinsic(f"axpy_of_rows_{count}", operands, vec, ptx=emit, numpy=run, section="9.7.3 fma")


@L.family
def wgmma_nvfp4_w4a8(bm: int, bn: int, stages: int, blocks: int = 1, cluster: int = 1, raster: int = 16):
    """x E4M3 `[m, k]` as it lies (`quantize_fp8_rows`), as a map of boxes `[bm / cluster, 128]` swizzled by 128 bytes,
    and its scales F32 `[m]`; W as `repacked_nvfp4` makes it, as a map of U8 `[ceil(n/16), 9·k/128, 128]` of boxes
    `[bn / 16, 9, 128]`; its F32 tensor scale, which divides where `divides` is not 0; y BF16 `[m, n]` row-major; any m
    and n, k a multiple of 128.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs, of neighbours in a row by the blocks of a cluster, which
    share their loads of x; `blocks` of them on an SM. Codes are exact in E4M3; sums run over 16 of K in the matrix
    unit; each, times its block scale, is added in FP32, in ascending K; x's scales, then the tensor scale, multiply
    what comes out.
    """
    consumers = bn // GROUP_ROWS
    w_at = bm * ROW
    stage = stage_bytes(bm, bn, ROW)
    out_at = stages * stage
    expected = w_at + bn // 16 * UNIT
    of_stages = ring(stages, expected, out_at + turn_bytes(bn), bm, cluster, consumers, apart=stage)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, wait, count = L.wgmma(L.e4m3, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    add = axpy_of_rows(count)
    store = transposed_storer(bm, out_at, lift=CODES_LIFT, by_row=True)
    parts_of = meeting(warps_of(bn), count, cluster)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_x(s, x, row0, step):
        of_stages.rows(s * stage, x, row0, step * SPAN, s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_units(of_stages, stage, w_at), bring_x)

    @L.device
    def first_of(part, codes, of_x):
        """Begins the product of the first 16 of 32 K from descriptor of_x."""
        L.wgmma_fence()
        part = multiply(part, (codes[0], codes[1], L.u32(0), L.u32(0)), of_x, 0)
        L.wgmma_commit()
        return part

    @L.device
    def second_of(part, codes, of_x):
        """Begins that of the others."""
        L.wgmma_fence()
        part = multiply(part, (L.u32(0), L.u32(0), codes[0], codes[1]), of_x, 0)
        L.wgmma_commit()
        return part

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
                acc, p, q = L.zeros(count), L.zeros(count), L.zeros(count)
                for _ in range(begin, end):
                    of_stages.take(s, phase)
                    at = L.i32(s * stage + mine)
                    of_x = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    scales = scales_in_order(tiles, at)
                    a = codes_of_groups(tiles, at, 0)
                    p = first_of(p, a[0], of_x)
                    q = second_of(q, a[1], of_x)
                    p = wait(p, 1)
                    acc = add(acc, p, scales_of_group(scales[0], 0))
                    p = first_of(p, a[2], L.descriptor_advance(of_x, 32))
                    q = wait(q, 1)
                    acc = add(acc, q, scales_of_group(scales[1], 0))
                    q = second_of(q, a[3], L.descriptor_advance(of_x, 32))
                    b = codes_of_groups(tiles, at, 1)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    p = wait(p, 1)
                    acc = add(acc, p, scales_of_group(scales[2], 0))
                    p = first_of(p, b[0], L.descriptor_advance(of_x, 64))
                    q = wait(q, 1)
                    acc = add(acc, q, scales_of_group(scales[3], 0))
                    q = second_of(q, b[1], L.descriptor_advance(of_x, 64))
                    p = wait(p, 1)
                    acc = add(acc, p, scales_of_group(scales[0], 1))
                    p = first_of(p, b[2], L.descriptor_advance(of_x, 96))
                    q = wait(q, 1)
                    acc = add(acc, q, scales_of_group(scales[1], 1))
                    q = second_of(q, b[3], L.descriptor_advance(of_x, 96))
                    p = wait(p, 1)
                    acc = add(acc, p, scales_of_group(scales[2], 1))
                    q = wait(q, 0)
                    of_stages.release(s)
                    s, phase = of_stages.after(s, phase)
                    acc = add(acc, q, scales_of_group(scales[3], 1))
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
