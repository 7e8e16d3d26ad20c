"""y = x·Wᵀ on warpgroups (wgmma), E4M3 weights and activations (W8A8), tiles brought by TMA.

As `wgmma_bf16`, but a stage's products are sums over 128 of K of their own: scaled by x's and W's scales, they are
added up in FP32, so that what the matrix unit drops of a long sum stays small.
"""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS, refuse_epilogue, row_adder
from atlas_lab.kernels.gemm.wgmma_codes import CODES, code_storer
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
from atlas_lab.kernels.gemm.wgmma_scales import begun, moved, scale
from atlas_lab.kernels.gemm.wgmma_split import dealt, mail_bytes, refuse_rows
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES, row_storer
from atlas_lab.kernels.gemm.wgmma_walk import loader

BK = ROW  # K of one stage: a column of W's grid of scales, a group of x's
PRODUCTS = BK // 32
BLOCK = 128  # rows of W under one scale
ADDED_CODES = f"{ADDENDS} {CODES}"  # both
MOST_AHEAD = 128  # columns of which a thread of two warpgroups can hold three sets of sums


def grid_rows(bn: int) -> int:
    """Rows of W's grid of scales that bn columns of y may lie in."""
    return max((i * bn % BLOCK + bn - 1) // BLOCK + 1 for i in range(BLOCK))


@functools.cache
def scaled_add(count: int):
    """`(acc, part, factors, border) -> acc + part·factor`, each a fused multiply-add: accumulators of 64 rows, factors
    of a thread's two rows left of column 8·`border`, then from there on."""

    def emit(e, *v):
        acc, part, factors, border = v[:count], v[count : 2 * count], v[2 * count : 2 * count + 4], v[-1]
        out = []
        for j in range(count // 4):
            left = e.builder.icmp_signed("<", e.const(j), border)
            rows = [e.builder.select(left, factors[h], factors[2 + h]) for h in range(2)]
            for i in range(4 * j, 4 * j + 4):
                out.append(e.f32("fma.rn.f32 $0, $1, $2, $3;", part[i], rows[(i >> 1) & 1], acc[i]))
        return out

    def run(acc, part, factors, border):
        f = tuple(factors)
        return tuple(
            L.fma_rn(p, f[((i >> 1) & 1) + 2 * (i >> 2 >= border)], a)
            for i, (a, p) in enumerate(zip(acc, part, strict=True))
        )

    vec = L.Vec(L.f32, count)
    operands = (vec, vec, L.Vec(L.f32, 4), L.i32)
    return L.intrinsic(f"scaled_add_{count}", operands, vec, ptx=emit, numpy=run, section="9.7.3 fma")


@L.family
def wgmma_fp8(
    bm: int,
    bn: int,
    stages: int,
    across: int = 1,
    down: int = 1,
    raster: int = 16,
    split: int = 1,
    epilogue: str | None = None,
):
    """x E4M3 `[m, k]` and W E4M3 `[n, k]` as maps of boxes `[bm / across, 128]` and `[bn / down, 128]` swizzled by 128
    bytes; scales of x F32 `[ceil(k/128), m]` as a map of boxes `[1, bm]`; scales of W U8, BF16 where `narrow` and else
    F32, one for 128x128, `below` and `aside` of them apart (0: one for all); y, its tiles and `split` as in
    `wgmma_bf16`; k a multiple of 16.

    Sums run over 128 of K in the matrix unit, 32 at a time; each, times the product of both scales, is added in FP32.
    With an `epilogue` ADDENDS or ADDED_CODES, `before` where there are `both`, then `last`, BF16 `[m, n]`, are added to
    the sums; with CODES or ADDED_CODES y is E4M3 and has scales, as in `wgmma_codes`. Raises ValueError for other
    epilogues, for columns that lie in more than two rows of W's grid, for 128 rows that are split, and as `code_storer`
    does.
    """
    refuse_epilogue("wgmma_fp8", epilogue, (ADDENDS, CODES, ADDED_CODES))
    if grid_rows(bn) > 2:
        raise ValueError(f"wgmma_fp8: found {bn} columns, which lie in {grid_rows(bn)} rows of scales, expected 1 or 2")
    consumers = bm // GROUP_ROWS
    two, ahead = grid_rows(bn) == 2, bn <= MOST_AHEAD and consumers <= 2  # a third warpgroup multiplies meanwhile
    refuse_rows(bm, split)
    stage = (bm + bn) * ROW
    out_at = stages * stage
    scales_at = out_at + warps_of(bm) * WARP_BYTES
    multiply, wait, count = L.wgmma(L.e4m3, bn), L.wgmma_wait(bn // 2), bn // 2
    mail_at = scales_at + 4 * bm * stages
    bars_at = mail_at + mail_bytes(warps_of(bm), count, split)
    of_stages = ring(stages, stage + 4 * bm, bars_at, bm, across, bn=bn, down=down, apart=stage)
    of_tiles, parts_of = dealt(bm, bn, raster, across, down, split, warps_of(bm), count, mail_at)
    add = scaled_add(count)
    adds, codes = epilogue in (ADDENDS, ADDED_CODES), epilogue in (CODES, ADDED_CODES)
    store_sums, add_rows = (code_storer if codes else row_storer)(bn, out_at), row_adder(bn, out_at)
    loading, multiplying = roles(bm, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        of_stages.columns(s * stage + bm * ROW, w, col0, step * BK, s)

    @L.device
    def bring_x(s, maps, row0, step):
        x, x_scales = maps
        of_stages.rows(s * stage, x, row0, step * BK, s)
        at = scales_at + s * (4 * bm)
        L.tma_load_2d(L.dynamic_shared(L.u8, 0), at, x_scales, (step, row0), of_stages.full(), s)

    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

    @L.device
    def products(part, s, group):
        """Begins the stage's."""
        tiles = L.dynamic_shared(L.u8, 0)
        a = L.matrix_descriptor(tiles, s * stage + group * GROUP_BYTES, 128, 16, 1024)
        b = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
        L.wgmma_fence()
        for j in L.unroll(PRODUCTS):
            part = multiply(part, L.descriptor_advance(a, 32 * j), L.descriptor_advance(b, 32 * j), L.i32(j > 0))
        L.wgmma_commit()
        return part

    @L.device
    def start(where):
        """W's scales of a part's first steps; `where` is `(scales, first, second, begin, end, aside, narrow)`."""
        scales, first, second, begin, end, aside, narrow = where
        left = begun(scales, first, begin, end, aside, narrow)
        return left, (begun(scales, second, begin, end, aside, narrow) if two else left)

    @L.device
    def factors(held, where, step, of_rows, at):
        """x's scales of a thread's two rows times W's, left of the border and from there on, and what is held then."""
        scales, first, second, begin, end, aside, narrow = where
        left = moved(held[0], scales, first, step, begin, end, aside, narrow)
        right = moved(held[1], scales, second, step, begin, end, aside, narrow) if two else left
        f, g = scale(left, step, begin), scale(right, step, begin)
        u, v = L.lds_f32(of_rows, at), L.lds_f32(of_rows, at + 8)
        L.cuda.syncwarp()  # all lanes have their scales: the stage is released after this
        return (L.mul_rn(u, f), L.mul_rn(v, f), L.mul_rn(u, g), L.mul_rn(v, g)), (left, right)

    @L.device
    def one(acc, part, held, where, step, s, phase, group, of_rows, mine, border):
        """A stage by itself."""
        of_stages.take(s, phase)
        part = products(part, s, group)
        f, held = factors(held, where, step, of_rows, s * bm + mine)
        part = wait(part, 0)
        of_stages.release(s)
        return add(acc, part, f, border), part, held

    @L.device
    def store_added(into, acc, warp, row, col, m, n, pitch, odd):
        y, addends = into
        store_sums(y, add_rows(acc, addends, warp, row, col, m, n), warp, row, col, m, n, pitch, odd)

    store = store_added if adds else store_sums

    @L.device
    def run(x, w, x_scales, scales, into, parts, flags, m, n, k, cut, below, aside, narrow):
        """All that the kernel does."""
        fetch_maps(x, w)
        of_rows = L.dynamic_shared(L.f32, scales_at)
        of_stages.begin()
        parts_of.begin()
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, (x, x_scales), m, n, k, cut)
            parts_of.end()
        else:
            multiplying(m)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32((k + BK - 1) // BK)
            mine = L.i32(16 * L.warp_id() + (L.lane_id() >> 2))  # of the tile's rows, and 8 further
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                row0 = L.i32(row0 + GROUP_ROWS * group)
                if row0 < m:
                    first = min(L.i32(col0 >> 7), L.i32((n - 1) >> 7))
                    second = min(first + 1, L.i32((n - 1) >> 7))
                    border = L.i32((BLOCK * (first + 1) - col0) >> 3) if two else L.i32(count)
                    acc = L.zeros(count)
                    where = (scales, L.i32(first * below), L.i32(second * below), begin, end, aside, narrow)
                    held = start(where)
                    if ahead:
                        # two sets of sums: one is scaled and added while the products of the other run; of the second
                        # warpgroup's stages the first is alone, so that both never wait for the last of a pair together
                        p, q = L.zeros(count), L.zeros(count)
                        for_q = (L.f32(0), L.f32(0), L.f32(0), L.f32(0))
                        step = begin
                        if group:
                            acc, p, held = one(acc, p, held, where, step, s, phase, group, of_rows, mine, border)
                            s, phase = of_stages.after(s, phase)
                            step = L.i32(step + 1)
                        while step + 1 < end:
                            of_stages.take(s, phase)
                            p = products(p, s, group)
                            for_p, held = factors(held, where, step, of_rows, s * bm + mine)
                            acc = add(acc, q, for_q, border)
                            s, phase = of_stages.after(s, phase)
                            of_stages.take(s, phase)
                            q = products(q, s, group)
                            for_q, held = factors(held, where, L.i32(step + 1), of_rows, s * bm + mine)
                            p = wait(p, 1)
                            of_stages.release(of_stages.before(s))
                            acc = add(acc, p, for_p, border)
                            q = wait(q, 0)
                            of_stages.release(s)
                            s, phase = of_stages.after(s, phase)
                            step = L.i32(step + 2)
                        acc = add(acc, q, for_q, border)
                        if step < end:
                            acc, p, held = one(acc, p, held, where, step, s, phase, group, of_rows, mine, border)
                            s, phase = of_stages.after(s, phase)
                    else:
                        part = L.zeros(count)
                        for step in range(begin, end):
                            acc, part, held = one(
                                acc, part, held, where, L.i32(step), s, phase, group, of_rows, mine, border
                            )
                            s, phase = of_stages.after(s, phase)
                    if end < steps:
                        parts_of.leave(parts, flags, acc, L.warp_id())
                    else:
                        if begin > 0:
                            shares = of_tiles.shares(m, n, steps, cut)
                            acc = parts_of.add(parts, flags, acc, L.warp_id(), shares, tile, begin, steps)
                        store(into, acc, L.warp_id(), row0 + 16 * (L.warp_id() & 3), col0, m, n, n, n)
                else:  # all its rows lie past x: nothing to multiply
                    for _ in range(begin, end):
                        of_stages.take(s, phase)
                        of_stages.release(s)
                        s, phase = of_stages.after(s, phase)
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    if codes and adds:

        @L.kernel(launch_bounds=(threads_of(bm), 1))
        def kernel_with_addends_to_codes(
            x: L.InMap[L.e4m3],
            w: L.InMap[L.e4m3],
            x_scales: L.InMap[L.f32],
            scales: L.In[L.u8],
            y: L.Out[L.e4m3],
            y_scales: L.Out[L.f32],
            before: L.In[L.bf16],
            last: L.In[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            below: L.i32,
            aside: L.i32,
            narrow: L.i32,
            pitch: L.i32,
            both: L.i32,
        ):
            into = ((y, y_scales, pitch), (before, last, both))
            run(x, w, x_scales, scales, into, parts, flags, m, n, k, cut, below, aside, narrow)

        return kernel_with_addends_to_codes

    if codes:

        @L.kernel(launch_bounds=(threads_of(bm), 1))
        def kernel_to_codes(
            x: L.InMap[L.e4m3],
            w: L.InMap[L.e4m3],
            x_scales: L.InMap[L.f32],
            scales: L.In[L.u8],
            y: L.Out[L.e4m3],
            y_scales: L.Out[L.f32],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            below: L.i32,
            aside: L.i32,
            narrow: L.i32,
            pitch: L.i32,
        ):
            into = (y, y_scales, pitch)
            run(x, w, x_scales, scales, into, parts, flags, m, n, k, cut, below, aside, narrow)

        return kernel_to_codes

    if adds:

        @L.kernel(launch_bounds=(threads_of(bm), 1))
        def kernel_with_addends(
            x: L.InMap[L.e4m3],
            w: L.InMap[L.e4m3],
            x_scales: L.InMap[L.f32],
            scales: L.In[L.u8],
            y: L.Out[L.bf16],
            before: L.In[L.bf16],
            last: L.In[L.bf16],
            parts: L.InOut[L.f32],
            flags: L.InOut[L.u32],
            m: L.i32,
            n: L.i32,
            k: L.i32,
            cut: L.i32,
            below: L.i32,
            aside: L.i32,
            narrow: L.i32,
            both: L.i32,
        ):
            into = (y, (before, last, both))
            run(x, w, x_scales, scales, into, parts, flags, m, n, k, cut, below, aside, narrow)

        return kernel_with_addends

    @L.kernel(launch_bounds=(threads_of(bm), 1))
    def kernel(
        x: L.InMap[L.e4m3],
        w: L.InMap[L.e4m3],
        x_scales: L.InMap[L.f32],
        scales: L.In[L.u8],
        y: L.Out[L.bf16],
        parts: L.InOut[L.f32],
        flags: L.InOut[L.u32],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        cut: L.i32,
        below: L.i32,
        aside: L.i32,
        narrow: L.i32,
    ):
        run(x, w, x_scales, scales, y, parts, flags, m, n, k, cut, below, aside, narrow)

    return kernel
