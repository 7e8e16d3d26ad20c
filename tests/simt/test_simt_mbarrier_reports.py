"""One faulty kernel for each report of mbarriers and of what loads bring to them."""

from __future__ import annotations

import pytest
from async_faults import BULK, TILE, Fault, check, faults, fetched, made

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

FAULTS: list[Fault] = []
fault = faults(FAULTS)


@fault(simt.MbarrierError, "found no mbarrier at bytes [8, 16)", "mbarrier_init made")
def never_initialised(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_arrive(L.shared(L.u64, 2), 1)  # !


@fault(simt.MbarrierError, "found a count of 0, expected 1 to 1048575")
def no_arrivals_at_all(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_init(L.shared(L.u64, 1), 0, 0)  # !


@fault(simt.MbarrierError, "is initialised again, expected mbarrier_inval before", block=32)
def initialised_by_two(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_init(L.shared(L.u64, 1), 0, 1)  # !


@fault(simt.Misaligned, "mbarrier_init of bytes [4, 12)", "not aligned to 8")
def half_an_mbarrier_off(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_init(L.shared(L.u32, 4), 1, 1)  # !


@fault(simt.Race, "races with its mbarrier_init by thread (0, 0, 0) at")
def no_barrier_after_the_initialisation(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = L.shared(L.u64, 1)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, 64)
        L.fence_mbarrier_init()
    L.barrier_sync(1 + L.warp_id(), 32)
    L.mbarrier_arrive(bar, 0)  # !


@fault(simt.MbarrierError, "an arrival in phase 0, whose 1 arrivals are there", "waits for 64 bytes")
def an_arrival_too_many(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = made(1)
    if cuda.threadIdx.x == 0:
        for _ in range(2):
            L.mbarrier_arrive_expect_tx(bar, 0, 64)  # !


@fault(simt.MbarrierError, "found 1048576 more bytes to expect beside 0, expected at most 1048575")
def more_bytes_than_are_counted(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_expect_tx(made(1), 0, 1 << 20)  # !


@fault(simt.MbarrierError, "found parity 2, expected 0 or 1")
def a_count_for_a_parity(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_wait(made(1), 0, 2)  # !


@fault(simt.MbarrierError, "this read of bytes [8192, 8196)", "meets the mbarrier that thread (0, 0, 0) at")
def an_mbarrier_read_as_data(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(L.cast(made(1), L.u32), 0))  # !


@fault(simt.MbarrierError, "this write of bytes [8196, 8200)", "initialised there")
def an_mbarrier_overwritten(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.sts_b32(L.cast(made(1), L.u32), 1, 5)  # !


@fault(
    simt.Deadlock, "threads (0, 0, 0) to (63, 0, 0) (64) wait for phase 0 (parity 0) of the mbarrier at bytes [8192, ",
    "lacks 2 of 2 arrivals",
)  # fmt: skip
def nobody_arrives(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.mbarrier_wait(made(2), 0, 0)  # !


@fault(simt.Deadlock, "repeat mbarrier_try_wait for parity 0 of the mbarrier at", "phase 0 lacks 1 of 1 arrivals")
def a_loop_of_attempts_that_all_fail(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = made(1)
    while L.mbarrier_try_wait(bar, 0, 0) == L.u32(0):  # !
        pass


@fault(simt.MbarrierError, "found copies of 1024 bytes, expected the 512 that its arrivals announced")
def less_expected_than_comes(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, 512)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)  # !


@fault(simt.Deadlock, "lacks 1024 of the bytes that it expects")
def more_expected_than_comes(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(2)
    fetched(m, tile, bar)
    if cuda.threadIdx.x == 32:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
    L.mbarrier_wait(bar, 0, 0)  # !


@fault(
    simt.PoisonRead,
    "are read while the asynchronous copy by thread (0, 0, 0) at",
    "is not waited for",
    random=(simt.Race,),
)
def a_tile_read_before_its_phase(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    fetched(m, tile, bar)
    cuda.syncthreads()
    L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(tile, 4 * cuda.threadIdx.x))  # !
    L.mbarrier_wait(bar, 0, 0)


@fault(
    simt.Race, "this read of bytes", "races with the write by thread (0, 0, 0) at", block=96, random=(simt.PoisonRead,)
)
def a_tile_that_only_others_waited_for(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    fetched(m, tile, bar)
    if L.warp_id() < 2:
        L.mbarrier_wait(bar, 0, 0)
    else:
        L.nanosleep(100)
        L.nanosleep(100)
        L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(tile, 4 * cuda.threadIdx.x))  # !


@fault(simt.Race, "this asynchronous copy of bytes [0, 1024)", "races with the read by thread (32, 0, 0) at")
def a_tile_overwritten_while_it_is_read(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    fetched(m, tile, bar)
    L.mbarrier_wait(bar, 0, 0)
    if L.warp_id() == 1:
        L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(tile, 4 * cuda.threadIdx.x))
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.nanosleep(100)
        L.tma_load_2d(tile, 0, m, (8, 0), bar, 0)  # !
    L.mbarrier_wait(bar, 0, 1)


@fault(simt.AsyncError, "the block ends while the copy by thread (0, 0, 0) at", "is not waited for at the mbarrier at")
def a_tile_that_nobody_waits_for(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)  # !


@fault(simt.AsyncError, "the mbarrier is invalidated while the copy by thread (0, 0, 0) at")
def an_mbarrier_invalidated_too_early(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    tile, bar = L.dynamic_shared(L.u8, 0), made(1)
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)  # !
        L.mbarrier_inval(bar, 0)


@fault(simt.AsyncError, "a tensor copy with 3 coordinates of m: bf16[16, 64], expected 2")
def another_rank_than_the_map_s(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.tma_load_3d(L.dynamic_shared(L.u8, 0), 0, m, (0, 0, 0), made(1), 0)  # !


@fault(simt.AsyncError, "a tensor copy through <global u32 pointer", "expected a parameter such as InMap[bf16]")
def a_pointer_for_a_map(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.tma_load_2d(L.dynamic_shared(L.u8, 0), 0, x, (0, 0), made(1), 0)  # !


@fault(simt.Misaligned, "tensor copy to bytes [64, 1088)", "not aligned to 128")
def a_tile_half_a_line_off(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.tma_load_2d(L.dynamic_shared(L.u8, 0), 64, m, (0, 0), made(1), 0)  # !


@fault(simt.Misaligned, "is only aligned to 16")
def a_tile_in_static_memory(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    L.tma_load_2d(L.shared(L.u8, 1024), 0, m, (0, 0), made(1), 0)  # !


@fault(simt.AsyncError, "a bulk copy of 24 bytes, expected a positive multiple of 16")
def a_bulk_copy_of_any_size(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    BULK(L.dynamic_shared(L.u8, 0), 0, x, 0, 24, made(1), 0)  # !


@fault(simt.Misaligned, "bulk copy from bytes [4, 20) of global buffer 'x' is not aligned to 16")
def a_bulk_copy_from_anywhere(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    BULK(L.dynamic_shared(L.u8, 0), 0, x, 1, 16, made(1), 0)  # !


@fault(simt.OutOfBounds, "bulk copy from bytes [0, 272) of global buffer 'x', whose size is 256")
def a_bulk_copy_past_the_end(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    BULK(L.dynamic_shared(L.u8, 0), 0, x, 0, 272, made(1), 0)  # !


@fault(simt.Uninitialised, "of global buffer 'y' are read but were never written")
def a_bulk_copy_of_what_nobody_wrote(m: L.InMap[L.bf16], o: L.OutMap[L.bf16], x: L.InOut[L.u32], y: L.Out[L.u32]):
    bar = made(1)
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, 64)
        BULK(L.dynamic_shared(L.u8, 0), 0, y, 0, 64, bar, 0)  # !


@pytest.mark.parametrize("way", ["program", "random"])
@pytest.mark.parametrize("f", FAULTS, ids=lambda f: f.kernel.spec.family)
def test_report(f: Fault, way: str) -> None:
    check(f, way, __file__)
