"""One faulty kernel for each report of missing fences, bulk stores and clusters."""

from __future__ import annotations

import pytest
from async_faults import BULK, STORE, TILE, Fault, check, faults, filled, made

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

MANY = L.tma_load(2, multicast=True)
FAULTS: list[Fault] = []
fault = faults(FAULTS)


@fault(simt.Unfenced, "the copy engine uses the mbarrier at", "initialised it without fence_mbarrier_init after it")
def an_mbarrier_that_is_not_fenced(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, 8192)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)  # !


@fault(simt.AsyncError, "a tensor copy of o: bf16[16, 64] from byte 6 of its rows on, expected a multiple of 16")
def a_box_that_begins_within_16_bytes(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    if cuda.threadIdx.x == 0:
        L.tma_store_2d(o, (0, 3), tile, 0)  # !


@fault(simt.Unfenced, "is used by another block, but block (0, 0, 0) thread (0, 0, 0) at", cluster=2)
def an_mbarrier_of_the_cluster_that_is_not_fenced(
    m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]
):
    bar = L.dynamic_shared(L.u64, 0)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 1)
        L.fence_proxy_async()
    L.cluster_arrive()
    L.cluster_wait()
    if L.cluster_rank() == 1:
        L.mbarrier_arrive_remote(L.mapa(bar, 0), 0)  # !
    L.cluster_arrive()
    L.cluster_wait()


