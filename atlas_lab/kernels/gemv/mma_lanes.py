"""y = x·Wᵀ for up to 16 rows of activations on tensor cores, NVFP4 weights repacked into the lanes' own order."""

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import of_unit, product, tile_of
from atlas_lab.kernels.gemv.stream import Reader, one_of, stream

SPAN, UNIT = 128, 1152  # K and bytes of a unit of 16 rows
RUN = 16  # K of a lane in half a unit: one group
# e2m1x16_small is 2^-126 of the codes; scales, 5 and 3 bits of 2^(e - 10), become 2^118 of theirs.
SCALE_BIAS, LIFT = 0x75807580, 256.0


@functools.cache
def reader_of(tiles: int, columns: int, gate: bool, clamp: bool, kept: bool) -> Reader:
    """How they are read and multiplied: the same device functions for all kernels of these parameters."""
    of_x = of_unit(columns, RUN, SPAN, kept=kept, gate=gate, clamp=clamp)
    part_of_x = of_x.part
    add = product(columns, tiles, RUN)

    @L.device
    def locate(args, which, row, count, k):
        tile = tile_of(row, count)
        return (L.offset(one_of(which, args[0], args[2], args[4]), L.i64(tile) * L.i32((k >> 7) * UNIT)),)

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
                            sums = add(sums, t, a, v, 2 * p + j)
        return sums

    @L.device
    def alpha(args, which):
        g = L.ldg_f32(one_of(which, args[1], args[3], args[5]), 0)
        return L.div_rn(L.f32(1), g) if args[6] else g

    return Reader(
        *(SPAN, UNIT, 1, locate, copy, use, alpha),
        ragged=True,
        lift=LIFT,
        take=of_x.take,
        registers=of_x.registers,
        place=of_x.place,
    )


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
    clamp: bool = False,
    cluster: int = 1,
    kept: int = 0,
):
    """Weights of up to three projections as `repacked_nvfp4` makes them, U8 `[ceil(n_i/16), k/128, 1152]`, and their
    F32 tensor scales; x BF16 `[m, k]` (`[m, 2k]` with `gate`), y BF16 `[m, n]`; m at most 8·columns.

    Columns of y before `first` are the first projection's, before `second` the second's, then the third's: multiples
    of 16·tiles, or n. With `pair` the first two are gate and up, of n rows each, and y is their gated product. `kind`
    is `gated.kind_of` the activation, with a limit where the kernel has a `clamp`. A code times its block scale is
    exact in BF16; `divides` says that the tensor scale does (compressed-tensors). A block, or a `cluster` of them that
    has `warps` together, computes `tiles` times 16 rows of weights; its warps take units of 128 K in turn, `depth` of
    them in flight. The first `full` blocks or clusters compute that, those after them 16 rows each. If `kept`, k is
    128·warps·kept, warps keep x in registers, and blocks or clusters compute 16 rows of weights in turn.
    """
    reader = reader_of(tiles, columns, gate, clamp, kept > 0)
    run = stream(reader, warps, depth, tiles, columns, joined, pair, clamp, cluster, kept)

    @L.kernel(launch_bounds=(32 * warps // cluster, blocks))
    def kernel(
        w0: L.In[L.u8],
        g0: L.In[L.f32],
        w1: L.In[L.u8],
        g1: L.In[L.f32],
        w2: L.In[L.u8],
        g2: L.In[L.f32],
        x: L.In[L.bf16],
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
