"""NVFP4 repacked so that a lane of a warp loads 16 bytes that are its own operand of a tensor-core product."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
ROWS, SPAN = 16, 64  # weights of a tile: what a warp loads at once


@L.kernel(launch_bounds=(THREADS, 4))
def repack_nvfp4(
    codes: L.In[L.u8],
    scales: L.In[L.e4m3],
    packed: L.Out[L.u8],
    packed_scales: L.Out[L.e4m3],
    tiles: L.i64,
    k: L.i32,
):
    """Codes `[N, K/2]` and scales `[N, K/16]` to `[N/16, K/64, 32, 16]` and `[N/16, K/64, 32, 2]`; `tiles` is
    N/16·K/64, a thread makes what one lane will load.

    Lane l owns rows l/4 and l/4 + 8 of a tile, and of its 64 columns the group of 16 number l%4. Its word j, of four,
    holds columns 4j and 4j + 1 of the first row, the same of the second, then 4j + 2 and 4j + 3 of both: the operand A
    of `mma.m16n8k16`, register by register, if the K axis of both operands is permuted alike. Then its two scales.
    """
    i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    tile, lane = i >> 5, L.i32(cuda.threadIdx.x) & 31
    if tile < tiles:
        across = L.i64(k // SPAN)
        row = tile // across * ROWS + (lane >> 2)
        group = (tile - tile // across * across) * 4 + (lane & 3)
        groups = L.i64(k // 16)
        a = L.ldg_v2_b32(codes, (row * groups + group) * 8)
        b = L.ldg_v2_b32(codes, ((row + 8) * groups + group) * 8)
        v = (
            L.prmt(a[0], b[0], 0x5140),
            L.prmt(a[0], b[0], 0x7362),
            L.prmt(a[1], b[1], 0x5140),
            L.prmt(a[1], b[1], 0x7362),
        )
        L.stg_v4_b32(packed, i * 16, v)
        s = L.ldg_b8(scales, row * groups + group) | L.ldg_b8(scales, (row + 8) * groups + group) << 8
        L.stg_b16(packed_scales, i * 2, L.u32(s))