@fault(
    simt.Unfenced, "the copy engine reads bytes [0, 1024) of dynamic shared memory, which thread (1, 0, 0) at",
    "found no fence_proxy_async of that thread between the write and what passed it on",
)  # fmt: skip
def a_store_of_what_is_not_fenced(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, t = L.dynamic_shared(L.u8, 0), cuda.threadIdx.x
    L.sts_v4_b32(tile, 16 * t, (t, t, t, t))
    cuda.syncthreads()
    if t == 0:
        L.fence_proxy_async()
        L.tma_store_2d(o, (0, 0), tile, 0)  # !
        L.bulk_commit()
        L.bulk_wait_read(0)


@fault(simt.Unfenced, "the copy engine overwrites bytes [0, 1024) of dynamic shared memory")
def a_load_over_what_is_not_fenced(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    L.sts_b32(tile, 16 * cuda.threadIdx.x, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)  # !
    L.mbarrier_wait(bar, 0, 0)


@fault(simt.Unfenced, "reads bytes [0, 256) of global buffer 'x'", "found no fence_proxy_async_global")
def a_load_of_global_bytes_not_fenced(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    L.stg_b32(x, cuda.threadIdx.x, 1)
    L.fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, 256)
        BULK(tile, 0, x, 0, 256, bar, 0)  # !
    L.mbarrier_wait(bar, 0, 0)


@fault(simt.AsyncError, "exits with a bulk store from dynamic shared memory to", "that it never committed")
def a_store_never_committed(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    filled(tile)
    if cuda.threadIdx.x == 0:
        L.tma_store_2d(o, (0, 0), tile, 0)  # !


@fault(simt.AsyncError, "whose reads it did not wait for (bulk_wait_read)")
def a_store_whose_reads_nobody_waits_for(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    filled(tile)
    if cuda.threadIdx.x == 0:
        STORE(y, 0, tile, 0, 256)  # !
        L.bulk_commit()


@fault(simt.Race, "this write of bytes [0, 4) of dynamic shared memory races with the read by an unfinished copy by")
def a_store_s_source_overwritten(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    filled(tile)
    if cuda.threadIdx.x == 0:
        STORE(y, 0, tile, 0, 256)
        L.bulk_commit()
        L.sts_b32(tile, 0, 1)  # !
        L.bulk_wait_read(0)


@fault(simt.PoisonRead, "bytes [0, 4) of global buffer 'x' are read while the asynchronous copy by")
def a_store_s_target_read_before_it_is_written(
    m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]
):
    tile = L.dynamic_shared(L.u8, 0)
    filled(tile)
    if cuda.threadIdx.x == 0:
        STORE(x, 0, tile, 0, 256)
        L.bulk_commit()
        L.bulk_wait_read(0)
        L.stg_b32(y, 0, L.ld_b32(x, 0))  # !


@fault(simt.PoisonRead, "bytes [512, 768) of dynamic shared memory are read but nothing has written them yet")
def a_store_of_what_nobody_wrote(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 512)
    filled(L.dynamic_shared(L.u8, 1024))
    if cuda.threadIdx.x == 0:
        STORE(y, 0, tile, 0, 256)  # !


@fault(simt.Unfenced, "the copy engine overwrites bytes [0, 256) of global buffer 'y'", "fence_proxy_async_global")
def a_store_over_global_bytes_not_fenced(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    L.stg_b32(y, cuda.threadIdx.x, 1)
    filled(tile)
    if cuda.threadIdx.x == 0:
        STORE(y, 0, tile, 0, 256)  # !


@fault(simt.Race, "this asynchronous copy of bytes [0, 128) of global buffer 'o' races with the", cluster=2)
def two_blocks_store_one_tile(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile = L.dynamic_shared(L.u8, 0)
    filled(tile)
    if cuda.threadIdx.x == 0:
        L.tma_store_2d(o, (0, 0), tile, 0)  # !
        L.bulk_commit()
        L.bulk_wait(0)


@fault(simt.ReadOnlyWrite, "bulk store through a pointer declared In to global buffer 'm'")
def a_store_to_what_is_only_read(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    filled(L.dynamic_shared(L.u8, 0))
    L.tma_store_2d(m, (0, 0), L.dynamic_shared(L.u8, 0), 0)  # !


@fault(simt.AsyncError, "found -1 bulk groups to leave pending, expected 0 or more")
def fewer_groups_than_none(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.bulk_wait(-1)  # !


@fault(simt.AsyncError, "found rank 2 of a cluster, expected 0 to 1", cluster=2)
def a_rank_that_is_not_there(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mapa(L.dynamic_shared(L.u8, 0), 2)  # !


@fault(simt.AsyncError, "a copy to the blocks of mask 0b0110, expected some of the cluster's 2", cluster=2)
def a_mask_beyond_the_cluster(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    MANY(L.dynamic_shared(L.u8, 0), 0, m, (0, 0), made(1), 0, 6)  # !


@fault(simt.BarrierMismatch, "arrives twice at the cluster's barrier, first at", cluster=2)
def two_arrivals_at_the_cluster_s_barrier(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    for _ in range(2):
        L.cluster_arrive()  # !


@fault(simt.BarrierMismatch, "cluster_wait of a thread that has not arrived, expected cluster_arrive before", cluster=2)
def a_wait_without_arrival(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.cluster_wait()  # !


@fault(simt.Deadlock, "wait at the cluster's barrier at", "with 64 of 128 there", cluster=2)
def one_block_does_not_come_to_the_cluster_s_barrier(
    m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]
):
    bar = made(1)
    if L.cluster_rank() == 1:
        L.mbarrier_wait(bar, 0, 0)
    L.cluster_arrive()
    L.cluster_wait()  # !


@fault(simt.Race, "this read of bytes [0, 4) of dynamic shared memory races with the write by block", cluster=2)
def a_neighbour_read_without_the_cluster_s_barrier(
    m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]
):
    s = L.dynamic_shared(L.u32, 0)
    L.sts_b32(s, cuda.threadIdx.x, 1)
    L.cluster_arrive_relaxed()
    L.cluster_wait()
    if cuda.threadIdx.x == 0:
        L.ld_cluster_b32(L.mapa(s, L.cluster_rank() ^ 1), 0)  # !
    L.cluster_arrive()
    L.cluster_wait()


@fault(
    simt.OutOfBounds,
    "dynamic shared memory of block (1, 0, 0), which has exited, whose size is 0",
    cluster=2,
    random=(simt.AsyncError,),
)
def the_memory_of_a_block_that_is_gone(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s = L.dynamic_shared(L.u32, 0)
    other = L.mapa(s, 1)
    if L.cluster_rank() == 0:
        for _ in range(200):
            L.nanosleep(100)
        L.ld_cluster_b32(other, 0)  # !


@fault(simt.AsyncError, "of block (1, 0, 0), whose threads have all exited", cluster=2)
def the_place_in_a_block_that_is_gone(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    s = L.dynamic_shared(L.u32, 0)
    if L.cluster_rank() == 0:
        for _ in range(200):
            L.nanosleep(100)
        L.mapa(s, 1)  # !


@fault(simt.Race, "this read of bytes", "races with the write by block (1, 0, 0) thread", cluster=2)
def a_wait_at_block_scope_for_another_block(
    m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]
):
    s, bar = L.dynamic_shared(L.u32, 0), made(64)
    L.cluster_arrive()
    L.cluster_wait()
    if L.cluster_rank() == 1:
        L.st_cluster_b32(L.mapa(s, 0), cuda.threadIdx.x, 1)
        L.mbarrier_arrive_remote(L.mapa(bar, 0), 0)
    else:
        L.mbarrier_wait(bar, 0, 0)  # mbarrier_wait_cluster is right
        L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(s, cuda.threadIdx.x))  # !
    L.cluster_arrive()
    L.cluster_wait()


@pytest.mark.parametrize("way", ["program", "random"])
@pytest.mark.parametrize("f", FAULTS, ids=lambda f: f.kernel.spec.family)
def test_report(f: Fault, way: str) -> None:
    check(f, way, __file__)
