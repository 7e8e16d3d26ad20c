"""y = x·Wᵀ on warpgroups (wgmma), NVFP4 weights in GGML's blocks as stored, tiles brought by TMA.

The product is computed transposed, as in `wgmma_nvfp4`: W is operand A, made BF16 in registers, x operand B, in shared
memory. A block is 36 bytes, 64 of K, and a stage 128 of K: the copy engine moves rows of a multiple of 16 bytes, so
that a stage is bytes 0 to 79 or 64 to 143 of the 144 that 256 of K are, 8 bytes too many. Rows of 80 bytes put what a
warp loads at once, four words of 8 rows, into different banks.

Of 64 of K lane 4g + t has word t of the first and of the second half's codes, of rows g and g + 8: 8 codes each of the
groups of 16 number t / 2 and 2 + t / 2. Codes 16 bits of a word apart become a pair by shifts and masks; x has its K in
the same order (`quantize.nvfp4_blocks`).
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_nvfp4 import alpha_of
from atlas_lab.kernels.gemm.wgmma_parts import meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS, ROW, own_group, ring, roles, threads_of, warps_of
from atlas_lab.kernels.gemm.wgmma_transposed import HALVES, bring_halves, transposed_storer, turn_bytes
from atlas_lab.kernels.gemm.wgmma_walk import loader, walk

BK = 128  # K of one stage
PITCH = 80  # bytes of a row of W in a stage
BLOCK_BYTES = 36  # of 64 of K
MAGNITUDE, SIGN = 0x01C001C0, 0x80008000  # of a pair of codes as bf16, times 2^-126
# e4m3 as bf16 is 2^-120 of itself; both factors make it 2^118 times, so that weights are 2^-8 of themselves
TO_SCALE, TO_FACTOR = 0x7B807B80, 0x7A807A80


def stage_bytes(bm: int, bn: int) -> int:
    """Bytes of a stage: 128 of K of bm rows of x, in two tiles, and of bn rows of W."""
    return 2 * bm * ROW + bn * PITCH


@L.device
def _factor(scales, pick):
    """A block's scale number `pick` tells, twice."""
    return L.bmul2(L.bmul2(L.u32(L.prmt(scales, 0, pick) << 4), L.u32(TO_SCALE)), L.u32(TO_FACTOR))


@L.device
def _pairs(word, factor):
    """The codes of 4 consecutive K and of those 8 further on, in pairs two apart: (0, 2), (1, 3), (8, 10), (9, 11)."""
    return (
        L.bmul2(L.lop3(L.u32(word << 6), MAGNITUDE, L.u32(word << 12) & SIGN, 0xEA), factor),  # a & b | c
        L.bmul2(L.lop3(L.u32(word >> 2), MAGNITUDE, L.u32(word << 4) & SIGN, 0xEA), factor),
        L.bmul2(L.lop3(L.u32(word << 2), MAGNITUDE, L.u32(word << 8) & SIGN, 0xEA), factor),
        L.bmul2(L.lop3(L.u32(word >> 6), MAGNITUDE, word & SIGN, 0xEA), factor),
    )


@L.device
def pick_of(lane):
    """What tells the scale of a lane's first word; that of the second is 0x202 more."""
    return L.u32(0x4040 + 0x0101 * ((lane & 3) >> 1))


@L.device
def weights(tiles, at, pick):
    """The four fragments (m64n*k16) of 64 of K, times 2^-8: exact in BF16. The block of the lane's row g is at byte
    `at`, that of g + 8 eight rows further on."""
    codes = at + 4 + 4 * (L.lane_id() & 3)
    upper, lower = L.lds_b32(tiles, at), L.lds_b32(tiles, at + 8 * PITCH)
    out = ()
    for half in L.unroll(2):
        here = codes + 16 * half
        p = _pairs(L.lds_b32(tiles, here), _factor(upper, pick + 0x202 * half))
        q = _pairs(L.lds_b32(tiles, here + 8 * PITCH), _factor(lower, pick + 0x202 * half))
        out = out + ((p[0], q[0], p[1], q[1]), (p[2], q[2], p[3], q[3]))
    return out


