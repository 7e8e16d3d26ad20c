"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, NVFP4 weights repacked into the lanes' own order."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.abreast import Straight, abreast_of, refuse_all_but_plain
from atlas_lab.kernels.gemv.columns import of_unit, part_of, product, tile_of
from atlas_lab.kernels.gemv.stream import Reader, one_of, stream

SPAN, UNIT = 128, 1152  # K and bytes of a unit of 16 rows
RUN = 16  # K of a lane in half a unit: one group
# e2m1x16_small is 2^-126 of the codes; scales, 5 and 3 bits of 2^(e - 10), become 2^118 of theirs.
SCALE_BIAS, LIFT = 0x75807580, 256.0


@functools.cache
def half_of(tiles: int, columns: int):
    """A device function `(sums, tile, q, s, b, v)`: sums plus half number `b` of a unit of that tile, its four words of
    codes and its word of scales, times the half's x."""
    add = product(columns, tiles, RUN)

    @L.device
    def half(sums, tile, q, s, b, v):
        low = L.u32(L.prmt(s, 0, 0x4040 + 0x202 * b) * 16 + SCALE_BIAS)
        high = L.u32(L.prmt(s, 0, 0x4141 + 0x202 * b) * 16 + SCALE_BIAS)
        for p in L.unroll(2):
            c = L.e2m1x16_small(q[2 * p], q[2 * p + 1])
            for j in L.unroll(2):
                a = (
                    L.bmul2(c[4 * j], low),
                    L.bmul2(c[4 * j + 1], high),
                    L.bmul2(c[4 * j + 2], low),
                    L.bmul2(c[4 * j + 3], high),
                )
                sums = add(sums, tile, a, v, 2 * p + j)
        return sums

    return half


@L.device
def start_of(args, which, row, count, k):
    """Where the tile's units begin."""
    return L.offset(one_of(which, args[0], args[2], args[4]), L.i64(tile_of(row, count)) * L.i32((k >> 7) * UNIT))


@L.device
def alpha(args, which):
    g = L.ldg_f32(one_of(which, args[1], args[3], args[5]), 0)
    return L.div_rn(L.f32(1), g) if args[6] else g


@functools.cache
def reader_of(tiles: int, columns: int, gate: bool, dependent: bool, clamp: bool, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, gate=gate, ordered=dependent, clamp=clamp)
    part_of_x, half = of_x.part, half_of(tiles, columns)

    @L.device
    def locate(args, which, row, count, k):
        return (start_of(args, which, row, count, k),)

    @L.device
    def copy(ring, at, source, unit, k):
        lane = L.lane_id()
        to = L.i32(at + 16 * lane)
        here = L.offset(source[0], L.i32(unit * UNIT + 16 * lane))
        L.cp_async_16(ring, to, here, 0, 16)
        L.cp_async_16(ring, to + 512, here, 512, 16)
        L.cp_async_4(ring, to + 1024 - 12 * lane, here, 1024 - 12 * lane, 4)

    @L.device
    def use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready):
        lane = L.lane_id()
        for b in L.unroll(2):
            v = part_of_x(x, rows, k, unit, kind, b)
            for t in L.unroll(tiles):
                if t < live:
                    here = L.i32(at + UNIT * t)
                    q = L.lds_v4_b32(ring, here + 512 * b + 16 * lane)
                    s = L.lds_b32(ring, here + 1024 + 4 * lane)
                    sums = half(sums, t, q, s, b, v)
        return sums

    return Reader(
        *(SPAN, UNIT, 1, locate, copy, use, alpha),
        ragged=True,
        lift=LIFT,
        take=of_x.take,
        registers=of_x.registers,
        place=of_x.place,
    )


@functools.cache
def straight_of(columns: int) -> Straight:
    """How they are read into registers and multiplied, the same products and sums."""
    half, quad = half_of(1, columns), part_of(4)

    @L.device
    def locate(args, which, row, count, k):
        return (L.offset(start_of(args, which, row, count, k), 16 * L.lane_id()),)

    @L.device
    def load(source, unit, k):
        here = L.i32(unit * UNIT)
        codes = L.ldg_v4_b32_line(source[0], here) + L.ldg_v4_b32_line(source[0], here + 512)
        return (*codes, L.ld_in_b32_stream(source[0], here + 1024 - 12 * L.lane_id()))

    @L.device
    def use(sums, words, source, args, of_x, unit):
        for b in L.unroll(2):
            sums = half(sums, 0, quad(words, b), words[8], b, of_x(unit, b))
        return sums

    return Straight(SPAN, RUN, 9, locate, load, use, alpha, LIFT)


@L.family
def mma_nvfp4_lanes(
    warps: int = 8,
    depth: int = 4,
    tiles: int = 1,
    columns: int = 1,
    blocks: int = 3,
    joined: bool = False,
    pair: bool = False,
    gate: bool = False,
    dependent: bool = False,
    clamp: bool = False,
    cluster: int = 1,
    kept: int = 0,
    abreast: int = 0,
):
    """Weights of up to three projections as `repacked_nvfp4` makes them, U8 `[ceil(n_i/16), k/128, 1152]`, and their
    F32 tensor scales; x BF16 `[m, k]` (`[m, 2k]` with `gate`), y BF16 `[m, n]`; m at most 8·columns.

    Columns of y before `first` are the first projection's, before `second` the second's, then the third's: multiples
    of 16·tiles, or n. With `pair` the first two are gate and up, of n rows each, and y is their gated product. `kind`
    is `gated.kind_of` the activation, with a limit where the kernel has a `clamp`. A code times its block scale is
    exact in BF16; `divides` says that the tensor scale does (compressed-tensors). A block, or a `cluster` of them that
    has `warps` together, computes `tiles` times 16 rows of weights; its warps take units of 128 K in turn, `depth` of
    them in flight. The first `full` blocks or clusters compute that, those after them 16 rows each. `dependent` kernels
    wait for the launch before them once their first weights are on the way. If `kept`, k is 128·warps·kept, warps keep
    x in registers, and blocks or clusters compute 16 rows of weights in turn. If `abreast`, a block has so many tiles
    at once, each of `warps` warps, whose units are loaded into registers, and takes more in turn: k is at most 8192.
    """
    if abreast:
        asked = {"joined": joined, "pair": pair, "gate": gate, "dependent": dependent, "clamp": clamp}
        refuse_all_but_plain("abreast", asked | {"kept": kept > 0}, tiles, cluster)
        run = abreast_of(straight_of(columns), warps, abreast, columns, depth)
    else:
        reader = reader_of(tiles, columns, gate, dependent, clamp, kept > 0)
        run = stream(reader, warps, depth, tiles, columns, joined, pair, dependent, clamp, cluster, kept)

    of_x = L.InMap[L.bf16] if abreast else L.In[L.bf16]

    @L.kernel(launch_bounds=(32 * warps * max(abreast, 1) // cluster, blocks))
    def kernel(
        w0: L.In[L.u8],
        g0: L.In[L.f32],
        w1: L.In[L.u8],
        g1: L.In[L.f32],
        w2: L.In[L.u8],
        g2: L.In[L.f32],
        x: of_x,
        y: L.Out[L.bf16],
        m: L.i32,
        n: L.i32,
        k: L.i32,
        first: L.i32,
        second: L.i32,
        kind: L.i32,
        full: L.i32,
        divides: L.i32,
    ):
        run((w0, g0, w1, g1, w2, g2, divides), x, y, m, n, k, first, second, kind, full)

    return kernel
