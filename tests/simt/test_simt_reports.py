"""One small faulty kernel for each report; the sentence names kernel, block, thread, line and buffer.

In every kernel the line that must be named ends in a comment that starts with `!`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import simt_kernels as kernels

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import Kernel, cuda
from atlas_lab.kernels.lang.machine import current
from atlas_lab.simt import Buffer, Options, SimtError, run


@dataclass
class Fault:
    kernel: Kernel
    error: type[SimtError]
    buffer: str | None = None  # as the exception has it; the sentence contains it
    words: tuple[str, ...] = ()
    block: int = 64
    grid: int = 1
    shared: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    where: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None  # block and thread in program order


FAULTS: list[Fault] = []


def fault(error: type[SimtError], **more: Any) -> Any:
    def add(function: Any) -> Kernel:
        FAULTS.append(Fault(made := L.kernel(function), error, **more))
        return made

    return add


A, B = (0, 0, 0), (1, 0, 0)


@fault(simt.OutOfBounds, buffer="x", words=("bytes [256, 260)", "size is 256"), where=(A, (63, 0, 0)))
def read_past_the_end(x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    L.stg_b32(y, t, L.ldg_b32(x, t + 1))  # !


@fault(simt.OutOfBounds, buffer="y", words=("bytes [-4, 0)",), where=(A, A))
def write_before_the_start(x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, cuda.threadIdx.x - 1, 0)  # !


@fault(simt.OutOfBounds, buffer="dynamic shared memory", words=("size is 128",), shared=128, where=(A, (32, 0, 0)))
def more_shared_memory_than_the_launch_gives(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.dynamic_shared(L.u32, 0)
    L.sts_b32(s, cuda.threadIdx.x, 1)  # !


@fault(simt.OutOfBounds, buffer="dynamic shared memory", words=("from byte 256 of the 128",), shared=128)
def dynamic_part_outside(x: L.In[L.u32], y: L.Out[L.u32]):
    L.dynamic_shared(L.u32, 256)  # !


@fault(simt.Misaligned, buffer="x", words=("bytes [4, 20)", "aligned to 16"), where=(A, (1, 0, 0)))
def vector_load_at_any_element(x: L.In[L.u32], y: L.Out[L.u32]):
    L.ldg_v4_b32(x, cuda.threadIdx.x)  # !


@fault(simt.Uninitialised, buffer="y", words=("never written",), where=(A, A))
def read_of_an_output_before_it_is_written(x: L.In[L.u32], y: L.InOut[L.u32]):
    t = cuda.threadIdx.x
    L.stg_b32(y, t, L.u32(L.ld_b32(y, t) + 1))  # !


@fault(simt.ReadOnlyWrite, buffer="x", words=("declared In",), where=(A, A))
def write_through_in(x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(x, cuda.threadIdx.x, 1)  # !


@fault(simt.PoisonRead, buffer="shared memory", words=("nothing has written them yet",), where=(A, A))
def shared_memory_nobody_wrote(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    L.stg_b32(y, cuda.threadIdx.x, L.lds_b32(s, cuda.threadIdx.x))  # !


@fault(simt.PoisonRead, buffer="shared memory", words=("asynchronous copy", "not waited for"), where=(A, A))
def copy_read_before_its_wait(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.cp_async_4(s, t, x, t, 4)
    L.cp_async_commit()
    L.stg_b32(y, t, L.lds_b32(s, t))  # !
    L.cp_async_wait(0)


@fault(simt.PoisonRead, buffer="shared memory", words=("asynchronous copy",), block=32)
def one_group_too_many_left_pending(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    for i in range(2):
        L.cp_async_4(s, i * 32 + t, x, i * 32 + t, 4)
        L.cp_async_commit()
    L.cp_async_wait(1)
    cuda.syncthreads()
    L.stg_b32(y, t, L.u32(L.lds_b32(s, t)))
    L.stg_b32(y, t, L.u32(L.lds_b32(s, 32 + t)))  # !


@fault(simt.Race, buffer="shared memory", words=("read of bytes [0, 4)", "the write by thread (0, 0, 0)"))
def copy_waited_for_but_no_barrier(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.cp_async_4(s, t, x, t, 4)
    L.cp_async_commit()
    L.cp_async_wait(0)
    L.barrier_sync(1 + L.warp_id(), 32)
    if t >= 32:
        L.stg_b32(y, t, L.lds_b32(s, 63 - t))  # !


@fault(simt.Race, buffer="shared memory", words=("the write by thread (0, 0, 0) at",), where=(A, (1, 0, 0)))
def neighbours_without_a_barrier(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 65)
    t = cuda.threadIdx.x
    if t == 0:
        L.sts_b32(s, 64, 7)
    L.sts_b32(s, t, t)
    if t == 1:
        L.stg_b32(y, t, L.lds_b32(s, 0))  # !


@fault(simt.Race, buffer="shared memory", words=("write of bytes", "the write by thread (0, 0, 0)"))
def the_same_value_written_twice(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 1)
    L.sts_b32(s, 0, 1)  # !


@fault(simt.Race, buffer="shared memory", words=("write of bytes", "the read by thread"))
def overwritten_before_everybody_read(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.sts_b32(s, t, t)
    cuda.syncthreads()
    L.stg_b32(y, t, L.lds_b32(s, (t + 1) % 64))
    L.sts_b32(s, t, t)  # !


@fault(simt.Race, buffer="shared memory", words=("this asynchronous copy", "the read by thread"))
def copy_over_what_is_being_read(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.sts_b32(s, t, t)
    cuda.syncthreads()
    L.stg_b32(y, t, L.lds_b32(s, (t + 1) % 64))
    L.cp_async_4(s, t, x, t, 4)  # !
    L.cp_async_commit()
    L.cp_async_wait(0)


@fault(simt.Race, buffer="shared memory", words=("the unfinished asynchronous copy by thread (0, 0, 0)",), where=(A, A))
def store_under_a_copy(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.cp_async_4(s, t, x, t, 4)
    L.sts_b32(s, t, 0)  # !


@fault(simt.Race, buffer="shared memory", words=("read of bytes [0, 16)", "thread (0, 0, 0)"))
def warps_that_only_shuffle(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.bf16, 1024)
    t = cuda.threadIdx.x
    L.sts_v4_b32(s, t * 8, (t, t, t, t))
    L.shfl_xor(t, 1)
    if L.warp_id() == 1:
        L.lds_v4_b32(s, (63 - t) * 8)  # !


@fault(simt.Race, buffer="y", words=("block (0, 0, 0) thread (0, 0, 0)",), grid=2, where=(B, A))
def two_blocks_write_one_row(x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, cuda.threadIdx.x, cuda.blockIdx.x)  # !


@fault(simt.Race, buffer="y", words=("write of bytes [2, 4)",), where=(A, (1, 0, 0)))
def halves_that_overlap(x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    L.stg_b16(L.cast(y, L.u16), t, t)  # !
    L.stg_b16(L.cast(y, L.u16), t + 1, t)


@fault(simt.Race, buffer="y", words=("read of bytes [0, 4)",), grid=2, where=(B, A))
def a_flag_without_release(x: L.In[L.u32], y: L.InOut[L.u32]):
    if cuda.threadIdx.x == 0:
        if cuda.blockIdx.x == 0:
            L.stg_b32(y, 0, 5)
            kernels.st_relaxed(y, 1, 1)
        else:
            while L.ld_acquire_b32(y, 1) != 1:
                pass
            L.stg_b32(y, 2, L.ld_b32(y, 0))  # !
    elif cuda.blockIdx.x == 0:
        return


@fault(simt.Race, buffer="y", words=("read of bytes [0, 4)",), grid=2, block=1, where=(B, A))
def a_flag_without_acquire(x: L.In[L.u32], y: L.InOut[L.u32]):
    if cuda.blockIdx.x == 0:
        L.stg_b32(y, 0, 5)
        L.st_release_b32(y, 1, 1)
    else:
        while kernels.ld_relaxed(y, 1) != 1:
            pass
        L.stg_b32(y, 2, L.ld_b32(y, 0))  # !


@fault(simt.Race, buffer="y", words=("the read by an unfinished copy by thread (0, 0, 0)",), where=(A, A))
def a_source_overwritten_under_its_copy(x: L.In[L.u32], y: L.InOut[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.cp_async_4(s, t, y, t, 4)
    L.cp_async_commit()
    L.stg_b32(y, t, L.u32(L.ld_b32(y, t) + 1))  # !
    L.cp_async_wait(0)


@fault(simt.Race, buffer="y", words=("the write by block (0, 0, 0) thread (0, 0, 0)",), grid=2)
def atomics_without_fences(x: L.In[L.u32], y: L.InOut[L.u32]):
    if cuda.threadIdx.x == 0:
        L.stg_b32(y, 2 + cuda.blockIdx.x, 5)
        if L.atomic_add_u32(y, 1, 1) == 1:
            L.stg_b32(y, 4, L.ld_b32(y, 3 - cuda.blockIdx.x))  # !


@fault(simt.Deadlock, words=("wait at barrier 1", "64 of 128", "threads (0, 0, 0) to (63, 0, 0) (64)"), block=128)
def a_count_that_never_comes(x: L.In[L.u32], y: L.Out[L.u32]):
    if L.warp_id() < 2:
        L.barrier_sync(1, 128)  # !


@fault(simt.Deadlock, words=("block (0, 0, 0) thread (0, 0, 0) repeat a load (acquire) of bytes [4, 8) of", "'y'"))
def a_flag_nobody_sets(x: L.In[L.u32], y: L.InOut[L.u32]):
    if cuda.threadIdx.x == 0:
        while L.ld_acquire_b32(y, 1) != 1:  # !
            L.nanosleep(100)
    cuda.syncthreads()


@fault(simt.Deadlock, words=("2 more blocks start only when a resident one ends",), grid=6)
def a_flag_of_a_block_that_is_not_resident(x: L.In[L.u32], y: L.InOut[L.u32]):
    if cuda.threadIdx.x == 0:
        if cuda.blockIdx.x == 5:
            L.st_release_b32(y, 1, 1)
        while L.ld_acquire_b32(y, 1) != 1:  # !
            pass


@fault(simt.Deadlock, words=("lanes 0 of warp 0", "repeat nanosleep"))
def a_lane_that_sleeps_for_ever(x: L.In[L.u32], y: L.InOut[L.u32]):
    while cuda.threadIdx.x == 0:
        L.nanosleep(100)  # !
    L.warp_sum_i32(1)


@fault(simt.StepLimit, words=("more than 1000 steps",), options={"step_limit": 1000}, where=(A, A))
def a_loop_without_end(x: L.In[L.u32], y: L.Out[L.u32]):
    while L.ldg_b32(x, 0) != 12345678:  # !
        pass


@fault(simt.MissingLane, words=("lane 16 exits", "wait in warp_sum_i32"), where=(A, (16, 0, 0)))
def half_a_warp_sums(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x < 16:
        L.warp_sum_i32(1)


@fault(simt.MissingLane, words=("lane 0", "needs lane 0 of warp 0, but thread (0, 0, 0) exited"))
def a_lane_left_before(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x == 0:
        return
    L.shfl_xor(1, 1)  # !


@fault(simt.MissingLane, words=("waits at barrier 0", "wait in shfl_xor"), where=(A, (1, 0, 0)))
def a_lane_waits_at_a_barrier_meanwhile(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x != 1:
        L.shfl_xor(1, 1)
    cuda.syncthreads()  # !


@fault(simt.MissingLane, words=("lanes that do not exist", "has 16"), block=48, where=(A, (32, 0, 0)))
def a_warp_that_is_not_whole(x: L.In[L.u32], y: L.Out[L.u32]):
    L.shfl_xor(1, 1)  # !


@fault(simt.MissingLane, words=("without lane 31 of warp 0",), block=96)
def a_count_made_of_parts_of_warps(x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    if t < 31 or t == 32:
        L.barrier_sync(1, 32)  # !
    else:
        cuda.syncthreads()


@fault(simt.DivergentCollective, words=("lane 1 of warp 0 calls shfl_down", "waits in shfl_xor"))
def lanes_at_two_intrinsics(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x % 2:
        L.shfl_down(1, 1)  # !
    else:
        L.shfl_xor(1, 1)


@fault(simt.DivergentCollective, words=("lane 1 of warp 0 calls shfl_xor",))
def lanes_at_two_lines(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x % 2:
        L.shfl_xor(1, 1)  # !
    else:
        L.shfl_xor(1, 1)


@fault(simt.DivergentCollective, words=("warp 1 meet barrier 0 at different lines",), where=(A, (63, 0, 0)))
def one_warp_at_two_barriers(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x < 63:
        cuda.syncthreads()
    else:
        cuda.syncthreads()  # !


@fault(simt.DivergentCollective, words=("would wait in", "but lane"), block=32)
def masks_that_wait_for_one_another(x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x < 16:
        MEET(0xFFFFFFFF)  # !
    else:
        MEET(0xFFFF8000)


@fault(simt.BarrierMismatch, words=("counts to 64", "thread (0, 0, 0)", "to 96"), block=96, where=(A, (32, 0, 0)))
def counts_that_differ(x: L.In[L.u32], y: L.Out[L.u32]):
    if L.warp_id() == 0:
        L.barrier_sync(1, 96)
    L.barrier_sync(1, 64)  # !


@fault(simt.BarrierMismatch, words=("found a count of 40", "multiple of 32"), where=(A, A))
def a_count_that_is_no_multiple_of_32(x: L.In[L.u32], y: L.Out[L.u32]):
    L.barrier_sync(1, 40)  # !


@fault(simt.BarrierMismatch, words=("found barrier 16",), where=(A, A))
def a_barrier_that_does_not_exist(x: L.In[L.u32], y: L.Out[L.u32]):
    L.barrier_sync(16, 32)  # !


@fault(simt.BarrierMismatch, words=("arrives twice at barrier 2",), where=(A, A))
def two_arrivals_in_a_row(x: L.In[L.u32], y: L.Out[L.u32]):
    for _ in range(2):
        L.barrier_arrive(2, 64)  # !


@fault(simt.AsyncError, buffer="shared memory", words=("1 asynchronous copies", "never committed"), where=(A, A))
def a_copy_that_is_never_committed(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    L.cp_async_4(s, cuda.threadIdx.x, x, 0, 4)  # !


@fault(simt.AsyncError, words=("17 of 16 bytes",), where=(A, A))
def a_copy_of_more_than_all(x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    L.cp_async_16(s, cuda.threadIdx.x * 4, x, 0, 17)  # !


def _meet(mask: int) -> None:
    current().warp_op("meet", mask, None, lambda threads, args: args)


MEET = L.intrinsic("meet", (L.u32,), ptx="bar.warp.sync $0;", numpy=_meet, effect="synchronises")


def marked_line(kernel: Kernel) -> int:
    lines, first = inspect.getsourcelines(kernel.function)
    found = [first + i for i, text in enumerate(lines) if "# !" in text]
    return found[0] if found else kernel.function.__code__.co_firstlineno


@pytest.mark.parametrize("way", ["program", "random"])
@pytest.mark.parametrize("f", FAULTS, ids=lambda f: f.kernel.spec.family)
def test_report(f: Fault, way: str) -> None:
    x = Buffer.of("x", np.arange(64, dtype=np.uint32))
    y = Buffer("y", 4 * 64, initialised=f.error is not simt.Uninitialised)
    options = Options(order=way, late_async="random" if way == "random" else True, **f.options)  # type: ignore[arg-type]
    with pytest.raises(f.error) as caught:
        run(f.kernel, grid=f.grid, block=f.block, args=(x, y), shared_bytes=f.shared, seed=3, options=options)
    e, text = caught.value, str(caught.value)
    assert type(e) is f.error
    assert e.kernel == f.kernel.entry
    assert text.startswith(f"kernel {e.kernel}, block {e.block}, thread {e.thread}, {e.file}:{e.line}: ")
    assert e.file is not None
    assert e.file.endswith("test_simt_reports.py")
    assert "\n" not in text
    if f.buffer is not None:
        assert e.buffer is not None
        assert e.buffer.startswith(f.buffer)
        assert e.buffer in text
    if way == "program":
        assert e.line == marked_line(f.kernel), text
        assert all(w in text for w in f.words), text
        if f.where is not None:
            assert (e.block, e.thread) == f.where


def test_every_report_has_a_faulty_kernel() -> None:
    kinds = {getattr(simt, n) for n in simt.__all__ if isinstance(getattr(simt, n), type)}
    kinds = {k for k in kinds if issubclass(k, SimtError) and k is not SimtError}
    kinds -= {simt.Unwaited}  # test_simt_dependent
    kinds -= {simt.MbarrierError, simt.Unfenced}  # test_simt_mbarrier_reports, test_simt_async_reports
    assert kinds == {f.error for f in FAULTS}


def test_after_a_report_the_buffers_can_be_used_again() -> None:
    x, y = Buffer.of("x", np.arange(64, dtype=np.uint32)), Buffer("y", 256)
    with pytest.raises(simt.OutOfBounds):
        run(read_past_the_end, grid=1, block=64, args=(x, y))
    run(two_blocks_write_one_row, grid=1, block=64, args=(x, y))
    assert np.array_equal(y.array("u32"), np.zeros(64))


def test_a_python_error_in_a_kernel_says_where_it_ran() -> None:
    @L.kernel
    def broken(x: L.In[L.u32]):
        (1, 2)[cuda.threadIdx.x]

    with pytest.raises(IndexError) as caught:
        run(broken, grid=1, block=32, args=(Buffer("x", 4),))
    (note,) = caught.value.__notes__
    assert note.startswith(f"in kernel {broken.entry}, block (0, 0, 0), thread (2, 0, 0), ")
    assert note.endswith(f"test_simt_reports.py:{broken.function.__code__.co_firstlineno + 2}")


def test_a_cast_that_no_integer_holds_says_where_it_ran() -> None:
    @L.kernel
    def broken(y: L.Out[L.u32], f: L.f32):
        L.stg_b32(y, 0, L.u32(f))

    with pytest.raises(OverflowError, match="no u32 holds it") as caught:
        run(broken, grid=1, block=1, args=(Buffer("y", 4), -1.0))
    assert caught.value.__notes__[0].endswith(f"test_simt_reports.py:{broken.function.__code__.co_firstlineno + 2}")
