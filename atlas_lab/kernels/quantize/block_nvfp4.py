"""NVFP4 to the blocks GGML stores it in: a shuffle of bits, no number changes."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
BLOCK = 64  # weights


@L.device
def _spread(nibbles):
    """Four nibbles, in the low 16 bits, to the low halves of four bytes."""
    x = L.u32((nibbles | nibbles << 8) & 0x00FF00FF)
    return L.u32((x | x << 4) & 0x0F0F0F0F)


@L.kernel(launch_bounds=(THREADS, 4))
def nvfp4_to_blocks(codes: L.In[L.u8], scales: L.In[L.e4m3], blocks: L.Out[L.u8], count: L.i64):
    """Codes `[N, K/2]` and scales `[N, K/16]` to blocks `[N, K/64 x 36]`; `count` is N·K/64, a thread makes one.

    A block is four scales, their sign bits cleared, then for each group of 16 weights eight bytes: weight j in the
    low nibble of byte j, weight 8 + j in the high one.
    """
    i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i < count:
        low = L.ldg_v4_b32(codes, i * (BLOCK // 2))
        high = L.ldg_v4_b32(codes, i * (BLOCK // 2) + 16)
        L.stg_b32(blocks, i * 36, L.ldg_b32(scales, i * 4) & 0x7F7F7F7F)
        words = low + high
        for g in L.unroll(4):
            a, b = words[2 * g], words[2 * g + 1]
            at = i * 36 + 4 + 8 * g
            L.stg_b32(blocks, at, L.u32(_spread(a & 0xFFFF) | _spread(b & 0xFFFF) << 4))
            L.stg_b32(blocks, at + 4, L.u32(_spread(a >> 16) | _spread(b >> 16) << 4))
