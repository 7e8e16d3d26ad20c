"""y = x·Wᵀ on warpgroups (wgmma), BF16 weights, tiles brought by TMA.

A block takes tiles of y in turn. One thread loads, as far ahead as the ring has stages, also while the last tile is
stored; each warpgroup multiplies 64 rows, one group of products in flight while the next is issued.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_BYTES, GROUP_ROWS, ROW, ring, roles, threads_of
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES, map_storer, thread_storer
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk

BK = ROW // 2  # K of one stage
PRODUCTS = BK // 16


@L.family
def wgmma_bf16(bm: int, bn: int, stages: int, mapped: bool = True, cluster: int = 1, raster: int = 16):
    """x BF16 `[m, k]`, W BF16 `[n, k]` as maps of boxes `[bm / cluster, 64]` and `[bn, 64]` swizzled by 128 bytes; y
    BF16 `[m, n]`, with `mapped` as a map of boxes `[16, 64]` so swizzled (bn a multiple of 64, n of 8), else row-major
    and any n; any m, k a multiple of 8.

    Tiles of bm (64 or 128) x bn (a multiple of 8 up to 256) outputs, of neighbours in a row by the blocks of a cluster,
    which share their loads of x; sums run in ascending K, 16 at a time, in FP32.
    """
    consumers = bm // GROUP_ROWS
    stage = (bm + bn) * ROW
    out_at = stages * stage
    of_stages = ring(stages, stage, out_at + 4 * consumers * WARP_BYTES * mapped, bm, cluster)
    of_tiles = walk(bm, bn, raster, cluster)
    multiply, wait, count = L.wgmma(L.bf16, bn), L.wgmma_wait(bn // 2), bn // 2
    store_map = map_storer(bn, out_at) if mapped else None
    store_threads = None if mapped else thread_storer(bn)

    loading, multiplying = roles(bm)

    @L.device
    def bring_w(s, w, col0, step):
        L.tma_load_2d(L.dynamic_shared(L.u8, 0), s * stage + bm * ROW, w, (col0, step * BK), of_stages.full(), s)

    @L.device
    def bring_x(s, x, row0, step):
        of_stages.rows(s * stage, x, row0, step * BK, s)

    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.kernel(launch_bounds=(threads_of(bm, cluster), 1))
    def kernel(
        x: L.InMap[L.bf16],
        w: L.InMap[L.bf16],
        y: (L.OutMap if mapped else L.Out)[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
    ):
        of_stages.begin()
        group = L.warpgroup_id()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, x, m, n, k)
            elif cluster > 1 and L.warpgroup_thread() >= 32 and L.warpgroup_thread() < 64:
                of_stages.forward(of_tiles.mine(m, n) * L.i32((k + BK - 1) // BK))
        else:
            multiplying()
            tiles = L.dynamic_shared(L.u8, 0)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            i, last = of_tiles.first(), of_tiles.count(m, n)
            while i < last:
                row0, col0 = of_tiles.at(i, m, n)
                row0 = L.i32(row0 + GROUP_ROWS * group)
                if row0 < m:
                    acc = L.zeros(count)
                    for step in range(steps):
                        of_stages.take(s, phase)
                        a = L.matrix_descriptor(tiles, s * stage + group * GROUP_BYTES, 128, 16, 1024)
                        b = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                        L.wgmma_fence()
                        for j in L.unroll(PRODUCTS):
                            more = L.i32(step + j > 0)
                            acc = multiply(acc, L.descriptor_advance(a, 32 * j), L.descriptor_advance(b, 32 * j), more)
                        L.wgmma_commit()
                        acc = wait(acc, 1)
                        if step > 0:
                            of_stages.release(of_stages.before(s))
                        s, phase = of_stages.after(s, phase)
                    acc = wait(acc, 0)
                    of_stages.release(of_stages.before(s))
                    row = row0 + 16 * (L.warp_id() & 3)
                    if mapped:
                        store_map(y, acc, L.warp_id(), row, col0)
                    else:
                        store_threads(y, acc, row, col0, m, n)
                else:  # all its rows lie past x: nothing to multiply
                    for _ in range(steps):
                        of_stages.take(s, phase)
                        of_stages.release(s)
                        s, phase = of_stages.after(s, phase)
                i = of_tiles.after(i)
            if mapped and L.lane_id() == 0:
                L.bulk_wait_read(0)

    return kernel
