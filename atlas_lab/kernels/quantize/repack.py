"""NVFP4 repacked so that what a lane of a warp loads is its own operand of tensor-core products."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
ROWS, SPAN = 16, 128  # weights of a unit: what a warp loads at once
UNIT = ROWS * SPAN // 2 + ROWS * SPAN // 16  # bytes


@L.device
def _scale(code):
    """A block scale, e4m3 and not negative, as 5 bits of exponent and 3 of mantissa: 2^(e - 10) times 1.m, which has no
    subnormal and no zero (0 becomes the smallest, and the codes it scales become 0)."""
    small = L.prmt(0x14100808, 0x1E1C1A18, code & 7) & 0xFF
    return L.u32(small if code < 8 else code + 24)


@L.kernel(launch_bounds=(THREADS, 4))
def repack_nvfp4(codes: L.In[L.u8], scales: L.In[L.e4m3], packed: L.Out[L.u8], units: L.i64, n: L.i32, k: L.i32):
    """Codes `[N, K/2]` and scales `[N, K/16]` to `[ceil(N/16), K/128, 1152]`, rows past N zero; `units` is
    ceil(N/16)·K/128, a thread makes what one lane will load.

    A unit is 16 rows by 128 columns: two blocks of 64 columns, of each 16 bytes a lane, then 4 bytes a lane. Lane l
    owns rows l/4 and l/4 + 8, and of a block's 64 columns the group of 16 number l%4: two pairs of words as
    `e2m1x16_pack` makes them, of the first 8 columns and of the last 8. Its 4 bytes are the scales of both rows in the
    first block, then in the second.
    """
    i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    unit, lane = i >> 5, L.i32(cuda.threadIdx.x) & 31
    if unit < units:
        across = L.i64(k // SPAN)
        tile = unit // across
        groups = L.i64(k // 16)
        first = L.i32(tile * ROWS) + (lane >> 2)
        column = (unit - tile * across) * 8 + (lane & 3)
        at = unit * UNIT
        found = L.u32(0)
        for b in L.unroll(2):
            words = ()
            for h in L.unroll(2):
                row = L.i32(first + 8 * h)
                v = (L.u32(0), L.u32(0))
                s = L.u32(0)
                if row < n:
                    group = L.i64(row) * groups + column + 4 * b
                    s = L.ldg_b8(scales, group)
                    if s != 0:
                        v = L.ldg_v2_b32(codes, group * 8)
                words = words + v
                found = found | _scale(s) << (16 * b + 8 * h)
            low, high = L.e2m1x16_pack(words[0], words[2]), L.e2m1x16_pack(words[1], words[3])
            L.stg_v4_b32(packed, at + 512 * b + 16 * lane, (low[0], low[1], high[0], high[1]))
        L.stg_b32(packed, at + 1024 + 4 * lane, L.u32(found))
