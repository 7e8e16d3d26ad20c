"""The gated product as a launch of its own."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.activation.gated import gated_of
from atlas_lab.kernels.lang import cuda

THREADS = 128
VECTOR = 8  # columns a thread, in 16-byte loads


@L.family
def gated_product(vector: bool = True, clamp: bool = False):
    """h = activation(g)·u, all BF16 `[m, i]`; rows of g are `g_row` elements apart, those of u `u_row`, h is whole.

    `kind` is `gated.kind_of` an activation, with a limit where the kernel has a `clamp`. With `vector` a thread makes 8
    columns: i, `g_row` and `u_row` are multiples of 8, and g and u begin on 16 bytes; without it one. The grid is
    `(m, ceil(i / (128 x 8 or 1)))`.
    """
    gated = gated_of(clamp)
    each = VECTOR if vector else 1
    load = L.ld_waited_v4_b32 if vector else L.ld_waited_bf16

    @L.kernel(launch_bounds=(THREADS, 8))
    def kernel(g: L.In[L.bf16], u: L.In[L.bf16], h: L.Out[L.bf16], i: L.i32, g_row: L.i32, u_row: L.i32, kind: L.i32):
        column = L.i32((cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * each)
        row = L.i64(cuda.blockIdx.x)
        L.grid_launch_dependents()
        g, u = L.grid_wait_for(g), L.grid_wait_for(u)
        if column < i:
            a = load(g, row * g_row + column)
            b = load(u, row * u_row + column)
            if vector:
                out = ()
                for j in L.unroll(4):
                    low = gated(L.bf16_lo(a[j]), L.bf16_lo(b[j]), kind)
                    out = out + (L.bf16x2(low, gated(L.bf16_hi(a[j]), L.bf16_hi(b[j]), kind)),)
                L.stg_v4_b32(h, row * i + column, out)
            else:
                L.stg_bf16(h, row * i + column, gated(a, b, kind))

    return kernel
