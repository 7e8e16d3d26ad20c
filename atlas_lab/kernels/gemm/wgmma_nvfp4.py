"""y = x·Wᵀ on warpgroups (wgmma), NVFP4 weights (W4A16) repacked as mma.sync takes them, tiles brought by TMA.

The product is computed transposed: W is operand A, made BF16 in registers, x operand B, in shared memory. A warpgroup
multiplies 64 rows of W; while one half of a stage is multiplied the weights of the next are made.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS, refuse_epilogue
from atlas_lab.kernels.gemm.wgmma_joined import bring_of, part_of
from atlas_lab.kernels.gemm.wgmma_lanes import in_lanes_order, in_order
from atlas_lab.kernels.gemm.wgmma_ring import (
    GROUP_ROWS,
    ROW,
    Ring,
    fetch_maps,
    own_group,
    ring,
    roles,
    threads_of,
    warps_of,
)
from atlas_lab.kernels.gemm.wgmma_split import dealt, mail_bytes
from atlas_lab.kernels.gemm.wgmma_transposed import HALVES, bring_halves, transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT
from atlas_lab.kernels.gemv.stream import one_of

LINES = UNIT // ROW  # rows of W's map that a unit is
UNITS = GROUP_ROWS // 16  # of 16 rows of W, for a warpgroup
ATOM = 1024  # bytes that tiles swizzled by 128 bytes start at a multiple of


def stage_bytes(bm: int, bn: int, x_row: int = 2 * ROW) -> int:
    """Bytes of a stage: 128 of K, `x_row` bytes of each of bm rows of x, and of bn rows of W."""
    return bm * x_row + -(-bn // 16 * UNIT // ATOM) * ATOM


@functools.cache
def bring_units(ring: Ring, stage: int, w_at: int):
    """A device function `(s, w, col0, step)` of the loading thread: 128 of K of the rows of W that a box of map w has,
    from row col0, to byte `w_at` of a stage of `stage` bytes."""

    @L.device
    def run(s, w, col0, step):
        tiles = L.dynamic_shared(L.u8, 0)
        L.tma_load_3d(tiles, s * stage + w_at, w, (col0 >> 4, step * LINES, 0), ring.full(), s)

    return run


@L.device
def alpha_of(tensor_scale, divides):
    """What sums are multiplied by: the tensor scale, or 1 over one that divides."""
    alpha = L.ldg_f32(tensor_scale, 0)
    if divides:
        alpha = L.div_rn(L.f32(1), alpha)
    return alpha


@L.family
def wgmma_nvfp4(
    bm: int,
    bn: int,
    stages: int,
    blocks: int = 1,
    cluster: int = 1,
    ordered: bool = False,
    raster: int = 16,
    joined: bool = False,
    split: int = 1,
    epilogue: str | None = None,
):
    """x BF16 `[m, k]` as a map of boxes `[bm / cluster, 64]` swizzled by 128 bytes; W as `repacked_nvfp4` makes it, as
    a map of U8 `[ceil(n/16), 9·k/128, 128]` of boxes `[bn / 16, 9, 128]`; its F32 tensor scale, which divides where
    `divides` is not 0; y BF16 `[m, n]` row-major; any m and n, k a multiple of 128. `ordered`: each 64 of x are in the
    lanes' order already (`order_for_lanes`).

    Tiles of bm (a multiple of 16 up to 256) x bn (64, 128 or 192) outputs, of neighbours in a row by the blocks of a
    cluster, which share their loads of x; `blocks` of them on an SM. Codes times block scales are exact in BF16, sums
    run in ascending K, 16 at a time, in FP32. `joined`: three weights, their tensor scales and parts of y, alike or the
    last again, as in `wgmma_joined`; `split` and `epilogue` as in `wgmma_bf16`.
    """
    refuse_epilogue("wgmma_nvfp4", epilogue, (ADDENDS,), joined)
    consumers = bn // GROUP_ROWS
    w_at = 2 * bm * ROW
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    expected = w_at + bn // 16 * UNIT
    multiply, wait, count = L.wgmma(L.bf16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    mail_at = out_at + turn_bytes(bn)
    of_stages = ring(
        *(stages, expected, mail_at + mail_bytes(warps_of(bn), count, split), bm, cluster, consumers),
        tiles=HALVES,
        apart=stage,
    )
    of_tiles, parts_of = dealt(bm, bn, raster, cluster, 1, split, warps_of(bn), count, mail_at)
    store = transposed_storer(bm, out_at, adds=epilogue is not None)
    pick_of, scales_of, weights = in_lanes_order if ordered else in_order
    loading, multiplying = roles(bn, of_stages, 16 if bm > 192 else 0)

    bring_w, bring_x = bring_units(of_stages, stage, w_at), bring_halves(of_stages, bm, stage)
    load = loader(of_stages, of_tiles, SPAN, stages, bring_of(bring_w) if joined else bring_w, bring_x)

    @L.device
    def alphas_of_three(g, divides):
        return alpha_of(g[0], divides), alpha_of(g[1], divides), alpha_of(g[2], divides)

    @L.device
    def store_alone(into, alpha, acc, row, col, m):
        y, n = into
        store(y, acc, L.warp_id(), row, col, m, n, n, n, (alpha, alpha))

    @L.device
    def store_sums(into, alpha, acc, row, col, m):
        y, n, addends = into
        store(y, acc, L.warp_id(), row, col, m, n, n, n, (alpha, alpha), addends)

    @L.device
    def store_part(into, alphas, acc, row, col, m):
        y, n, borders = into
        which, inside, count = part_of(col, n, borders)
        pitch, first, second = borders[2], borders[3], borders[4]
        here, alpha = one_of(which, y[0], y[1], y[2]), one_of(which, alphas[0], alphas[1], alphas[2])
        store(here, acc, L.warp_id(), row, inside, m, count, pitch, L.i32(pitch | first | second), (alpha, alpha))

    alphas_of = alphas_of_three if joined else alpha_of
    store_tile = store_part if joined else store_sums if epilogue else store_alone

    @L.device
    def run(x, w, g, into, parts, flags, m, n, k, cut, divides):
        """All that the kernel does; n as the walk counts."""
        of_stages.begin()
        parts_of.begin()
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, x, m, n, k, cut)
            parts_of.end()
        else:
            multiplying(m)
            tiles = L.dynamic_shared(L.u8, 0)
            warp = L.warp_id()
            pick = pick_of(L.lane_id())
            alphas = alphas_of(g, divides)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc = L.zeros(count)
                for step in range(begin, end):
                    of_stages.take(s, phase)
                    at = L.i32(s * stage + w_at + UNIT * warp)
                    scales = scales_of(tiles, at)
                    x0 = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    x1 = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                    # two sets of registers: one is made while the products that read the other run
                    a = weights(tiles, at, 0, pick, scales)
                    L.wgmma_fence()
                    acc = multiply(acc, a[0], x0, L.i32(step > begin))
                    acc = multiply(acc, a[1], L.descriptor_advance(x0, 32), 1)
                    acc = multiply(acc, a[2], L.descriptor_advance(x0, 64), 1)
                    acc = multiply(acc, a[3], L.descriptor_advance(x0, 96), 1)
                    L.wgmma_commit()
                    acc = wait(acc, 1)
                    if step > begin:
                        of_stages.release(of_stages.before(s))
                    b = weights(tiles, at, 1, pick, scales)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    L.wgmma_fence()
                    acc = multiply(acc, b[0], x1, 1)
                    acc = multiply(acc, b[1], L.descriptor_advance(x1, 32), 1)
                    acc = multiply(acc, b[2], L.descriptor_advance(x1, 64), 1)
                    acc = multiply(acc, b[3], L.descriptor_advance(x1, 96), 1)
                    L.wgmma_commit()
                    acc = wait(acc, 1)
                    s, phase = of_stages.after(s, phase)
                acc = wait(acc, 0)
                of_stages.release(of_stages.before(s))
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        shares = of_tiles.shares(m, n, steps, cut)
                        acc = parts_of.add(parts, flags, acc, warp, shares, tile, begin, steps)
                    store_tile(into, alphas, acc, row0, L.i32(col0 + 16 * warp), m)
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    if joined:

        @L.kernel(launch_bounds=(threads_of(bn), blocks))
        def kernel_of_three(
            x: L.InMap[L.bf16],
            w0: L.InMap[L.u8],
            w1: L.InMap[L.u8],
            w2: L.InMap[L.u8],
            g0: L.In[L.f32],
            g1: L.In[L.f32],
            g2: L.In[L.f32],
            y0: L.Out[L.bf16],
            y1: L.Out[L.bf16],
            y2: L.Out[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            divides: L.i32,
            one: L.i32,
            two: L.i32,
            columns: L.i32,
            first: L.i32,
            second: L.i32,
        ):
            into = ((y0, y1, y2), n, (one, two, columns, first, second))
            run(x, (w0, w1, w2, one, two), (g0, g1, g2), into, parts, flags, m, n, k, cut, divides)

        return kernel_of_three

    if epilogue:

        @L.kernel(launch_bounds=(threads_of(bn), blocks))
        def kernel_with_addends(
            x: L.InMap[L.bf16],
            w: L.InMap[L.u8],
            tensor_scale: L.In[L.f32],
            y: L.Out[L.bf16],
            before: L.In[L.bf16],
            last: L.In[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            divides: L.i32,
            both: L.i32,
        ):
            fetch_maps(x, w)
            run(x, w, tensor_scale, (y, n, (before, last, both)), parts, flags, m, n, k, cut, divides)

        return kernel_with_addends

    @L.kernel(launch_bounds=(threads_of(bn), blocks))
    def kernel(
        x: L.InMap[L.bf16],
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
        fetch_maps(x, w)
        run(x, w, tensor_scale, (y, n), parts, flags, m, n, k, cut, divides)

    return kernel
