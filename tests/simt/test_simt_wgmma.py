"""What goes wrong with asynchronous products: one small faulty kernel a report. Right ones: test_simt_products.

Operands are zeros of bf16: A 64 rows of 32 bytes from byte 0, B 8 rows from byte 2048, swizzled by 32 bytes. The line
that must be named ends in a comment that starts with `!`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from test_simt_reports import marked_line

from atlas_lab import simt
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import Kernel, cuda
from atlas_lab.simt import Buffer, Options, run

BYTES = 2304
MULTIPLY, WAIT = L.wgmma(L.bf16, 8), L.wgmma_wait(4)
FROM_REGISTERS = L.wgmma(L.bf16, 8, a_registers=True)
BYTE_PRODUCT, INTEGER_PRODUCT = L.wgmma(L.e4m3, 8), L.wgmma(L.i8, 8)


@L.device
def zero(s):
    for i in range(cuda.threadIdx.x * 16, BYTES, cuda.blockDim.x * 16):
        L.sts_v4_b32(s, i, (0, 0, 0, 0))


@L.device
def a_of(s):
    return L.matrix_descriptor(s, 0, 32, 16, 256)


@L.device
def b_of(s):
    return L.matrix_descriptor(s, 2048, 32, 16, 256)


@L.device
def ready():
    """Dynamic shared memory with both operands, for products to read."""
    s = L.dynamic_shared(L.u8, 0)
    zero(s)
    L.fence_proxy_async()
    cuda.syncthreads()
    return s


@L.device
def put(y, acc):
    L.stg_f32(y, cuda.threadIdx.x, acc[0])


@dataclass
class Fault:
    kernel: Kernel
    error: type[simt.SimtError]
    words: tuple[str, ...]
    block: int = 128
    ways: tuple[str, ...] = ("program", "random")


FAULTS: list[Fault] = []


def fault(error: type[simt.SimtError], *words: str, **more: Any) -> Any:
    def add(function: Any) -> Kernel:
        FAULTS.append(Fault(made := L.kernel(function), error, words, **more))
        return made

    return add


@fault(simt.PoisonRead, "accumulators are read while the matrix product at", "is not waited for")
def accumulators_read_before_the_wait(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    L.stg_f32(y, cuda.threadIdx.x, acc[0])  # !
    acc = WAIT(acc, 0)


@fault(simt.PoisonRead, "is not waited for")
def accumulators_of_a_group_left_pending(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    acc = WAIT(acc, 1)
    L.stg_f32(y, cuda.threadIdx.x, acc[0])  # !


@fault(simt.PoisonRead, "is not waited for")
def accumulators_of_products_never_committed(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = WAIT(MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0), 0)
    L.stg_f32(y, cuda.threadIdx.x, acc[0])  # !


@fault(simt.PoisonRead, "wgmma_wait must take and return them")
def accumulators_that_the_wait_was_not_handed(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    first = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    second = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    put(y, WAIT(first, 0))
    L.stg_f32(y, cuda.threadIdx.x, second[0])  # !


@fault(simt.PoisonRead, "handed accumulators from before the newest product on them")
def accumulators_used_twice(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    MULTIPLY(acc, a_of(s), b_of(s), 1)
    MULTIPLY(acc, a_of(s), b_of(s), 1)  # !


@fault(simt.PoisonRead, "this wait is handed accumulators from before the newest product")
def accumulators_waited_for_that_a_product_took(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    MULTIPLY(acc, a_of(s), b_of(s), 1)
    L.wgmma_commit()
    acc = WAIT(acc, 0)  # !


@fault(simt.Race, "dynamic shared memory", "this write of bytes", "read by an unfinished matrix product by thread")
def an_operand_overwritten_before_the_wait(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    L.sts_b32(s, 4 * cuda.threadIdx.x, 0)  # !
    put(y, WAIT(acc, 0))


@fault(simt.Race, "races with the read by thread (0, 0, 0)", block=256)
def an_operand_overwritten_by_who_does_not_know_of_the_wait(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    if L.warpgroup_id() == 0:
        L.wgmma_fence()
        acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
        L.wgmma_commit()
        L.barrier_arrive(1, 256)
        put(y, WAIT(acc, 0))
        L.barrier_arrive(2, 256)
    else:
        L.barrier_sync(1, 256)
        L.nanosleep(100)
        L.nanosleep(100)
        L.sts_b32(s, 4 * L.warpgroup_thread(), 0)  # !
        L.barrier_sync(2, 256)


@fault(simt.Race, "of this matrix product", "races with the write by thread")
def operands_with_no_barrier(x: L.In[L.u32], y: L.Out[L.f32]):
    s = L.dynamic_shared(L.u8, 0)
    zero(s)
    L.fence_proxy_async()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Unfenced, "dynamic shared memory", "found no fence_proxy_async", "expected one")
def operands_written_with_no_proxy_fence(x: L.In[L.u32], y: L.Out[L.f32]):
    s = L.dynamic_shared(L.u8, 0)
    zero(s)
    cuda.syncthreads()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Unfenced, "found no fence_proxy_async of the writing thread between the write by thread")
def a_proxy_fence_after_the_barrier(x: L.In[L.u32], y: L.Out[L.f32]):
    s = L.dynamic_shared(L.u8, 0)
    zero(s)
    cuda.syncthreads()
    L.fence_proxy_async()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Unfenced, "found no fence_proxy_async")
def operands_written_again_after_the_proxy_fence(x: L.In[L.u32], y: L.Out[L.f32]):
    s = L.dynamic_shared(L.u8, 0)
    zero(s)
    L.fence_proxy_async()
    zero(s)
    cuda.syncthreads()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.PoisonRead, "operand B of this matrix product covers byte 2048", "nothing has written yet")
def an_operand_nobody_wrote(x: L.In[L.u32], y: L.Out[L.f32]):
    s = L.dynamic_shared(L.u8, 0)
    L.sts_v4_b32(s, 16 * cuda.threadIdx.x, (0, 0, 0, 0))
    L.fence_proxy_async()
    cuda.syncthreads()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.PoisonRead, "covers byte", "while the asynchronous copy by thread", "is not waited for")
def an_operand_that_is_still_copied(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.cp_async_16(s, 16 * cuda.threadIdx.x, x, 0, 16)
    L.cp_async_commit()
    cuda.syncthreads()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Unfenced, "takes accumulators from registers", "no wgmma_fence since the last commit or wait")
def accumulators_with_no_fence(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Unfenced, "takes accumulators")
def accumulators_with_no_fence_after_a_wait(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    acc = WAIT(acc, 0)
    MULTIPLY(acc, a_of(s), b_of(s), 1)  # !


@fault(simt.Unfenced, "takes accumulators of products of another shape")
def a_chain_of_two_shapes_with_no_fence(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    BYTE_PRODUCT(acc, a_of(s), b_of(s), 1)  # !


@fault(simt.Unfenced, "takes A fragments from registers")
def fragments_with_no_fence(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    L.wgmma_commit()
    FROM_REGISTERS(acc, L.ldg_v4_b32(x, 0), b_of(s), 1)  # !


@fault(simt.MissingLane, "needs all threads of warpgroup 0, but thread (64, 0, 0) exited")
def half_a_warpgroup(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    if cuda.threadIdx.x >= 64:
        return
    L.nanosleep(10)
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.Deadlock, "threads (0, 0, 0) to (95, 0, 0) (96) wait in wgmma_m64n8k16_bf16 at",
       "for threads 96 to 127 of warpgroup 0", "wait at barrier 0", "with 32 of 128 there")  # fmt: skip
def one_warp_at_a_barrier(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    if L.warp_id() < 3:
        MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !
    cuda.syncthreads()


@fault(simt.MissingLane, "this thread exits while thread (0, 0, 0) and others wait in wgmma_m64n8k16_bf16 at",
       "for threads 64 to 127 of warpgroup 0")  # fmt: skip
def half_a_warpgroup_exits_later(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    if cuda.threadIdx.x < 64:
        MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !
    else:
        L.nanosleep(10)


@fault(simt.MissingLane, "needs 128 threads, but warpgroup 0 of this block has 64", block=64)
def a_block_of_two_warps(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !


@fault(simt.DivergentCollective, "all of a warpgroup take part in the same instruction")
def warps_at_two_products(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    if L.warp_id() < 2:
        MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !
    else:
        MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)


@fault(simt.DivergentCollective, "another A descriptor than thread (0, 0, 0)", "expected 0xc000001000010")
def a_descriptor_for_each_warp(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), L.descriptor_advance(a_of(s), 16 * L.warp_id()), b_of(s), 0)  # !


@fault(simt.DivergentCollective, "another number of groups before it than thread (0, 0, 0): found 1, expected 0")
def a_commit_by_some(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    if L.warp_id() == 2:
        L.wgmma_commit()
    WAIT(acc, 0)  # !


@fault(simt.AsyncError, "exits with 1 matrix products that no wgmma_wait completed")
def a_product_nobody_waits_for(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)  # !
    L.wgmma_commit()


@fault(simt.AsyncError, "wgmma_m64n8k16_bf16: found 8 accumulators, expected 4")
def too_many_accumulators(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(8), a_of(s), b_of(s), 0)  # !


@fault(simt.AsyncError, "wgmma_m64n8k32_i8: found 4 f32 accumulators, expected 4 i32")
def accumulators_of_another_type(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    acc = MULTIPLY(L.zeros(4), a_of(s), b_of(s), 0)
    INTEGER_PRODUCT(acc, a_of(s), b_of(s), 1)  # !


@fault(simt.AsyncError, "the descriptor of A has base offset 1, expected 0")
def a_base_offset(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s) + (L.u64(1) << L.u64(49)), b_of(s), 0)  # !


@fault(simt.OutOfBounds, "wgmma_m64n8k16_bf16: operand B lies at bytes [2128, 2384) of dynamic shared memory")
def an_operand_past_the_end(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), a_of(s), L.descriptor_advance(b_of(s), 80), 0)  # !


@fault(simt.OutOfBounds, "operand A starts at shared address", "where the block has no shared memory")
def a_descriptor_of_nothing(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.wgmma_fence()
    MULTIPLY(L.zeros(4), L.descriptor_advance(a_of(s), 65536), b_of(s), 0)  # !


@fault(simt.Misaligned, "matrix descriptor of bytes [8, 24) of dynamic shared memory is not aligned to 16")
def a_matrix_at_any_byte(x: L.In[L.u32], y: L.Out[L.f32]):
    s = ready()
    L.matrix_descriptor(s, 8, 32, 16, 256)  # !


@fault(
    simt.Deadlock, "warpgroup 2 waits for 240 registers a thread: found 67584", "at most the 65536 of an SM", block=384
)
def more_registers_than_there_are(x: L.In[L.u32], y: L.Out[L.f32]):
    if L.warpgroup_id() == 0:
        L.setmaxnreg_dec(48)
    else:
        L.setmaxnreg_inc(240)  # !


@fault(simt.MissingLane, "setmaxnreg_dec needs all threads of warpgroup 0, but thread (32, 0, 0) exited")
def registers_given_back_by_one_warp(x: L.In[L.u32], y: L.Out[L.f32]):
    if L.warp_id() > 0:
        return
    L.nanosleep(10)
    L.setmaxnreg_dec(40)  # !


@fault(simt.Deadlock, "threads (128, 0, 0) to (255, 0, 0) (128) wait at barrier 1", "with 128 of 256 there", block=256)
def a_named_barrier_that_too_few_reach(x: L.In[L.u32], y: L.Out[L.f32]):
    if L.warpgroup_id() == 1:
        L.barrier_sync(1, 256)  # !


@fault(simt.Deadlock, "wait at barrier 1", "with 64 of 128 there", block=192, ways=("program",))  # else parts of warps
def a_named_barrier_that_too_many_reach(x: L.In[L.u32], y: L.Out[L.f32]):
    L.barrier_sync(1, 128)  # !


@pytest.mark.parametrize(
    ("f", "way"), [pytest.param(f, way, id=f"{f.kernel.spec.family}-{way}") for f in FAULTS for way in f.ways]
)
def test_report(f: Fault, way: str) -> None:
    x, y = Buffer.of("x", np.zeros(64, np.uint32)), Buffer("y", 4 * 256)
    options = Options(order=way, late_async="random" if way == "random" else True)  # type: ignore[arg-type]
    with pytest.raises(f.error) as caught:
        run(f.kernel, grid=1, block=f.block, args=(x, y), shared_bytes=BYTES, seed=3, options=options)
    text = str(caught.value)
    assert type(caught.value) is f.error
    assert "\n" not in text
    assert text.startswith(f"kernel {f.kernel.entry}, block (0, 0, 0), thread (")
    if way == "program":
        assert caught.value.line == marked_line(f.kernel), text
        assert all(w in text for w in f.words), text
