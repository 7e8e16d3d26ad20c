"""Right kernels with asynchronous products, near those that are reported, in any order of threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_simt_wgmma import BYTES, MULTIPLY, WAIT, a_of, b_of, put, ready

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.simt import Buffer, Options, run

WAYS = [
    (0, Options()), (0, Options(checks=False)), *((s, Options(order="random", late_async="random")) for s in (1, 2, 3)),
]  # fmt: skip
ways = pytest.mark.parametrize(("seed", "options"), WAYS, ids=["program", "unchecked", "1", "2", "3"])


@L.kernel(launch_bounds=(256, 1))
def one_thread_tells(x: L.In[L.u32], y: L.InOut[L.f32], flag: L.InOut[L.u32]):
    """That one thread of the warpgroup waited is enough: the product is the whole group's."""
    s = ready()
    if L.warpgroup_id() == 0:
        L.wgmma_fence()
        acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
        L.wgmma_commit()
        acc = WAIT(acc, 0)
        if cuda.threadIdx.x == 77:
            L.st_release_b32(flag, 0, 1)
        put(y, acc)
    else:
        while L.ld_acquire_b32(flag, 0) == 0:
            L.nanosleep(20)
        L.sts_b32(s, 4 * L.warpgroup_thread(), 0)


@ways
def test_any_thread_of_the_warpgroup_may_say_that_it_waited(seed, options):
    x, y, flag = Buffer("x", 4), Buffer("y", 4 * 128), Buffer.of("flag", np.zeros(1, np.uint32))
    run(one_thread_tells, grid=1, block=256, args=(x, y, flag), shared_bytes=BYTES, seed=seed, options=options)
    assert not y.array(np.float32).any()


@L.kernel(launch_bounds=(256, 1))
def one_warp_comes_later(x: L.In[L.u32], y: L.Out[L.f32]):
    """A warp that still waits at a barrier with another warpgroup comes to the product when it may."""
    s = ready()
    if L.warp_id() == 7:
        L.nanosleep(100)
        L.barrier_arrive(1, 64)
    if L.warpgroup_id() == 0:
        if L.warp_id() == 3:
            L.barrier_sync(1, 64)
        L.wgmma_fence()
        acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
        L.wgmma_commit()
        put(y, WAIT(acc, 0))


@ways
def test_warps_of_a_warpgroup_may_come_at_different_times(seed, options):
    y = Buffer("y", 4 * 128)
    args = (Buffer("x", 4), y)
    run(one_warp_comes_later, grid=1, block=256, args=args, shared_bytes=BYTES, seed=seed, options=options)
    assert not y.array(np.float32).any()


def in_static_memory(swizzle: int):
    """Two groups on one chain, which needs no fence in between, from memory whose alignment is 16 bytes."""

    @L.kernel(launch_bounds=(128, 1))
    def kernel(x: L.In[L.u8], y: L.Out[L.f32]):
        s = L.shared(L.u8, 4096)
        for i in range(cuda.threadIdx.x * 16, 4096, 2048):
            L.sts_v4_b32(s, i, L.ldg_v4_b32(x, i))
        L.fence_proxy_async()
        cuda.syncthreads()
        a = L.matrix_descriptor(s, 0, swizzle, 128, 256)
        b = L.matrix_descriptor(s, 2048, swizzle, 128, 256)
        L.wgmma_fence()
        acc = MULTIPLY(L.zeros(4), a, b, 0)
        L.wgmma_commit()
        acc = MULTIPLY(acc, a, b, 1)
        L.wgmma_commit()
        acc = WAIT(acc, 1)
        acc = WAIT(acc, 0)
        t = cuda.threadIdx.x
        for j in L.unroll(4):
            L.stg_f32(y, 8 * (16 * (t >> 5) + ((t & 31) >> 2) + 8 * (j >> 1)) + 2 * (t & 3) + (j & 1), acc[j])

    return kernel


@ways
def test_swizzles_are_of_the_whole_address(seed, options):
    """Static memory may lie at any multiple of 16, so only layouts without a swizzle are right there."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (rows, 16)).astype(ml_dtypes.bfloat16) for rows in (64, 8))
    image = np.zeros(4096, np.uint8)

    def multiplied(swizzle: int) -> np.ndarray:
        y = Buffer("y", 4 * 64 * 8)
        args = (Buffer.of("x", image), y)
        run(in_static_memory(swizzle), grid=1, block=128, args=args, seed=seed, options=options)
        return y.array(np.float32, (64, 8))

    exact = 2 * a.astype(np.float64) @ b.astype(np.float64).T
    for m, at in ((a, 0), (b, 2048)):  # core matrices of 8 rows by 16 bytes, those of K 128 bytes apart
        cores = m.view(np.uint8).reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3)
        image[at : at + m.nbytes] = cores.ravel()
    assert np.array_equal(multiplied(0), exact)
    for m, at in ((a, 0), (b, 2048)):  # 32-byte rows, as they would lie from a multiple of 256
        rows = m.view(np.uint8).reshape(-1, 2, 16).copy()
        rows[np.arange(len(rows)) % 8 >= 4] = rows[np.arange(len(rows)) % 8 >= 4][:, ::-1]
        image[at : at + m.nbytes] = rows.ravel()
    assert not np.array_equal(multiplied(32), exact)
