"""Q2_0 as stored to BF16."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 256
PIECE = 16  # weights of a thread: a word of codes
# The bytes of -1, 0, 1 and 2 in BF16, by code.
LOW, HIGH = 0x00800080, 0x403F00BF


@L.family
def dequantize_q2_0(group: int = 64):
    """Blocks U8 `[N, K/group x (2 + group/4)]` to BF16 `[N, K]`; `pieces` is N·K/16, a thread makes one. A weight is
    code - 1, exact, times its scale rounded to BF16, exactly. The first `words` flags become 0, for the product whose
    blocks meet by them."""
    size = 2 + group // 4

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(blocks: L.In[L.u8], out: L.Out[L.bf16], flags: L.Out[L.u32], pieces: L.i64, words: L.i32):
        i = L.i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        word = L.i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        while word < words:
            L.stg_b32(flags, word, L.u32(0))
            word = L.i32(word + cuda.gridDim.x * THREADS)
        if i < pieces:
            block = i // (group // PIECE)
            at = block * size
            code = at + 2 + 4 * (i - block * (group // PIECE))
            # blocks are aligned to 2
            q = L.u32(L.ldg_b16(blocks, code) | L.ldg_b16(blocks, code + 2) << 16)
            d = L.f16_lo(L.ldg_b16(blocks, at))
            scale = L.bf16x2(d, d)
            made = ()
            for j in L.unroll(PIECE // 2):
                first, second = L.u32(q >> (4 * j)) & 3, L.u32(q >> (4 * j + 2)) & 3
                pick = L.u32(first * 0x11 + second * 0x1100 + 0x4040)
                made = made + (L.bmul2(L.prmt(LOW, HIGH, pick), scale),)
            L.stg_v4_b32(out, i * PIECE, made[:4])
            L.stg_v4_b32(out, i * PIECE + 8, made[4:])

    return kernel
