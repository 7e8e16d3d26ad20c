"""Copying a tensor into a part of another: what fusing weights is."""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

THREADS = 256
UNROLL = 4


@L.family
def copy_elements(dtype: L.Scalar = L.u8, unit: int = 16):
    """`count` units of `unit` bytes (16, 4, 2 or 1, and no less than an element) from x to y.

    Both start at a multiple of the unit. A block copies 1024 units.
    """
    step = unit // dtype.bytes  # elements
    if unit == 16:
        load, store = L.ldg_v4_b32_stream, L.stg_v4_b32
    elif unit == 4:
        load, store = L.ldg_b32, L.stg_b32
    elif unit == 2:
        load, store = L.ldg_b16, L.stg_b16
    else:
        load, store = L.ldg_b8, L.stg_b8

    @L.kernel(launch_bounds=(THREADS, 4))
    def kernel(x: L.In[dtype], y: L.Out[dtype], count: L.i64):
        first = L.i64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        for u in L.unroll(UNROLL):
            i = first + u * THREADS
            if i < count:
                if unit == 16:
                    v = load(x, i * step)
                    store(y, i * step, v)
                else:
                    store(y, i * step, load(x, i * step))

    return kernel
