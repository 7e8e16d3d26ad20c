"""Addends of a product whose kernel adds none, as a launch of its own: one rounding more, of the product alone."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 128
VECTOR = 8  # columns a thread, in 16-byte loads


@L.device
def pair(word, before, last, both):
    """Two elements of BF16 plus those of one addend or of both, in FP32, rounded to BF16."""
    low, high = L.bf16_lo(word), L.bf16_hi(word)
    if both:
        low, high = L.add_rn(low, L.bf16_lo(before)), L.add_rn(high, L.bf16_hi(before))
    return L.bf16x2(L.add_rn(low, L.bf16_lo(last)), L.add_rn(high, L.bf16_hi(last)))


@L.family
def added(vector: bool = True):
    """y += `before`, where there are `both`, then `last`: all BF16 `[m, n]`, rows of y `y_row` elements apart, the
    addends whole; sums in FP32, rounded once.

    With `vector` a thread has 8 columns: n and `y_row` are multiples of 8, and all three begin on 16 bytes; without it
    one. The grid is `(m, ceil(n / (128 x 8 or 1)))`. A dependent launch may start at once.
    """
    each = VECTOR if vector else 1

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(
        y: L.InOut[L.bf16],
        before: L.In[L.bf16],
        last: L.In[L.bf16],
        n: L.i32,
        y_row: L.i32,
        both: L.i32,
    ):
        column = L.i32((cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * each)
        row = L.i64(cuda.blockIdx.x)
        L.grid_launch_dependents()
        before, last = L.grid_wait_for(before), L.grid_wait_for(last)
        if column < n:
            at, to = row * n + column, row * y_row + column
            if vector:
                words, a, b = L.ld_v4_b32(y, to), L.ld_waited_v4_b32(before, at), L.ld_waited_v4_b32(last, at)
                out = ()
                for j in L.unroll(4):
                    out = out + (pair(words[j], a[j], b[j], both),)
                L.stg_v4_b32(y, to, out)
            else:
                value = L.ld_bf16(y, to)
                if both:
                    value = L.add_rn(value, L.ld_waited_bf16(before, at))
                L.stg_bf16(y, to, L.add_rn(value, L.ld_waited_bf16(last, at)))

    return kernel
