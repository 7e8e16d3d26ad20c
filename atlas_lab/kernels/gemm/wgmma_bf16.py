"""y = x·Wᵀ on warpgroups (wgmma), BF16 weights, tiles brought by TMA.

A block takes tiles of y in turn. One thread loads, as far ahead as the ring has stages, also while the last tile is
stored; each warpgroup multiplies 64 rows, one group of products in flight while the next is issued.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS, refuse_epilogue, row_adder
from atlas_lab.kernels.gemm.wgmma_joined import bring_of, part_of
from atlas_lab.kernels.gemm.wgmma_ring import (
    GROUP_BYTES,
    GROUP_ROWS,
    ROW,
    fetch_maps,
    own_group,
    ring,
    roles,
    threads_of,
    warps_of,
)
from atlas_lab.kernels.gemm.wgmma_split import dealt, mail_bytes, refuse_rows
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES, row_storer
from atlas_lab.kernels.gemm.wgmma_walk import loader
from atlas_lab.kernels.gemv.stream import one_of

BK = ROW // 2  # K of one stage
PRODUCTS = BK // 16


@L.family
def wgmma_bf16(
    bm: int,
    bn: int,
    stages: int,
    across: int = 1,
    down: int = 1,
    raster: int = 16,
    joined: bool = False,
    split: int = 1,
    epilogue: str | None = None,
):
    """x BF16 `[m, k]`, W BF16 `[n, k]` as maps of boxes `[bm / across, 64]` and `[bn / down, 64]` swizzled by 128
    bytes; y BF16 `[m, n]` row-major; any m and n, k a multiple of 8.

    Tiles of bm (64 or 128) x bn (a multiple of 8 up to 256) outputs; a cluster takes neighbours, `across` in a row,
    which share their loads of x, and `down` in a column, which share those of W; sums run in ascending K, 16 at a time,
    in FP32. `joined`: three weights and parts of y, alike or the last again, as in `wgmma_joined`. With `split` a
    cluster of so many blocks cuts the K of one tile of 64 rows instead; raises ValueError for others, and for an
    `epilogue` other than ADDENDS, of one projection: BF16 `[m, n]`, `before` where there are `both`, then `last`, are
    added in FP32 to the sums.
    """
    refuse_epilogue("wgmma_bf16", epilogue, (ADDENDS,), joined)
    consumers = bm // GROUP_ROWS
    refuse_rows(bm, split)
    stage = (bm + bn) * ROW
    out_at = stages * stage
    multiply, wait, count = L.wgmma(L.bf16, bn), L.wgmma_wait(bn // 2), bn // 2
    mail_at = out_at + warps_of(bm) * WARP_BYTES
    bars_at = mail_at + mail_bytes(warps_of(bm), count, split)
    of_stages = ring(stages, stage, bars_at, bm, across, bn=bn, down=down)
    of_tiles, parts_of = dealt(bm, bn, raster, across, down, split, warps_of(bm), count, mail_at, inside=True)
    store_rows, add_rows = row_storer(bn, out_at), row_adder(bn, out_at)
    loading, multiplying = roles(bm, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        of_stages.columns(s * stage + bm * ROW, w, col0, step * BK, s)

    @L.device
    def bring_x(s, x, row0, step):
        of_stages.rows(s * stage, x, row0, step * BK, s)

    load = loader(of_stages, of_tiles, BK, stages, bring_of(bring_w) if joined else bring_w, bring_x)

    @L.device
    def store_alone(into, acc, row, col, m):
        y, n = into
        store_rows(y, acc, L.warp_id(), row, col, m, n, n, n)

    @L.device
    def store_sums(into, acc, row, col, m):
        y, n, addends = into
        acc = add_rows(acc, addends, L.warp_id(), row, col, m, n)
        store_rows(y, acc, L.warp_id(), row, col, m, n, n, n)

    @L.device
    def store_part(into, acc, row, col, m):
        y, n, borders = into
        which, inside, count = part_of(col, n, borders)
        here = one_of(which, y[0], y[1], y[2])
        pitch, first, second = borders[2], borders[3], borders[4]
        store_rows(here, acc, L.warp_id(), row, inside, m, count, pitch, L.i32(pitch | first | second))

    store = store_part if joined else store_sums if epilogue else store_alone

    @L.device
    def run(x, w, into, parts, flags, m, n, k, cut):
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
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                own = L.i32((row0 + bm - 1) // bm * bm)  # the first row that no tile before has
                row0 = L.i32(row0 + GROUP_ROWS * group)
                if row0 < m:
                    acc = L.zeros(count)
                    for step in range(begin, end):
                        of_stages.take(s, phase)
                        a = L.matrix_descriptor(tiles, s * stage + group * GROUP_BYTES, 128, 16, 1024)
                        b = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                        L.wgmma_fence()
                        for j in L.unroll(PRODUCTS):
                            more = L.i32(step > begin) if j == 0 else L.i32(1)
                            acc = multiply(acc, L.descriptor_advance(a, 32 * j), L.descriptor_advance(b, 32 * j), more)
                        L.wgmma_commit()
                        acc = wait(acc, 1)
                        if step > begin:
                            of_stages.release(of_stages.before(s))
                        s, phase = of_stages.after(s, phase)
                    acc = wait(acc, 0)
                    of_stages.release(of_stages.before(s))
                    if end < steps:
                        parts_of.leave(parts, flags, acc, L.warp_id())
                    else:
                        if begin > 0:
                            shares = of_tiles.shares(m, n, steps, cut)
                            acc = parts_of.add(parts, flags, acc, L.warp_id(), shares, tile, begin, steps)
                        row = L.i32(row0 + 16 * (L.warp_id() & 3))
                        store(into, acc, row, col0, m if row >= own else L.i32(0))
                else:  # all its rows lie past x: nothing to multiply
                    for _ in range(begin, end):
                        of_stages.take(s, phase)
                        of_stages.release(s)
                        s, phase = of_stages.after(s, phase)
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    if joined:

        @L.kernel(launch_bounds=(threads_of(bm), 1))
        def kernel_of_three(
            x: L.InMap[L.bf16],
            w0: L.InMap[L.bf16],
            w1: L.InMap[L.bf16],
            w2: L.InMap[L.bf16],
            y0: L.Out[L.bf16],
            y1: L.Out[L.bf16],
            y2: L.Out[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            one: L.i32,
            two: L.i32,
            columns: L.i32,
            first: L.i32,
            second: L.i32,
        ):
            into = ((y0, y1, y2), n, (one, two, columns, first, second))
            run(x, (w0, w1, w2, one, two), into, parts, flags, m, n, k, cut)

        return kernel_of_three

    if epilogue:

        @L.kernel(launch_bounds=(threads_of(bm), 1))
        def kernel_with_addends(
            x: L.InMap[L.bf16],
            w: L.InMap[L.bf16],
            y: L.Out[L.bf16],
            before: L.In[L.bf16],
            last: L.In[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            both: L.i32,
        ):
            fetch_maps(x, w)
            run(x, w, (y, n, (before, last, both)), parts, flags, m, n, k, cut)

        return kernel_with_addends

    @L.kernel(launch_bounds=(threads_of(bm), 1))
    def kernel(
        x: L.InMap[L.bf16],
        w: L.InMap[L.bf16],
        y: L.Out[L.bf16],
        parts: L.InOut[L.f32],
        flags: L.InOut[L.u32],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        cut: L.i32,
    ):
        fetch_maps(x, w)
        run(x, w, (y, n), parts, flags, m, n, k, cut)

    return kernel
