"""y = x·Wᵀ on warpgroups (wgmma), NVFP4 weights in GGML's blocks (`block_nvfp4`), tiles brought by TMA.

The product is computed transposed, as in `wgmma_nvfp4`: W is operand A, made BF16 in registers, x operand B. A stage is
256 of K: four blocks of 36 bytes a row, one of which a lane owns. Its words lie 9 apart and those of the next row 36:
32 lanes that load a word each meet every bank once.
"""

from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, Ring, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, own_group, uniform, walk

BK = 256  # K of one stage
RUN, APART = BK // 4, 8  # K of a lane: a block; how far the codes of a byte lie apart
BLOCK, W_ROW = 36, 4 * 36  # bytes of a block, and of a row of a stage
ATOM = 1024  # bytes that tiles swizzled by 128 bytes start at a multiple of
QUARTERS = BK * 2 // ROW  # tiles of x of a stage, 64 of K each


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage: 256 of K of bm rows of x, in four tiles, and of bn rows of W."""
    return QUARTERS * bm * ROW + -(-bn * W_ROW // ATOM) * ATOM


@L.device
def scales_of(tiles, at):
    """The four block scales of the block at byte `at`, as two words of BF16."""
    return L.e4m3x4_bf16x2(L.lds_b32(tiles, at))


@L.device
def weights(tiles, at, quarter, upper, lower):
    """The four fragments (m64n*k16) of 16 weights of the blocks of rows g and g + 8, whose first begins at byte `at`;
    `upper` and `lower` are the blocks' scales. Exact in BF16."""
    pick = 0x1010 + 0x2222 * (quarter & 1)
    high, low = L.prmt(upper[quarter >> 1], 0, pick), L.prmt(lower[quarter >> 1], 0, pick)
    out = ()
    for half in L.unroll(2):
        here = at + 4 + 8 * quarter + 4 * half
        p, q = L.e2m1x8_bf16x2(L.lds_b32(tiles, here)), L.e2m1x8_bf16x2(L.lds_b32(tiles, here + 8 * W_ROW))
        for j in L.unroll(2):
            made = (
                L.bmul2(p[2 * j], high),
                L.bmul2(q[2 * j], low),
                L.bmul2(p[2 * j + 1], high),
                L.bmul2(q[2 * j + 1], low),
            )
            out = out + (made,)
    return out


class Bring(NamedTuple):
    """Device functions of the loading thread."""

    w: L.DeviceFunction
    x: L.DeviceFunction


def bringing(of_stages: Ring, bm: int, stage: int) -> Bring:
    """`w(s, w, col0, step)` and `x(s, x, row0, step)`: what a stage of `stage` bytes holds, x before W."""

    @L.device
    def bring_w(s, w, col0, step):
        tiles = L.dynamic_shared(L.u8, 0)
        L.tma_load_2d(tiles, s * stage + QUARTERS * bm * ROW, w, (col0, step * W_ROW), of_stages.full(), s)

    @L.device
    def bring_x(s, x, row0, step):
        for quarter in L.unroll(QUARTERS):
            of_stages.rows(s * stage + quarter * (bm * ROW), x, row0, step * BK + quarter * (ROW // 2), s)

    return Bring(bring_w, bring_x)


@L.family
def wgmma_block_nvfp4(bm: int, bn: int, stages: int, blocks: int = 1, raster: int = 16):
    """x BF16 `[m, k]` in the lanes' order (`quantize_nvfp4_lanes(64, apart=8)`) as a map of boxes `[bm, 64]` swizzled
    by 128 bytes; W U8 `[n, k/64 x 36]` as one of boxes `[bn, 144]`; an F32 tensor scale, which divides where `divides`
    is 1 and is not there where it is 2; y BF16 `[m, n]` row-major; any m and n, k a multiple of 256.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs, `blocks` of them on an SM. Codes times block scales are
    exact in BF16; sums run 16 at a time in FP32, 4 of each of four neighbouring blocks.
    """
    consumers = bn // GROUP_ROWS
    w_at = QUARTERS * bm * ROW
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, w_at + bn * W_ROW, out_at + turn_bytes(bn), bm, 1, consumers)
    of_tiles = walk(bm, bn, raster, 1)
    multiply, wait, count = L.wgmma(L.bf16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    store = transposed_storer(bm, out_at, lift=1.0)
    parts_of = meeting(warps_of(bn), count, 1)
    loading, multiplying = roles(bn)
    bring = bringing(of_stages, bm, stage)
    load = loader(of_stages, of_tiles, BK, stages, bring.w, bring.x)

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
        of_stages.begin()
        group = own_group()
        if group == consumers:
            loading()
            if L.warpgroup_thread() == 0:
                load(w, x, m, n, k, cut)
        else:
            multiplying()
            tiles = L.dynamic_shared(L.u8, 0)
            warp = L.warp_id()
            lane = L.lane_id()
            mine = L.i32(w_at + (16 * warp + (lane >> 2)) * W_ROW + BLOCK * (lane & 3))
            alpha = L.f32(1)
            if divides < 2:
                alpha = L.ldg_f32(tensor_scale, 0)
            if divides == 1:
                alpha = L.div_rn(L.f32(1), alpha)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // BK)
            place = of_tiles.first(m, n, steps, cut)
            tile, begin, end = uniform(of_tiles.part(place, steps))
            while begin < end:
                row0, col0 = of_tiles.at(tile, m, n)
                acc = L.zeros(count)
                for step in range(begin, end):
                    of_stages.take(s, phase)
                    at = L.i32(s * stage + mine)
                    upper, lower = scales_of(tiles, at), scales_of(tiles, at + 8 * W_ROW)
                    for quarter in L.unroll(QUARTERS):
                        # two sets of registers: one is made while the products that read the other run
                        a = weights(tiles, at, quarter, upper, lower)
                        if quarter == QUARTERS - 1:
                            L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                        part = L.matrix_descriptor(tiles, s * stage + quarter * (bm * ROW), 128, 16, 1024)
                        L.wgmma_fence()
                        acc = multiply(acc, a[0], part, L.i32(step > begin) if quarter == 0 else 1)
                        acc = multiply(acc, a[1], L.descriptor_advance(part, 32), 1)
                        acc = multiply(acc, a[2], L.descriptor_advance(part, 64), 1)
                        acc = multiply(acc, a[3], L.descriptor_advance(part, 96), 1)
                        L.wgmma_commit()
                        acc = wait(acc, 1)
                        if quarter == 0 and step > begin:
                            of_stages.release(of_stages.before(s))
                    s, phase = of_stages.after(s, phase)
                acc = wait(acc, 0)
                of_stages.release(of_stages.before(s))
                if end < steps:
                    parts_of.leave(parts, flags, acc, warp)
                else:
                    if begin > 0:
                        acc = parts_of.add(parts, flags, acc, warp, place, tile, begin, steps)
                    store(y, acc, warp, row0, L.i32(col0 + 16 * warp), m, n, n, n, (alpha, alpha))
                place = of_tiles.after(place, steps)
                tile, begin, end = uniform(of_tiles.part(place, steps))

    return kernel
