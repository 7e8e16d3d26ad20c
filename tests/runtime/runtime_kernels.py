"""Small kernels and programs for tests of the runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.runtime.device import Buffer, Device


@L.kernel
def scale_rows(x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, by: L.f32):
    """y[i] = by * x[i], one element a thread."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < n:
        L.stg_bf16(y, i, by * L.ldg_bf16(x, i))


@L.kernel
def add_one(y: L.InOut[L.bf16], n: L.i32):
    """y[i] += 1."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < n:
        L.stg_bf16(y, i, L.ld_bf16(y, i) + L.f32(1))


@L.kernel
def widths(y: L.Out[L.u32], a: L.u8, b: L.i16, c: L.i32, d: L.f32, e: L.i64, f: L.u64):
    """Scalars of every width, as one thread sees them: a, b, c, bits of d, low and high words of e and f."""
    if cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x == 0:
        L.stg_b32(y, 0, L.u32(a))
        L.stg_b32(y, 1, L.u32(b))
        L.stg_b32(y, 2, L.u32(c))
        L.stg_b32(y, 3, L.f32_bits(d))
        L.stg_b32(y, 4, L.u32(e))
        L.stg_b32(y, 5, L.u32(e >> L.i64(32)))
        L.stg_b32(y, 6, L.u32(f))
        L.stg_b32(y, 7, L.u32(f >> L.u64(32)))


@L.family
def reverse(static: int):
    """y[i] = x[words - 1 - i], u32, through dynamic shared memory, beside `static` bytes of static shared memory."""

    @L.kernel
    def kernel(x: L.In[L.u32], y: L.Out[L.u32], words: L.i32):
        staged = L.dynamic_shared(L.u32, 0)
        extra = L.shared(L.u32, static // 4)
        t = cuda.threadIdx.x
        if t == 0:
            L.sts_b32(extra, 0, L.u32(words))
        for i in range(t, words, cuda.blockDim.x):
            L.sts_b32(staged, i, L.ldg_b32(x, i))
        cuda.syncthreads()
        last = L.i32(L.lds_b32(extra, 0)) - 1
        for i in range(t, words, cuda.blockDim.x):
            L.stg_b32(y, i, L.lds_b32(staged, last - i))

    @L.kernel
    def plain(x: L.In[L.u32], y: L.Out[L.u32], words: L.i32):
        staged = L.dynamic_shared(L.u32, 0)
        t = cuda.threadIdx.x
        for i in range(t, words, cuda.blockDim.x):
            L.sts_b32(staged, i, L.ldg_b32(x, i))
        cuda.syncthreads()
        for i in range(t, words, cuda.blockDim.x):
            L.stg_b32(y, i, L.lds_b32(staged, words - 1 - i))

    return kernel if static else plain


@L.kernel
def store_at(y: L.Out[L.u32], i: L.i64, value: L.u32):
    """y[i] = value: out of bounds if so called."""
    if cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x == 0:
        L.stg_b32(y, i, value)


@L.kernel
def spin(flag: L.InOut[L.u32]):
    """Ends when somebody sets flag[0]."""
    while L.ld_acquire_b32(flag, 0) == L.u32(0):
        pass


@L.kernel
def count_up(x: L.InOut[L.u32], n: L.i32):
    """x[i] += 1, late: the signal first, then the wait, then a pause. n is a multiple of the block."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    L.grid_launch_dependents()
    L.grid_wait()
    L.nanosleep(2000)
    if i < n:
        L.stg_b32(x, i, L.ld_b32(x, i) + L.u32(1))


@L.kernel
def digest(w: L.In[L.u32], x: L.In[L.u32], s: L.InOut[L.u32], n: L.i32):
    """s[i] = 31 s[i] + w[i] x[i], w read before the wait."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    q = L.ld_in_b32_stream(w, i)
    L.grid_wait()
    L.grid_launch_dependents()
    if i < n:
        L.stg_b32(s, i, L.u32(31) * L.ld_b32(s, i) + q * L.ld_in_b32(x, i))


@L.kernel
def ranks(y: L.Out[L.u32]):
    """y[block] = its rank in its cluster + 100 times the cluster's size."""
    if cuda.threadIdx.x == 0:
        block = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
        L.stg_b32(y, block, L.u32(L.cluster_rank() + 100 * L.cluster_size()))


@L.kernel(launch_bounds=(64, 1))
def first_tile(m: L.InMap[L.bf16], y: L.Out[L.u32]):
    """The first box of m, 256 bytes, as it lies in shared memory; loaded before the wait."""
    tile = L.dynamic_shared(L.u32, 0)
    bar = L.dynamic_shared(L.u64, 256)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
        L.fence_mbarrier_init()
        L.mbarrier_arrive_expect_tx(bar, 0, 256)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)
    cuda.syncthreads()
    L.mbarrier_wait(bar, 0, 0)
    L.grid_wait()
    L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(tile, cuda.threadIdx.x))


def launch(kernel: Any, threads: int, *args: Any, block: int = 64, **more: Any) -> Launch:
    return Launch(kernel, grid=-(-threads // block), block=block, args=args, **more)


def scale_program(n: int = 100, by: float = 2.0) -> Program:
    """y = by * x + 1 through a temporary."""
    x, t, y = Tensor("bf16", (n,), "x"), Tensor("bf16", (n,), "t"), Tensor("bf16", (n,), "y")
    launches = (
        launch(scale_rows, n, x, t, n, by, label="scale"),
        launch(scale_rows, n, t, y, n, 1.0, label="copy"),
        launch(add_one, n, y, n, label="add"),
    )
    return Program("scale and add", launches, inputs=(x,), outputs=(y,), temporaries=(t,))


def counting_program(n: int) -> Program:
    """Two dependent launches; every run of it enters into s."""
    w, x, s = (Tensor("u32", (n,), name) for name in "wxs")
    launches = (launch(count_up, n, x, n, pdl=True), launch(digest, n, w, x, s, n, pdl=True))
    return Program("count", launches, inputs=(x,), outputs=(s,), persistent=(w,))


def expected_count(w: np.ndarray, x: np.ndarray, runs: int) -> np.ndarray:
    """s after `runs` runs of `counting_program` from zero."""
    s = np.zeros_like(w)
    for i in range(1, runs + 1):
        s = np.uint32(31) * s + w * (x + np.uint32(i))
    return s


def ports(device: Device, program: Program) -> dict[str, Buffer]:
    """A buffer for everything a program names."""
    return {t.name: device.allocate(t.bytes, "ports", name=t.name) for t in program.buffers}


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def expected_scale(x: np.ndarray, by: float) -> np.ndarray:
    """What `scale_program` computes, rounding where it rounds."""
    t = (np.float32(by) * x.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return (t.astype(np.float32) + np.float32(1)).astype(ml_dtypes.bfloat16)
