"""`unroll` and `range`, interpreted and compiled: what a kernel stores tells which iterations there were."""

from __future__ import annotations

import re

import pytest
from lang_threads import pointer, run_thread

from atlas_lab.kernels import lang as L

pytestmark = pytest.mark.usefixtures("compiler")
N = 3
NOTE = L.intrinsic(
    "note", (L.Const("a"), L.Const("b")), None, ptx="// note {a} {b}", effect="writes", numpy=lambda a, b: None
)
TELL = L.intrinsic("tell", (L.i32, L.i32), None, ptx="// tell $0 $1", effect="writes", numpy=lambda a, b: None)


def compiled(function) -> list[tuple[int, int]]:
    """Constant pairs of `NOTE`, in the order of the PTX."""
    text = L.ptx(L.kernel(function), "sm_80")
    return [(int(a), int(b)) for a, b in re.findall(r"// note (-?\d+) (-?\d+)", text)]


def interpreted(function) -> list[tuple[int, int]]:
    notes = []
    saved, NOTE.run = NOTE.run, lambda a, b: notes.append((a, b))
    try:
        function(0)
    finally:
        NOTE.run = saved
    return notes


def plain(n: L.i32):
    for i in L.unroll(N):
        NOTE(i, 2 * i + 1)


def bounds(n: L.i32):
    for i in L.unroll(5, -1, -2):
        NOTE(i, -i)
    for i in L.unroll(N - 3):
        NOTE(i, 9)
    for i in L.unroll(N * 2, N * 2 + 2):
        NOTE(i, N << 1)


def nested(n: L.i32):
    for i in L.unroll(2):
        for j in L.unroll(N):
            NOTE(i, j)
        for _ in L.unroll(1):
            NOTE(7, i)


def jumps(n: L.i32):
    for i in L.unroll(6):
        if i == 1:
            continue
        if i == 4:
            break
        NOTE(i, 0)
    else:
        NOTE(99, 99)
    for i in L.unroll(2):
        NOTE(i, 1)
    else:
        NOTE(2, 2)


def carried(n: L.i32):
    last = 0
    for i in L.unroll(4):
        row = i * 10
        for j in L.unroll(3):
            row = row + j
        last = last + row
        NOTE(i, last)
    NOTE(last, i)


@pytest.mark.parametrize("function", [plain, bounds, nested, jumps, carried])
def test_an_unrolled_loop_means_the_same_compiled_and_interpreted(function):
    expected = interpreted(function)
    assert expected
    assert compiled(function) == expected


def test_unrolled_loops_leave_no_branch():
    def body(y: L.Out[L.u32], n: L.i32):
        t = ()
        for i in L.unroll(16):
            t = t + (L.u32(n + i),)
        for i in L.unroll(16):
            L.stg_b32(y, i, t[15 - i])

    text = L.ptx(L.kernel(body), "sm_90a")
    assert len(re.findall(r"st\.global", text)) == 16
    assert not re.findall(r"\bbra\b|\bsetp\b|\.local\b", text)


def test_unroll_under_run_time_branches_and_loops():
    def body(y: L.Out[L.u32], n: L.i32):
        for k in range(n):
            for i in L.unroll(3):
                if k > i:
                    L.stg_b32(y, k, i)
                else:
                    continue
                TELL(i, 5)

    kernel = L.kernel(body)
    assert L.check_kernel(kernel, "sm_90a") == ()
    memory = bytearray(16)
    run_thread(lambda: body(pointer(memory, L.u32), 4))
    assert memory[12] == 2
    assert re.search(r"\bbra\b", L.ptx(kernel, "sm_90a"))


def test_a_loop_in_a_device_function_is_unrolled_for_each_closure():
    def summing(count):
        @L.device
        def run(v):
            total = L.u32(0)
            for i in L.unroll(count):
                total = L.u32(total ^ L.lop3(v, i, 0, 0x3C))
            return total

        return run

    three, five = summing(3), summing(5)

    def body(y: L.Out[L.u32], v: L.u32):
        L.stg_b32(y, 0, three(v) + five(v))

    assert len(re.findall(r"lop3\.b32 \S+, \S+, \S+, \S+, 60", L.ptx(L.kernel(body), "sm_80"))) == 5
    assert L.check_kernel(L.kernel(body), "sm_80") == ()


def test_constant_ranges_run_as_python_says():
    def up():
        for i in range(2, 9, 3):
            NOTE(1, 2)
            TELL(i, 0)

    def down():
        for i in range(3, -2, -2):
            TELL(i, 0)

    def none():
        for i in range(3, 3):
            TELL(i, 1)
        for i in range(0):
            TELL(i, 2)
        for i in range(0, 5, -1):
            TELL(i, 3)

    def told(function) -> list[int]:
        text = L.ptx(L.kernel(function), "sm_80")
        constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (-?\d+);", text))
        return [int(constants[r]) for r in re.findall(r"// tell (%r\d+)", text)]

    assert told(up) == [2, 5, 8]
    assert told(down) == [3, 1, -1]
    assert told(none) == []


def test_a_run_time_range_counts_without_a_range_object():
    def body(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
        total = L.u32(0)
        for i in range(L.lane_id(), n, 32):
            total = L.u32(total + L.ldg_b32(x, i))
        L.stg_b32(y, L.lane_id(), total)

    text = L.ptx(L.kernel(body), "sm_90a")
    loop = text[text.index("$L__BB") :]
    assert "selp" not in loop
    assert "div" not in text
    assert re.search(r"ld\.global\.nc\.b32", loop)


def test_a_range_takes_its_stop_once_and_its_index_is_the_bodys_own():
    def body(y: L.Out[L.u32], n: L.i32):
        m = n
        for i in range(0, m, 1):
            m = m + 5
            j = i
            i = 77
            TELL(j, i)
        L.stg_b32(y, 0, m)

    assert L.check_kernel(L.kernel(body), "sm_90a") == ()
    assert len(re.findall(r"// tell", L.ptx(L.kernel(body), "sm_90a"))) >= 1


def test_a_run_time_step_still_works():
    def body(y: L.Out[L.u32], n: L.i32, step: L.i32):
        for i in range(0, n, step):
            L.stg_b32(y, i, i)

    assert L.check_kernel(L.kernel(body), "sm_90a") == ()


def test_iterators_under_names_are_left_to_numba():
    def body(y: L.Out[L.u32], n: L.i32):
        r = range(n)
        for i in r:
            L.stg_b32(y, i, 1)
        for i in r:
            L.stg_b32(y, i, 2)

    assert len(re.findall(r"st\.global", L.ptx(L.kernel(body), "sm_90a"))) >= 2


def test_integer_arithmetic_on_constants_is_a_constant():
    def body(y: L.Out[L.u32]):
        s = L.shared(L.u8, N * 64 + (1 << 4))
        L.sts_b8(s, 0, 1)
        L.stg_b32(y, 0, (10, 20, 30, 40)[N - 1 - 1 & 3])

    text = L.ptx(L.kernel(body), "sm_80")
    assert f"[{N * 64 + 16}]" in text
    assert re.search(r", 20;", text)


def test_unroll_outside_of_a_loop_is_refused():
    def body(y: L.Out[L.u32]):
        r = L.unroll(3)
        for i in r:
            L.stg_b32(y, i, i)

    with pytest.raises(L.KernelError, match=r"test_lang_loops\.py"):
        L.compile_kernel(L.kernel(body), "sm_80")
    assert repr(L.unroll) == "unroll"
    assert list(L.unroll(1, 7, 2)) == [1, 3, 5]
