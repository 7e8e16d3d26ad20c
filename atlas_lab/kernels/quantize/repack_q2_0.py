"""Q2_0 repacked so that what a lane of a warp loads is its own operand of tensor-core products."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
ROWS, SPAN = 16, 128  # weights of a unit: what a warp loads at once
CODES = ROWS * SPAN // 4  # bytes of a unit, its scales after them
ZEROS = 0x55555555  # sixteen codes of 1, which stands for 0
# Codes change places in a word: those under a mask with those so many bits above.
SHIFTS, MASKS = (2, 4, 8), (0x0C0C0C0C, 0x00F000F0, 0x0000FF00)


@L.device
def _parted(word):
    """Sixteen codes, those of even columns to the low half and those of odd ones to the high half."""
    for i in L.unroll(3):
        moved = L.u32((word ^ word >> SHIFTS[i]) & MASKS[i])
        word = L.u32(word ^ moved ^ moved << SHIFTS[i])
    return word


@L.family
def repack_q2_0(group: int = 64):
    """Blocks `[N, K/group x (2 + group/4)]` to `[ceil(N/16), K/128, 512 + 4096/group]`, rows past N zero (codes of 1
    under scales of 0); `units` is ceil(N/16)·K/128, a thread makes what one lane will load.

    A unit is 16 rows by 128 columns: 16 bytes a lane of codes, then f16 scales. Lane l owns rows l/4 and l/4 + 8, and
    of each half of the columns the 16 from 16·(l%4): a word of the one row and a word of the other, of the first half,
    then of the second. In a word, column 2i lies at bit 2i and column 2i + 1 at bit 16 + 2i. The scales are, for rows
    0 to 7 and each group of columns, that of the row and that of the row 8 below.
    """
    size = 2 + group // 4
    groups = SPAN // group
    whole = CODES + 2 * ROWS * groups

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(blocks: L.In[L.u8], packed: L.Out[L.u8], units: L.i64, n: L.i32, k: L.i32):
        i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        unit, lane = i >> 5, L.i32(cuda.threadIdx.x) & 31
        if unit < units:
            across = L.i64(k // SPAN)
            tile = unit // across
            first, run = L.i32(tile * ROWS) + (lane >> 2), lane & 3
            step = across * groups * size  # bytes of a row
            at = first * step + (unit - tile * across) * groups * size
            words = ()
            for b in L.unroll(2):
                for h in L.unroll(2):
                    v = L.u32(ZEROS)
                    if first + 8 * h < n:
                        # blocks are aligned to 2
                        code = at + 8 * h * step + 64 * b // group * size + 2 + 64 * b % group // 4 + 4 * run
                        v = L.u32(L.ldg_b16(blocks, code) | L.ldg_b16(blocks, code + 2) << 16)
                    words = words + (_parted(v),)
            L.stg_v4_b32(packed, unit * whole + 16 * lane, words)
            if run < groups:
                s = L.u32(0)
                for h in L.unroll(2):
                    if first + 8 * h < n:
                        s = L.u32(s | L.ldg_b16(blocks, at + 8 * h * step + run * size) << 16 * h)
                L.stg_b32(packed, unit * whole + CODES + 4 * ((lane >> 2) * groups + run), s)

    return kernel
