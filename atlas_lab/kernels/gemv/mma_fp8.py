"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, FP8 E4M3 weights as stored."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import axpy
from atlas_lab.kernels.gemv.abreast import Straight, abreast_of, refuse_all_but_plain
from atlas_lab.kernels.gemv.columns import (
    activations,
    first_product,
    part_of,
    product,
    rows_of_tile,
    scaled_rows,
)
from atlas_lab.kernels.gemv.stream import Reader, no_alpha, one_of, stream

SPAN, UNIT = 128, 2048  # K, that of a block scale, and bytes of a unit of 16 rows
RUN = 16  # K of a lane in a load


@functools.cache
def scales_of(by_row: bool):
    """A device function `(args, which, row, count)`: where the scales of the lane's two rows are, of the tile that
    begins at `row` of `count`."""

    @L.device
    def find(args, which, row, count):
        s = one_of(which, args[1], args[3], args[5])
        if by_row:
            upper, lower = rows_of_tile(row, count)
            return L.offset(s, upper), L.offset(s, lower)
        block = L.offset(s, L.i64(min(row, count - 1) >> 7) * args[6])
        return block, block

    return find


@functools.cache
def reader_of(tiles: int, columns: int, whole: bool, scale: L.Scalar, by_row: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    wide = columns > 1
    place, fetch = activations(columns, RUN, whole=whole, ordered=wide)
    begin, add = first_product(columns, RUN), product(columns, 1, RUN)
    scaled_add, scaled, mine = axpy(4 * columns), scaled_rows(columns), part_of(4 * columns)
    # ordered where registers are few: others would be moved up
    loads = (L.ld_in_f32, L.ld_in_bf16) if wide else (L.ldg_f32, L.ldg_bf16)
    load_scale, scales = loads[scale is not L.f32], scales_of(by_row)

    @L.device
    def locate(args, which, row, count, k):
        """Where the tile begins, how many rows follow, and the scales of the lane's two rows."""
        w, here = one_of(which, args[0], args[2], args[4]), min(row, count - 1)
        return (L.offset(w, L.i64(here) * k), L.i32(count - 1 - here), *scales(args, which, row, count))

    @L.device
    def copy(ring, at, source, unit, k):
        # whole lines of 128 bytes, four rows at a time; odd rows have their halves swapped, against bank conflicts
        lane = L.lane_id()
        column = L.i32(unit * SPAN + RUN * (lane & 7))
        valid = 16 if whole or column < k else 0
        column = column if whole or column < k else L.i32(0)
        to = L.i32(at + 128 * (lane >> 3) + 16 * ((lane & 7) ^ ((lane >> 3 & 1) << 2)))
        for c in L.unroll(4):
            # rows past the last repeat it; they are not stored
            row = min(4 * c + (lane >> 3), source[1])
            L.cp_async_16_stream(ring, to + 512 * c, source[0], L.i32(row * k + column), valid)

    @L.device
    def first_half(x, rows, k, unit, kind):
        return fetch(x, rows, k, L.i32(unit * SPAN + RUN * (L.lane_id() & 3)), kind)

    @L.device
    def factors(source, args, unit):
        """The scales of the lane's rows of each tile."""
        f = ()
        for t in L.unroll(tiles):
            for h in L.unroll(2):
                step = L.i32(0 if by_row else unit * args[7])
                if by_row or h == 0:
                    f = f + (load_scale(source[4 * t + 2 + h], step),)
        return f

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        f = () if wide else factors(source, args, unit)
        parts = ()
        for i in L.unroll(2):
            v = ready
            if not wide or i > 0:
                v = fetch(x, rows, k, L.i32(unit * SPAN + 64 * i + RUN * (lane & 3)), kind)
            found = ()
            for t in L.unroll(tiles):
                here = L.i32(at + UNIT * t + 128 * (lane >> 2) + 16 * ((lane & 3) + 4 * i ^ ((lane >> 2 & 1) << 2)))
                if not wide:
                    p, q = L.lds_v4_b32(ring, here), L.lds_v4_b32(ring, here + 1024)
                part = () if i == 0 else mine(parts, t)
                for j in L.unroll(4):
                    if wide and j % 2 == 0:
                        p = L.lds_v2_b32(ring, here + 4 * j)
                        q = L.lds_v2_b32(ring, here + 1024 + 4 * j)
                    word = j % 2 if wide else j
                    a, b = L.e4m3x4_bf16x2(p[word]), L.e4m3x4_bf16x2(q[word])
                    if i == 0 and j == 0:
                        part = begin((a[0], b[0], a[1], b[1]), v, 0)
                    else:
                        part = add(part, 0, (a[0], b[0], a[1], b[1]), v, j)
                found = found + part
            parts = found
        if wide:  # few registers are left: the scales come last
            f = factors(source, args, unit)
        out = ()
        for t in L.unroll(tiles):
            if by_row:
                out = out + scaled(mine(sums, t), mine(parts, t), f[2 * t], f[2 * t + 1])
            else:
                out = out + scaled_add(mine(sums, t), mine(parts, t), f[t])
        return out

    return Reader(
        SPAN,
        UNIT,
        4,
        locate,
        copy,
        use,
        no_alpha,
        crosses=True,
        early=first_half if wide else None,
        place=place,
        ordered=wide,
    )


@functools.cache
def straight_of(columns: int, scale: L.Scalar, by_row: bool, ordered: bool) -> Straight:
    """How they are read into registers and multiplied, the same products and sums. `ordered`: loads keep their order in
    the loop, too; where row tiles follow in turn, that takes registers which some targets have not."""
    begin, add, scales = first_product(columns, RUN), product(columns, 1, RUN), scales_of(by_row)
    scaled_add, scaled = axpy(4 * columns), scaled_rows(columns)
    load_scale = L.ldg_f32 if scale is L.f32 else L.ldg_bf16

    @L.device
    def locate(args, which, row, count, k):
        w, (upper, lower) = one_of(which, args[0], args[2], args[4]), rows_of_tile(row, count)
        at = L.i64(upper) * k + RUN * (L.lane_id() & 3)
        return (L.offset(w, at), L.i32((lower - upper) * k), *scales(args, which, row, count))

    def loaded_by(load_line: L.Op):
        @L.device
        def load(source, unit, k):
            words = ()
            for h in L.unroll(2):
                here = L.offset(source[0], L.i32(unit * SPAN + h * source[1]))
                words = words + load_line(here, 0) + load_line(here, 64)
            return words

        return load

    first = loaded_by(L.ld_in_v4_b32_line)
    load = first if ordered else loaded_by(L.ldg_v4_b32_line)

    @L.device
    def spread(words):
        """Two codes a register, each extended by its sign to 16 bits: the first step of `L.e4m3x4_bf16x2`."""
        codes = ()
        for i in L.unroll(16):
            codes = codes + (L.prmt(words[i], 0, 0x9180), L.prmt(words[i], 0, 0xB3A2))
        return codes

    @L.device
    def pair(code):
        """The others: its magnitude in BF16's place times 2^120."""
        return L.bmul2(L.u32(code << 4) & 0x87F087F0, 0x7B807B80)

    @L.device
    def use(sums, codes, source, args, of_x, unit):
        step = L.i32(0 if by_row else unit * args[7])
        f = load_scale(source[2], step)
        part = ()
        for i in L.unroll(2):
            v = of_x(unit, i)
            for j in L.unroll(4):
                a, b = 2 * (4 * i + j), 2 * (8 + 4 * i + j)
                of_w = (pair(codes[a]), pair(codes[b]), pair(codes[a + 1]), pair(codes[b + 1]))
                if i == 0 and j == 0:
                    part = begin(of_w, v, 0)
                else:
                    part = add(part, 0, of_w, v, j)
        if by_row:
            return scaled(sums, part, f, load_scale(source[3], step))
        return scaled_add(sums, part, f)

    @L.device
    def fetch(source, unit, k):
        half = L.lane_id() & 3
        if half < 2:
            L.prefetch_l2(source[0], L.i32(unit * SPAN + half * source[1]))

    return Straight(SPAN, 16, locate, first, load, spread, use, no_alpha, fetch)


@L.family
def mma_fp8(
    warps: int = 8,
    depth: int = 4,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    whole: bool = True,
    scale: L.Scalar = L.f32,
    by_row: bool = False,
    joined: bool = False,
    pair: bool = False,
    clamp: bool = False,
    cluster: int = 1,
    abreast: int = 0,
    turns: bool = True,
):
    """W E4M3 `[n_i, k]` of up to three projections with their scales, F32 or BF16; x BF16 `[m, k]`, y BF16
    `[m, n]`; m at most 8·columns, k a multiple of 16, of 128 if `whole`.

    Scale `r·down + (c >> 7)·across` belongs to column c of the 128 rows number r: `down` and `across` are ceil(k/128)
    and 1 for one scale a block of 128x128, 0 and 0 for one of the whole tensor; `by_row` reads one a row instead.
    `first`, `second` (multiples of 128 under block scales), `pair`, `clamp` and `cluster` as in `mma_nvfp4_lanes`.
    Weights become BF16 in registers, exactly; sums over 128 of K are scaled and added. A block has `abreast` tiles at
    once, if that is not 0, each of `warps` warps, and takes more in turn if `turns`: k is a multiple of 128 then, at
    most 8192.
    Raises ValueError where that is asked of anything but a plain product of one tile, a unit in flight a warp.
    """
    if abreast:
        asked = {"joined": joined, "pair": pair, "clamp": clamp, "not whole": not whole, "more in flight": depth > 1}
        refuse_all_but_plain("abreast", asked, tiles, cluster)
        run = abreast_of(straight_of(columns, scale, by_row, not turns), warps, abreast, columns, turns)
    else:
        reader = reader_of(tiles, columns, whole, scale, by_row)
        run = stream(reader, warps, depth, tiles, columns, joined, pair, clamp=clamp, cluster=cluster)
    threads = 32 * warps * max(abreast, 1) // cluster

    of_x = L.InMap[L.bf16] if abreast else L.In[L.bf16]

    @L.kernel(launch_bounds=(threads, blocks))
    def kernel(
        w0: L.In[L.e4m3],
        s0: L.In[scale],
        w1: L.In[L.e4m3],
        s1: L.In[scale],
        w2: L.In[L.e4m3],
        s2: L.In[scale],
        x: of_x,
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        first: L.i32,
        second: L.i32,
        kind: L.i32,
        full: L.i32,
        down: L.i32,
        across: L.i32,
    ):
        run((w0, s0, w1, s1, w2, s2, down, across), x, y, m, n, k, first, second, kind, full)

    return kernel
