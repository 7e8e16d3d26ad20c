"""One faulty kernel for each report of asynchronous stores to another block, and of mbarriers that others use early."""

from __future__ import annotations

import pytest
from async_faults import Fault, check, faults

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

FAULTS: list[Fault] = []
fault = faults(FAULTS)


@L.device
def met(count):
    """An mbarrier behind 8 KB of dynamic shared memory, ready for use by the cluster; no other access is ordered."""
    bar = L.dynamic_shared(L.u64, 8192)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, count)
        L.fence_mbarrier_init()
    L.cluster_arrive_relaxed()
    L.cluster_wait()
    return bar


@L.device
def values():
    return (L.f32(1), L.f32(2), L.f32(3), L.f32(4))


@fault(
    simt.PoisonRead, "bytes [0, 4) of dynamic shared memory are read while the asynchronous copy by block (1, 0, 0) ",
    cluster=2, random=(simt.Race,),
)  # fmt: skip
def a_letter_read_before_its_mbarrier(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar = L.dynamic_shared(L.f32, 0), met(1)
    if cuda.threadIdx.x == 0 and L.cluster_rank() == 1:
        L.st_async_v4_f32(L.mapa(s, 0), 0, values(), L.mapa(bar, 0), 0)
    L.cluster_arrive()  # orders what the thread did, not what it began
    L.cluster_wait()
    if L.cluster_rank() == 0:
        L.stg_b32(y, cuda.threadIdx.x, L.f32_bits(L.lds_f32(s, 0)))  # !


@fault(simt.AsyncError, "the block ends while the copy by block (1, 0, 0) thread (0, 0, 0) at", cluster=2)
def a_letter_nobody_waits_for(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar = L.dynamic_shared(L.f32, 0), met(1)
    if L.cluster_rank() == 1 and cuda.threadIdx.x == 0:
        L.st_async_v4_f32(L.mapa(s, 0), 0, values(), L.mapa(bar, 0), 0)  # !
    L.cluster_arrive()
    L.cluster_wait()


@fault(simt.AsyncError, "that completes at the mbarrier at", "of another block, expected one of the same", cluster=2)
def a_letter_with_the_sender_s_mbarrier(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar = L.dynamic_shared(L.f32, 0), met(1)
    if cuda.threadIdx.x == 0:
        L.st_async_v4_f32(L.mapa(s, L.cluster_rank() ^ 1), 0, values(), L.mapa(bar, L.cluster_rank()), 0)  # !


@fault(simt.Race, "races with the unfinished asynchronous copy by", cluster=2)
def two_letters_in_one_place(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar = L.dynamic_shared(L.f32, 0), met(1)
    if L.cluster_rank() == 1:
        L.st_async_v4_f32(L.mapa(s, 0), 0, values(), L.mapa(bar, 0), 0)  # !
    L.cluster_arrive()
    L.cluster_wait()


@fault(
    simt.Race, "copy of bytes [0, 16) of dynamic shared memory races with the read by block (0, 0, 0) thread (0, 0, 0)",
    cluster=2, random=(simt.PoisonRead,),
)  # fmt: skip
def a_letter_over_what_is_still_read(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar, t = L.dynamic_shared(L.f32, 0), met(1), cuda.threadIdx.x
    if L.cluster_rank() == 0:
        if t == 0:
            L.mbarrier_arrive_expect_tx(bar, 0, 16)
        L.mbarrier_wait(bar, 0, 0)
        if t == 0:
            L.stg_b32(y, t, L.f32_bits(L.lds_f32(s, 0)))
        if t == 32:  # that is not who reads
            L.mbarrier_arrive_remote(L.mapa(bar, 1), 0)
    elif t == 0:
        for i in range(2):
            L.st_async_v4_f32(L.mapa(s, 0), 0, values(), L.mapa(bar, 0), 0)  # !
            if i == 0:
                L.mbarrier_wait_cluster(bar, 0, 0)
    L.cluster_arrive()
    L.cluster_wait()


@fault(simt.Misaligned, "asynchronous store to bytes [4, 20) of dynamic shared memory is not aligned to 16", cluster=2)
def a_letter_that_is_not_aligned(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s, bar = L.dynamic_shared(L.f32, 0), met(1)
    L.st_async_v4_f32(L.mapa(s, 0), 1, values(), L.mapa(bar, 0), 0)  # !


@fault(simt.Race, "races with its mbarrier_init by block (0, 0, 0) thread (0, 0, 0) at", cluster=2)
def a_relaxed_arrival_without_the_fence(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = L.dynamic_shared(L.u64, 0)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
    L.cluster_arrive_relaxed()
    L.cluster_wait()
    if L.cluster_rank() == 1:
        L.mbarrier_arrive_remote(L.mapa(bar, 0), 0)  # !


@fault(simt.Race, "races with its mbarrier_init by block (0, 0, 0) thread (0, 0, 0) at", cluster=2)
def a_fence_after_the_relaxed_arrival(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = L.dynamic_shared(L.u64, 0)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
    L.cluster_arrive_relaxed()
    if cuda.threadIdx.x == 0:
        L.fence_mbarrier_init()
    L.cluster_wait()
    if L.cluster_rank() == 1:
        L.mbarrier_arrive_remote(L.mapa(bar, 0), 0)  # !


@fault(
    simt.Race, "races with its mbarrier_init by block (0, 0, 0) thread (0, 0, 0) at", cluster=2,
    random=(simt.MbarrierError,),
)  # fmt: skip
def a_use_before_the_cluster_s_barrier(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = L.dynamic_shared(L.u64, 0)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
        L.fence_mbarrier_init()
    L.cluster_arrive_relaxed()
    if L.cluster_rank() == 1:
        L.mbarrier_arrive_remote(L.mapa(bar, 0), 0)  # !
    L.cluster_wait()


@pytest.mark.parametrize("way", ["program", "random"])
@pytest.mark.parametrize("f", FAULTS, ids=lambda f: f.kernel.spec.family)
def test_report(f: Fault, way: str) -> None:
    check(f, way, __file__)
