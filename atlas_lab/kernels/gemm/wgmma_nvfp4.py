"""y = x·Wᵀ on warpgroups (wgmma), NVFP4 weights (W4A16) repacked as mma.sync takes them, tiles brought by TMA.

The product is computed transposed: W is operand A, made BF16 in registers, x operand B, in shared memory. A warpgroup
multiplies 64 rows of W; while one half of a stage is multiplied the weights of the next are made.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_lanes import pick_of, scales_of, weights
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, ring, roles, threads_of
from atlas_lab.kernels.gemm.wgmma_transposed import TURN_BYTES, transposed_storer
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk
from atlas_lab.kernels.gemv.mma_lanes import SPAN, UNIT

LINES = UNIT // ROW  # rows of W's map that a unit is
UNITS = GROUP_ROWS // 16  # of 16 rows of W, for a warpgroup
ATOM = 1024  # bytes that tiles swizzled by 128 bytes start at a multiple of


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage: 128 of K of bm rows of x, in two tiles, and of bn rows of W."""
    return 2 * bm * ROW + -(-bn // 16 * UNIT // ATOM) * ATOM


def turn_bytes(bn: int) -> int:
    """Bytes of shared memory that stores go through."""
    return bn // 16 * TURN_BYTES


@L.family
def wgmma_nvfp4(bm: int, bn: int, stages: int, blocks: int = 1, cluster: int = 1, raster: int = 16):
    """x BF16 `[m, k]` as a map of boxes `[bm / cluster, 64]` swizzled by 128 bytes; W as `repacked_nvfp4` makes it, as
    a map of U8 `[ceil(n/16), 9·k/128, 128]` of boxes `[bn / 16, 9, 128]`; its F32 tensor scale, which divides where
    `divides` is not 0; y BF16 `[m, n]` row-major; any m and n, k a multiple of 128.

    Tiles of bm (a multiple of 16 up to 256) x bn (64, 128 or 192) outputs, of neighbours in a row by the blocks of a
    cluster, which share their loads of x; `blocks` of them on an SM. Codes times block scales are exact in BF16, sums
    run in ascending K, 16 at a time, in FP32.
    """
    consumers = bn // GROUP_ROWS
    w_at = 2 * bm * ROW
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    expected = w_at + bn // 16 * UNIT
    of_stages = ring(stages, expected, out_at + turn_bytes(bn), bm, cluster, consumers)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, wait, count = L.wgmma(L.bf16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    store = transposed_storer(bm, out_at)
    loading, multiplying = roles(bn)

    @L.device
    def bring_w(s, w, col0, step):
        tiles = L.dynamic_shared(L.u8, 0)
        L.tma_load_3d(tiles, s * stage + w_at, w, (col0 >> 4, step * LINES, 0), of_stages.full(), s)

    @L.device
    def bring_x(s, x, row0, step):
        for half in L.unroll(2):
            of_stages.rows(s * stage + half * (bm * ROW), x, row0, step * SPAN + half * (SPAN // 2), s)

    load = loader(of_stages, of_tiles, SPAN, stages, bring_w, bring_x)

    @L.kernel(launch_bounds=(threads_of(bn, cluster), blocks))
    def kernel(
        x: L.InMap[L.bf16],
        w: L.InMap[L.u8],
        tensor_scale: L.In[L.f32],
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        divides: L.i32,
    ):
        of_stages.begin()
        group = L.warpgroup_id()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, x, m, n, k)
            elif cluster > 1 and L.warpgroup_thread() >= 32 and L.warpgroup_thread() < 64:
                of_stages.forward(of_tiles.mine(m, n) * L.i32(k // SPAN))
        else:
            multiplying()
            tiles = L.dynamic_shared(L.u8, 0)
            warp = L.warp_id()
            pick = pick_of(L.lane_id())
            alpha = L.ldg_f32(tensor_scale, 0)
            if divides:
                alpha = L.div_rn(L.f32(1), alpha)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // SPAN)
            i, last = of_tiles.first(), of_tiles.count(m, n)
            while i < last:
                row0, col0 = of_tiles.at(i, m, n)
                acc = L.zeros(count)
                for step in range(steps):
                    of_stages.take(s, phase)
                    at = L.i32(s * stage + w_at + UNIT * warp)
                    scales = scales_of(tiles, at)
                    x0 = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    x1 = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                    # two sets of registers: one is made while the products that read the other run
                    a0 = weights(tiles, at, 0, pick, scales)
                    a1 = weights(tiles, at, 1, pick, scales)
                    a2 = weights(tiles, at, 2, pick, scales)
                    a3 = weights(tiles, at, 3, pick, scales)
                    L.wgmma_fence()
                    acc = multiply(acc, a0, x0, L.i32(step > 0))
                    acc = multiply(acc, a1, L.descriptor_advance(x0, 32), 1)
                    acc = multiply(acc, a2, L.descriptor_advance(x0, 64), 1)
                    acc = multiply(acc, a3, L.descriptor_advance(x0, 96), 1)
                    L.wgmma_commit()
                    acc = wait(acc, 1)
                    if step > 0:
                        of_stages.release(of_stages.before(s))
                    b0 = weights(tiles, at, 4, pick, scales)
                    b1 = weights(tiles, at, 5, pick, scales)
                    b2 = weights(tiles, at, 6, pick, scales)
                    b3 = weights(tiles, at, 7, pick, scales)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    L.wgmma_fence()
                    acc = multiply(acc, b0, x1, 1)
                    acc = multiply(acc, b1, L.descriptor_advance(x1, 32), 1)
                    acc = multiply(acc, b2, L.descriptor_advance(x1, 64), 1)
                    acc = multiply(acc, b3, L.descriptor_advance(x1, 96), 1)
                    L.wgmma_commit()
                    acc = wait(acc, 1)
                    s, phase = of_stages.after(s, phase)
                acc = wait(acc, 0)
                of_stages.release(of_stages.before(s))
                store(y, acc, warp, row0, col0 + 16 * warp, m, n, alpha)
                i = of_tiles.after(i)

    return kernel
