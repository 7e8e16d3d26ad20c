"""Q4_K repacked so that what a lane of a warp loads is its own operand of tensor-core products."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
ROWS, SPAN, BYTES = 16, 256, 144  # weights of a unit, and bytes of a row of it: one block
UNIT = ROWS * BYTES
SCALES, REST = 2048, 2176  # where the codes of a unit end, and its scales
# Where the lowest bit of each of eight codes lies in a word: the kernel needs one mask and three shifts.
PLACES = (3, 19, 7, 23, 11, 27, 31, 15)


@L.device
def _codes(first, second, high):
    """A word of eight codes: the low or the high nibbles of the bytes of two words."""
    word = L.u32(0)
    for i in L.unroll(8):
        code = L.u32(L.u32((second if i >= 4 else first) >> (8 * (i % 4) + 4 * high)) & 15)
        word = L.u32(word | L.shf_l(code, code, PLACES[i]))
    return word


@L.device
def _four(word, step):
    """The bytes of two words, `step` 0 those of even number and 1 those of odd."""
    return L.prmt(word[0], word[1], 0x7531 if step else 0x6420)


@L.kernel(launch_bounds=(THREADS, 4))
def repack_q4_k(blocks: L.In[L.u8], packed: L.Out[L.u8], units: L.i64, n: L.i32, k: L.i32):
    """Blocks `[N, K/256 x 144]` to `[ceil(N/16), K/256, 2304]`, rows past N zero; `units` is ceil(N/16)·K/256, a thread
    makes what one lane will load.

    A unit is 16 rows by 256 columns: 8 bytes a lane of codes for each group of 32 columns, then 16 bytes for each two
    rows, twice. Lane l owns rows l/4 and l/4 + 8, and of a group the 8 columns from 8·(l%4): a word of the one row and
    a word of the other, where column i has the four bits from bit PLACES[i] on; those of column 6 are bits 31, 0, 1, 2.
    What follows is of rows r = 0 to 7, each with r + 8. First a byte a group, sc in its low 6 bits and the upper two of
    m above: words of groups 0, 2, 4, 6 and 1, 3, 5, 7 of row r, then of row r + 8. Then d of both, dmin of both, and
    the low four bits of m, those of row r + 8 in the high nibbles, in two words of the same groups.
    """
    i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    unit, lane = i >> 5, L.i32(cuda.threadIdx.x) & 31
    if unit < units:
        across = L.i64(k // SPAN)
        tile = unit // across
        first = L.i32(tile * ROWS) + (lane >> 2)
        at = (first * across + unit - tile * across) * BYTES
        here = unit * UNIT
        heads = ()
        for h in L.unroll(2):
            head = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
            if first + 8 * h < n:
                head = L.ldg_v4_b32(blocks, at + 8 * h * across * BYTES)
            heads = heads + head
        for c in L.unroll(4):
            words = ()
            for h in L.unroll(2):
                q = (L.u32(0), L.u32(0))
                if first + 8 * h < n:
                    q = L.ldg_v2_b32(blocks, at + 8 * h * across * BYTES + 16 + 32 * c + 8 * (lane & 3))
                words = words + (_codes(q[0], q[1], 0), _codes(q[0], q[1], 1))
            L.stg_v2_b32(packed, here + 512 * c + 8 * lane, (words[0], words[2]))
            L.stg_v2_b32(packed, here + 512 * c + 256 + 8 * lane, (words[1], words[3]))
        if lane & 3 == 0:
            scales, nibbles = (), ()
            for h in L.unroll(2):
                low, mid, high = heads[4 * h + 1], heads[4 * h + 2], heads[4 * h + 3]
                m = L.u32(mid & 0x3F3F3F3F), L.u32(L.u32(high >> 4) & 0x0F0F0F0F | L.u32(mid >> 2) & 0x30303030)
                sc = L.u32(low & 0x3F3F3F3F), L.u32(high & 0x0F0F0F0F | L.u32(low >> 2) & 0x30303030)
                both = (
                    L.u32(sc[0] | L.u32(m[0] << 2) & 0xC0C0C0C0),
                    L.u32(sc[1] | L.u32(m[1] << 2) & 0xC0C0C0C0),
                )
                rest = L.u32(m[0] & 0x0F0F0F0F), L.u32(m[1] & 0x0F0F0F0F)
                for step in L.unroll(2):
                    scales = scales + (_four(both, step),)
                    nibbles = nibbles + (_four(rest, step),)
            L.stg_v4_b32(packed, here + SCALES + 4 * lane, scales)
            d, least = L.prmt(heads[0], heads[4], 0x5410), L.prmt(heads[0], heads[4], 0x7632)
            low = L.u32(nibbles[0] | nibbles[2] << 4), L.u32(nibbles[1] | nibbles[3] << 4)
            L.stg_v4_b32(packed, here + REST + 4 * lane, (d, least, low[0], low[1]))
