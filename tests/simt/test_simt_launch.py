"""Buffers, arguments and options: what is refused, and what a launch leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import simt_kernels as kernels

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.machine import current
from atlas_lab.simt import Buffer, Misaligned, Options, SimtError, run
from atlas_lab.simt.scheduler import Poll


@L.kernel(launch_bounds=(64, 2))
def fill(y: L.Out[L.u32], n: L.i32, value: L.u32):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < n:
        L.stg_b32(y, i, value)


def test_a_buffer_knows_which_bytes_were_written():
    y = Buffer("y", 4 * 40)
    assert y.unwritten == [(0, 160)]
    run(fill, grid=1, block=32, args=((y, 16), 20, 7))
    assert y.unwritten == [(0, 16), (96, 160)]
    assert y.array("u32", 20, byte_offset=16).tolist() == [7] * 20
    assert y.array(np.uint8)[0] == 0xFF
    y.write(np.zeros(4, np.float32))
    assert y.unwritten == [(96, 160)]
    y.poison()
    assert y.unwritten == [(0, 160)]


def test_a_buffer_holds_a_copy():
    data = np.arange(6, dtype=np.float32).reshape(2, 3).T
    b = Buffer("b", 24, data=data)
    data[:] = 0
    assert b.array(L.f32, (3, 2)).tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="read-only"):
        b.array(L.f32)[0] = 1
    assert Buffer("zero", 8, initialised=True).array("u8").tolist() == [0] * 8
    assert Buffer("empty", 0).array("f32").size == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Buffer("b", 8, data=np.zeros(3, np.uint8)), "buffer 'b': found 3 bytes of data, expected 8"),
        (lambda: Buffer("b", 8).array("f32", 3), "buffer 'b': found a view of 3 x float32 from byte 0"),
        (lambda: Buffer("b", 8).write(np.zeros(3, np.float32)), r"buffer 'b': found data for bytes \[0, 12\)"),
    ],
)
def test_what_a_buffer_refuses(make, sentence):
    with pytest.raises(SimtError, match=sentence):
        make()


Y = Buffer("y", 64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"args": (Y, 1)}, "found 2 arguments, expected 3: y, n, value"),
        ({"args": (3, 1, 1)}, "parameter 'y': found 3, expected a Buffer"),
        ({"args": ((Y, 2), 1, 1)}, "parameter 'y': found byte offset 2 in global buffer 'y' of 64 bytes"),
        ({"args": ((Y, 68), 1, 1)}, "parameter 'y': found byte offset 68"),
        ({"args": (Y, 2**31, 1)}, "parameter 'n': found 2147483648, expected an integer from -2147483648 to"),
        ({"args": (Y, 1, -1)}, r"parameter 'value': found -1, expected an integer from 0 to 4294967295 \(u32\)"),
        ({"args": (Y, 1.0, 1)}, "parameter 'n': found 1.0, expected an integer"),
        ({"args": (Y, True, 1)}, "parameter 'n': found True"),
        ({"grid": 0}, "found grid 0, expected one to three integers of 1 or more"),
        ({"block": (1, 1, 1, 1)}, r"found block \(1, 1, 1, 1\)"),
        ({"block": 65}, "found a block of 65 threads, expected at most 64"),
        ({"shared_bytes": -1}, "found -1 bytes of dynamic shared memory"),
        ({"options": Options(resident=0)}, "found resident=0, expected 1 or more"),
        ({"options": Options(order="backwards")}, "found order='backwards'"),
        ({"options": Options(late_async=False)}, "found late_async=False"),
    ],
)
def test_what_a_launch_refuses(change, sentence):
    with pytest.raises(SimtError, match=f"^kernel {fill.entry}: .*{sentence}"):
        run(fill, **({"grid": 1, "block": 32, "args": (Y, 1, 1)} | change))


def test_kernels_that_only_a_gpu_can_run_are_refused():
    with pytest.raises(SimtError, match=r"it names numba\.cuda itself"):
        run(kernels.foreign, grid=1, block=32, args=(Buffer("y", 128),))
    op = L.intrinsic("gpu_only", (L.u32,), L.u32, ptx="mov.u32 $0, $1;")

    @L.kernel
    def uses_it(y: L.Out[L.u32]):
        L.stg_b32(y, 0, op(1))

    with pytest.raises(SimtError, match="it runs on a GPU only: gpu_only has no NumPy meaning"):
        run(uses_it, grid=1, block=32, args=(Buffer("y", 4),))


def test_a_float_scalar_is_rounded_to_its_type():
    @L.kernel
    def keep(y: L.Out[L.f32], v: L.f32):
        L.stg_f32(y, 0, v)

    y = Buffer("y", 4)
    run(keep, grid=1, block=1, args=(y, 0.1))
    assert y.array("f32")[0] == np.float32(0.1)


def test_static_shared_memory_is_aligned_no_better_than_it_says():
    narrow = L.intrinsic(
        "narrow", (L.Const("count"),), L.PtrTo(L.u32, "shared", "inout"), ptx=lambda e, count: None,
        numpy=lambda count: current().shared(None, L.u32, count, 4),
    )  # fmt: skip

    @L.kernel
    def vectors(y: L.Out[L.u32]):
        L.sts_v4_b32(narrow(16), 0, (1, 2, 3, 4))

    with pytest.raises(Misaligned, match="is only aligned to 4"):
        run(vectors, grid=1, block=1, args=(Buffer("y", 4),))


def test_a_wait_may_be_any_condition():
    """The scheduler polls; an mbarrier's phase is one such condition."""

    def wait(p, i, v):
        thread = current()
        word = p.buffer
        thread.block_on(Poll("word", i, lambda: word.array("u32")[i] == v, f"wait for word {i} of {word}"))

    wait_word = L.intrinsic("wait_word", (L.Ptr(), L.i32), ptx="// $0 $1", numpy=wait, effect="synchronises")

    @L.kernel
    def relay(y: L.InOut[L.u32], z: L.Out[L.u32]):
        if cuda.threadIdx.x < 31:
            wait_word(y, cuda.threadIdx.x + 1, 1)
        L.stg_b32(y, cuda.threadIdx.x, 1)

    y = Buffer("y", 128, initialised=True)
    run(relay, grid=1, block=32, args=(y, Buffer("z", 4)))
    assert y.array("u32").tolist() == [1] * 32
    with pytest.raises(SimtError, match=r"nothing can go on: .* wait for word 6 of global buffer 'y', 24 more"):
        run(relay, grid=1, block=30, args=(Buffer("y", 128, initialised=True), Buffer("z", 4)))


def test_stats():
    stats = run(kernels.block_sum, grid=3, block=64, args=(Buffer("x", 2400, initialised=True), Buffer("y", 12), 200),
                shared_bytes=256)  # fmt: skip
    assert (stats.blocks, stats.threads, stats.shared_bytes) == (3, 64, 256)
    assert stats.steps > 3 * 64 * 10
    assert stats.seconds > 0
