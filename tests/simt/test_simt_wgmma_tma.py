"""Tiles brought by TMA, multiplied by warpgroups: C = A·Bᵀ through a ring, and its faulty siblings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.runtime.device import open_device

BM, BK = 128, 64
RNG = np.random.default_rng(31)


@L.device
def pass_by(bars, i, parity):
    """What stands for a wait that is missing."""


@L.family
def gemm(bn: int, stages: int, fault: str = ""):
    """A warp loads, two warpgroups of 64 rows multiply, a group in flight while the next is issued; y: [M, N]."""
    multiply, wait, count = L.wgmma(L.bf16, bn), L.wgmma_wait(bn // 2), bn // 2
    stage_bytes = (BM + bn) * BK * 2
    bars_at = stages * stage_bytes
    wait_full = pass_by if fault == "no full" else L.mbarrier_wait
    early = fault == "released early"
    running = 1

    @L.kernel(launch_bounds=(384, 1))
    def kernel(a: L.InMap[L.bf16], b: L.InMap[L.bf16], y: L.Out[L.f32], m: L.i32, n: L.i32, k: L.i32):
        s = L.dynamic_shared(L.u8, 0)
        full = L.dynamic_shared(L.u64, bars_at)
        empty = L.dynamic_shared(L.u64, bars_at + 8 * stages)
        group = L.warpgroup_id()
        if cuda.threadIdx.x == 0:
            for i in range(stages):
                L.mbarrier_init(full, i, 1)
                L.mbarrier_init(empty, i, 2)
            L.fence_mbarrier_init()
        cuda.syncthreads()
        m0 = cuda.blockIdx.x * BM
        n0 = cuda.blockIdx.y * bn
        steps = k // BK
        if group == 2:
            L.setmaxnreg_dec(40)
            if cuda.threadIdx.x == 256:
                for t in range(steps):
                    at = t % stages
                    L.mbarrier_wait(empty, at, L.u32((t // stages & 1) ^ 1))
                    L.mbarrier_arrive_expect_tx(full, at, stage_bytes)
                    L.tma_load_2d(s, at * stage_bytes, a, (m0, t * BK), full, at)
                    L.tma_load_2d(s, at * stage_bytes + BM * BK * 2, b, (n0, t * BK), full, at)
        else:
            L.setmaxnreg_inc(232)
            acc = L.zeros(count)
            for t in range(steps):
                at = t % stages
                wait_full(full, at, L.u32(t // stages & 1))
                left = L.matrix_descriptor(s, at * stage_bytes + group * 8192, 128, 16, 1024)
                right = L.matrix_descriptor(s, at * stage_bytes + BM * BK * 2, 128, 16, 1024)
                L.wgmma_fence()
                for j in L.unroll(4):
                    acc = multiply(
                        acc, L.descriptor_advance(left, 32 * j), L.descriptor_advance(right, 32 * j), L.i32(t + j > 0)
                    )
                L.wgmma_commit()
                if early and L.warpgroup_thread() == 0:
                    L.mbarrier_arrive(empty, at)
                acc = wait(acc, running)
                if not early and t > 0 and L.warpgroup_thread() == 0:
                    L.mbarrier_arrive(empty, (t - 1) % stages)
            acc = wait(acc, 0)
            t = L.warpgroup_thread()
            row = m0 + 64 * group + 16 * (t >> 5) + ((t & 31) >> 2)
            for j in L.unroll(count):
                r = row + 8 * ((j >> 1) & 1)
                c = n0 + 8 * (j >> 2) + 2 * (t & 3) + (j & 1)
                if r < m and c < n:
                    L.stg_f32(y, r * n + c, acc[j])

    return kernel


def run(
    device, m: int, n: int, k: int, bn: int = 64, stages: int = 3, fault: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    a, b = (RNG.integers(-3, 4, (rows, k)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    ta, tb, ty = Tensor("bf16", (m, k), "a"), Tensor("bf16", (n, k), "b"), Tensor("f32", (m, n), "y")
    maps = TensorMap(ta, (BM, BK), 128), TensorMap(tb, (bn, BK), 128)
    shared = stages * ((BM + bn) * BK * 2 + 16)
    launch = Launch(gemm(bn, stages, fault), (-(-m // BM), -(-n // bn)), 384, (*maps, ty, m, n, k), shared=shared)
    program = Program("gemm", (launch,), inputs=(ta, tb), outputs=(ty,))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in (ta, tb, ty)}
    device.upload(buffers["a"], a)
    device.upload(buffers["b"], b)
    device.bind(program, buffers).run()
    found = device.download(buffers["y"], "f32", (m, n))
    for buffer in buffers.values():
        buffer.free()
    return found, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param) as opened:
        yield opened


@pytest.mark.parametrize(("m", "n", "k", "stages"), [(128, 64, 512, 3), (200, 72, 320, 2), (8, 136, 64, 3)])
def test_a_ring_of_tiles_is_multiplied(device, m, n, k, stages):
    found, exact = run(device, m, n, k, stages=stages)
    assert np.array_equal(found, exact)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("no full", simt.PoisonRead, "of this matrix product covers byte"),
        ("released early", simt.Race, "asynchronous copy of bytes .* races with the read by"),
    ],
)
def test_faults_are_reported(fault, error, text):
    with open_device("interpreter") as d, pytest.raises(error, match=text):
        run(d, 128, 64, 512, fault=fault)


def test_it_stays_asynchronous():
    assert L.check_kernel(gemm(256, 3), "sm_90a") == ()
