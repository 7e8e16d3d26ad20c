"""Kernels that measure the card: the fastest way to read memory once."""
# mypy: ignore-errors
# A kernel is annotated with element types, which are values to mypy.

from __future__ import annotations

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.family
def read_xor(warps: int = 8, unroll: int = 8) -> L.Kernel:
    """XOR of `vectors` 16-byte vectors: `out[block * warps + warp]` is the part of one warp.

    A block takes chunks of `32 * warps * unroll` vectors, `gridDim.x` chunks apart, `unroll` loads a thread in
    flight. `data` has `4 * vectors` words, `out` one for each warp of the grid. It reads before it waits for the launch
    before it: in a dependent launch nothing may write `data`.
    """
    threads = 32 * warps
    chunk = threads * unroll

    @L.kernel(launch_bounds=(threads, 1))
    def kernel(data: L.In[L.u32], out: L.Out[L.u32], vectors: L.i64):
        L.grid_launch_dependents()
        t = L.i64(cuda.threadIdx.x)
        acc = L.u32(0)
        start = L.i64(cuda.blockIdx.x) * chunk
        while start < vectors:
            if start + chunk <= vectors:
                for j in range(unroll):
                    v = L.ld_in_v4_b32_line(data, (start + j * threads + t) * 4)
                    acc = L.u32(acc ^ v[0] ^ v[1] ^ v[2] ^ v[3])
            else:
                for j in range(unroll):
                    i = start + j * threads + t
                    if i < vectors:
                        v = L.ld_in_v4_b32_line(data, i * 4)
                        acc = L.u32(acc ^ v[0] ^ v[1] ^ v[2] ^ v[3])
            start += L.i64(cuda.gridDim.x) * chunk
        acc = L.u32(acc ^ L.shfl_xor(acc, 16))
        acc = L.u32(acc ^ L.shfl_xor(acc, 8))
        acc = L.u32(acc ^ L.shfl_xor(acc, 4))
        acc = L.u32(acc ^ L.shfl_xor(acc, 2))
        acc = L.u32(acc ^ L.shfl_xor(acc, 1))
        L.grid_wait()
        if L.lane_id() == 0:
            L.stg_b32(out, cuda.blockIdx.x * warps + L.warp_id(), acc)

    return kernel