@L.device
def _alpha(tensor_scale, convention):
    if convention == 2:
        return L.f32(1)
    return alpha_of(tensor_scale, convention)


@L.family
def wgmma_block_nvfp4(bm: int, bn: int, stages: int, blocks: int = 1, raster: int = 16):
    """x BF16 `[m, k]` as `quantize_nvfp4_blocks` orders it, as a map of boxes `[bm, 64]` swizzled by 128 bytes; W U8
    `[n, 36·k/64]`, blocks of the format `block_nvfp4`, as one of boxes `[bn, 80]`; its F32 tensor scale, which
    multiplies where `convention` is 0 and divides where it is 1, where it is 2 there is none; y BF16 `[m, n]`, its rows
    `pitch` elements apart, `odd` as in `transposed_storer`; any m and n, k a multiple of 256.

    Tiles of bm (a multiple of 16) x bn (64 or 128) outputs, `blocks` of them on an SM. Codes times block scales are
    exact in BF16; sums run in ascending groups of 64 K, 16 at a time, in FP32; the tensor scale is applied to them.
    """
    consumers = bn // GROUP_ROWS
    w_at = 2 * bm * ROW
    stage = stage_bytes(bm, bn)
    out_at = stages * stage
    of_stages = ring(stages, stage, out_at + turn_bytes(bn), bm, 1, consumers, tiles=HALVES)
    of_tiles = walk(bm, bn, raster, 1)
    multiply, wait, count = L.wgmma(L.bf16, bm, a_registers=True), L.wgmma_wait(bm // 2), bm // 2
    store = transposed_storer(bm, out_at)
    parts_of = meeting(warps_of(bn), count, 1)
    loading, multiplying = roles(bn, of_stages)

    @L.device
    def bring_w(s, w, col0, step):
        first = L.i32(step >> 1) * (4 * BLOCK_BYTES) + L.i32(step & 1) * 64
        L.tma_load_2d(L.dynamic_shared(L.u8, 0), s * stage + w_at, w, (col0, first), of_stages.full(), s)

    bring_x = bring_halves(of_stages, bm, stage)
    load = loader(of_stages, of_tiles, BK, stages, bring_w, bring_x)

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
        convention: L.i32,
        pitch: L.i32,
        odd: L.i32,
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
            lane = L.lane_id()
            pick = pick_of(lane)
            mine = L.i32(w_at + (16 * warp + (lane >> 2)) * PITCH)
            alpha = _alpha(tensor_scale, convention)
            s, phase = L.i32(0), L.u32(0)
            steps = L.i32(k // BK)
            of_stages.take(s, phase)
            tile, begin, end, row0, col0 = of_stages.part(s)
            while begin < end:
                acc = L.zeros(count)
                for step in range(begin, end):
                    of_stages.take(s, phase)
                    at = L.i32(s * stage + mine + 8 * (step & 1))
                    x0 = L.matrix_descriptor(tiles, s * stage, 128, 16, 1024)
                    x1 = L.matrix_descriptor(tiles, s * stage + bm * ROW, 128, 16, 1024)
                    # two sets of registers: one is made while the products that read the other run
                    a = weights(tiles, at, pick)
                    L.wgmma_fence()
                    for j in L.unroll(4):
                        acc = multiply(
                            acc, a[j], L.descriptor_advance(x0, 32 * j), L.i32(step > begin) if j == 0 else 1
                        )
                    L.wgmma_commit()
                    acc = wait(acc, 1)
                    if step > begin:
                        of_stages.release(of_stages.before(s))
                    b = weights(tiles, at + BLOCK_BYTES, pick)
                    L.cuda.syncwarp()  # all lanes have their weights: the stage is released after its products
                    L.wgmma_fence()
                    for j in L.unroll(4):
                        acc = multiply(acc, b[j], L.descriptor_advance(x1, 32 * j), 1)
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
                    store(y, acc, warp, row0, col0 + 16 * warp, m, n, pitch, odd, (alpha, alpha))
                of_stages.take(s, phase)
                tile, begin, end, row0, col0 = of_stages.part(s)
            of_stages.release(s)

    return kernel
