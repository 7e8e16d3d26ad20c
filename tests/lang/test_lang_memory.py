"""Loads, stores, pointers, copies and atomics on a memory of bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lang_threads import pointer, run_thread

from atlas_lab.kernels import lang as L

DATA = np.arange(64, dtype=np.uint8) * np.uint8(7) + np.uint8(130)
WORDS = DATA.view(np.uint32).tolist()


@pytest.mark.parametrize("space", ["ldg", "ldg_stream", "ld", "ld_in", "lds"])
def test_loads_widen_and_index_by_the_pointers_elements(space):
    p8, p16, p32 = (pointer(DATA, t) for t in (L.u8, L.bf16, L.f32))
    cases = [("b8", p8, 3, DATA[3]), ("b16", p16, 3, DATA.view(np.uint16)[3]), ("b32", p32, 2, WORDS[2])]
    cases += [("b32", p8, 8, WORDS[2]), ("v2_b32", p16, 4, tuple(WORDS[2:4])), ("v4_b32", p8, 16, tuple(WORDS[4:8]))]
    seen = 0
    for form, p, i, expected in cases:
        name = f"ldg_{form}_stream" if space == "ldg_stream" else f"{space}_{form}"
        op = getattr(L, name, None)
        if op is not None:
            value = run_thread(lambda op=op, p=p, i=i: op(p, i))
            assert value == expected
            assert type(value) is not np.uint32
            seen += 1
    assert seen >= 2


def test_float_loads():
    floats = np.array([1.5, -2.25, 3e-40, np.inf], np.float32)
    p = pointer(floats, L.f32)
    for op in (L.ldg_f32, L.ld_f32, L.ld_in_f32, L.lds_f32):
        assert [run_thread(lambda i=i, op=op: op(p, i)) for i in range(4)] == floats.tolist()
    assert run_thread(lambda: L.lds_v4_f32(p, 0)) == tuple(floats)
    halves = np.array([1.5, -2.25, 3e-40, np.inf], ml_dtypes.bfloat16)
    for op in (L.ldg_bf16, L.ld_bf16, L.ld_in_bf16):
        values = [run_thread(lambda i=i, op=op: op(pointer(halves, L.bf16), i)) for i in range(4)]
        assert values == halves.astype(np.float32).tolist()
        assert all(type(v) is np.float32 for v in values)


@pytest.mark.parametrize("prefix", ["stg", "sts"])
def test_stores_mask_and_place(prefix):
    memory = bytearray(64)
    view = np.frombuffer(memory, np.uint8)

    def body():
        getattr(L, f"{prefix}_b8")(pointer(memory, L.u8), 1, 0x1FE)
        getattr(L, f"{prefix}_b16")(pointer(memory, L.u16), 1, -2)
        getattr(L, f"{prefix}_b32")(pointer(memory, L.bf16), 2, -3)
        getattr(L, f"{prefix}_v2_b32")(pointer(memory, L.u32), 2, (1, -1))
        getattr(L, f"{prefix}_v4_b32")(pointer(memory, L.u32), 4, (5, 6, 7, 2**32 + 8))
        getattr(L, f"{prefix}_f32")(pointer(memory, L.f32), 8, 1.5)

    run_thread(body)
    assert view[1] == 0xFE
    assert view[2:4].view(np.uint16)[0] == 0xFFFE
    assert view.view(np.uint32)[1:8].tolist() == [2**32 - 3, 1, 2**32 - 1, 5, 6, 7, 8]
    assert view.view(np.float32)[8] == 1.5


def test_bf16_stores_round():
    memory = bytearray(16)
    x = np.array([1.00390625, 3.0e38, -1.01171875, 2.5], np.float32)

    def body():
        L.stg_bf16(pointer(memory, L.bf16), 0, x[0])
        L.stg_bf16(pointer(memory, L.bf16), 1, x[1])
        L.stg_bf16x2(pointer(memory, L.bf16), 2, x[2], x[3])
        L.sts_v4_f32(pointer(bytearray(16), L.f32), 0, x)

    run_thread(body)
    assert np.array_equal(np.frombuffer(memory, ml_dtypes.bfloat16)[:4], x.astype(ml_dtypes.bfloat16))


def test_strong_accesses_say_their_order():
    memory = bytearray(8)
    log = []

    def body():
        L.st_release_b32(pointer(memory, L.u32), 1, -1)
        return L.ld_acquire_b32(pointer(memory, L.u32), 1)

    assert run_thread(body, log) == 2**32 - 1
    assert log == [("write", "release"), ("read", "acquire")]


def test_offset_and_cast_move_and_retype():
    p = pointer(DATA, L.u8)
    moved = L.cast(L.offset(L.cast(p, L.u32), 2), L.bf16)
    assert (moved.offset, moved.dtype, moved.space, moved.mode) == (8, L.bf16, "global", "inout")
    assert run_thread(lambda: L.ldg_b32(moved, 2)) == WORDS[3]
    assert p.offset == 0


def test_atomics_return_the_old_value_and_wrap():
    memory = np.array([5, 2**32 - 1, 0, 7], np.uint32)
    p = pointer(memory, L.u32)
    signed = L.cast(p, L.i32)
    floats = L.cast(p, L.f32)

    def body():
        return [
            L.atomic_add_u32(p, 0, 3),
            L.atomic_add_u32(p, 1, 2),
            L.atomic_add_i32(signed, 0, -20),
            L.atomic_max_i32(signed, 0, 4),
            L.atomic_max_u32(p, 0, -1),
            L.atomic_add_f32(floats, 2, 0.1),
            L.atomic_add_f32(floats, 2, 0.2),
            L.atomic_cas_u32(p, 3, 7, 9),
            L.atomic_cas_u32(p, 3, 7, 10),
            L.atomic_exch_u32(p, 3, 11),
        ]

    old = run_thread(body)
    assert old[:5] == [5, 2**32 - 1, 8, -12, 4]
    assert old[5:] == [0, np.float32(0.1), 7, 9, 9]
    assert memory.tolist()[:2] == [2**32 - 1, 1]
    assert memory.view(np.float32)[2] == np.float32(0.1) + np.float32(0.2)
    assert memory[3] == 11


def test_what_the_machine_is_asked_for():
    log = []
    src, dst = pointer(DATA, L.u8, mode="in"), pointer(bytearray(64), L.bf16, "shared")

    def body():
        L.cp_async_16(dst, 8, src, 16, 16)
        L.cp_async_8(dst, 4, src, 8, 3)
        L.cp_async_4(dst, 2, src, 4, 0)
        L.cp_async_commit()
        L.cp_async_wait(1)
        L.barrier_sync(1, 64)
        L.barrier_arrive(2, 96)
        L.fence_block()
        L.fence_gpu()
        L.nanosleep(100)
        L.dynamic_shared(L.u8, 256)

    run_thread(body, log)
    assert log == [
        ("copy_async", dst, 8, src, 16, 16, 16),
        ("copy_async", dst, 4, src, 8, 8, 3),
        ("copy_async", dst, 2, src, 4, 4, 0),
        ("commit_async",),
        ("wait_async", 1),
        ("barrier", 1, 64),
        ("arrive", 2, 96),
        ("fence", "block"),
        ("fence", "gpu"),
        ("yield_", "nanosleep"),
        ("dynamic_shared", L.u8, 256),
    ]


def test_shared_arrays_are_told_apart_by_their_place_in_the_source():
    def sites(body):
        log = []
        run_thread(body, log)
        return [site for what, site in log]

    def two():
        L.shared(L.f32, 4)
        L.shared(L.f32, 4)

    assert len(set(sites(two))) == 2
    assert sites(two) == sites(two)

    def factory(count):
        @L.device
        def run():
            L.shared(L.f32, count)

        return run

    first, second = factory(4), factory(4)

    def calls():
        first()
        first()
        second()

    a, b, c = sites(calls)
    assert a == b
    assert a != c


def test_intrinsics_that_need_a_thread_say_so():
    with pytest.raises(RuntimeError, match="outside the interpreter"):
        L.lane_id()
    with pytest.raises(RuntimeError, match="outside the interpreter"):
        _ = L.cuda.threadIdx
