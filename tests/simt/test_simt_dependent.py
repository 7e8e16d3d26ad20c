"""Dependent launches on the interpreter: what comes before the wait is reported, what comes after passes."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.simt import Buffer, Options, Overlap, Span, Unwaited, run


@L.kernel
def right(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    q = L.ld_in_b32(w, t)
    L.grid_wait()
    v = L.ld_in_b32(x, t)
    L.grid_launch_dependents()
    L.stg_b32(y, t, q + v + L.ldg_b32(w, t))


@L.kernel
def one_waits(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    if t == 0:
        L.grid_wait()
    cuda.syncthreads()
    L.grid_launch_dependents()
    L.stg_b32(y, t, L.ld_in_b32(x, t) + L.u32(2) * L.ldg_b32(w, t))


@L.kernel
def waits_for(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    t = cuda.threadIdx.x
    q = L.ld_in_b32(w, t)
    L.grid_launch_dependents()
    x = L.grid_wait_for(x)
    L.stg_b32(y, t, q + L.ld_waited_b32(x, t) + L.ldg_b32(w, t))


@L.kernel
def copies(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.grid_wait()
    L.cp_async_4(s, t, x, t, 4)
    L.cp_async_commit()
    L.cp_async_wait(0)
    L.stg_b32(y, t, L.lds_b32(s, t) + L.u32(2) * L.ldg_b32(w, t))


@L.kernel
def reads_early(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    v = L.ld_in_b32(x, cuda.threadIdx.x)  # !
    L.grid_wait()
    L.stg_b32(y, cuda.threadIdx.x, v)


@L.kernel
def copies_early(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    s = L.shared(L.u32, 64)
    t = cuda.threadIdx.x
    L.cp_async_4(s, t, x, t, 4)  # !
    L.cp_async_commit()
    L.grid_wait()
    L.cp_async_wait(0)
    L.stg_b32(y, t, L.lds_b32(s, t))


@L.kernel
def writes_early(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    L.stg_b32(y, cuda.threadIdx.x, 1)  # !
    L.grid_wait()


@L.kernel
def never(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    if cuda.threadIdx.x > 64:
        L.grid_wait()
    L.stg_b32(y, cuda.threadIdx.x, L.ld_in_b32(x, cuda.threadIdx.x))  # !


@L.kernel
def pure(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    L.grid_wait()
    L.stg_b32(y, cuda.threadIdx.x, L.ldg_b32(x, cuda.threadIdx.x))  # !


@L.kernel
def other_half(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    """The upper threads wait; the lower ones read."""
    t = cuda.threadIdx.x
    if t >= 32:
        L.grid_wait()
    L.stg_b32(y, t, L.ld_in_b32(x, t))  # !


W, X = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) * 3


def go(kernel: L.Kernel, before: str = "writes x, reads y", **options):
    """One run after a launch that touches the whole of x and y as said; None: an ordinary launch."""
    w, x, y = Buffer.of("w", W), Buffer.of("x", X), Buffer("y", 256)
    known = {"x": x, "y": y}
    spans = [Span(known[what[-1]], 0, 256, what.startswith("writes"), "before") for what in before.split(", ") if what]
    overlap = Overlap(spans)
    run(kernel, grid=1, block=64, args=(w, x, y), options=Options(**options), overlap=overlap)
    return overlap, y.array("u32")


@pytest.mark.parametrize("kernel", [right, one_waits, copies, waits_for])
@pytest.mark.parametrize("order", ["program", "random"])
def test_a_kernel_that_waits_passes(kernel, order):
    overlap, y = go(kernel, order=order)
    np.testing.assert_array_equal(y, X + 2 * W)
    assert overlap.waited
    assert overlap.early is (kernel is waits_for)


FAULTS = [
    (reads_early, "x", "this read of bytes [0, 4) of global buffer 'x' comes before grid_wait", "writes them"),
    (copies_early, "x", "this read of bytes [0, 4) of global buffer 'x' comes before grid_wait", "writes them"),
    (writes_early, "y", "this write of bytes [0, 4) of global buffer 'y' comes before grid_wait", "reads them"),
    (never, "x", "this read of bytes [0, 4) of global buffer 'x' comes before grid_wait", "writes them"),
    (pure, "x", "ldg_b32 reads bytes [0, 4) of global buffer 'x', which kernel before", "may move above grid_wait"),
    (other_half, "x", "this read of bytes [0, 4) of global buffer 'x'", "kernel before of a launch before"),
]


@pytest.mark.parametrize(("kernel", "buffer", "says", "more"), FAULTS, ids=[f[0].function.__name__ for f in FAULTS])
def test_what_comes_before_the_wait_is_reported(kernel, buffer, says, more):
    lines, first = inspect.getsourcelines(kernel.function)
    line = first + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# !"))
    with pytest.raises(Unwaited) as e:
        go(kernel)
    assert (e.value.kernel, e.value.block, e.value.thread) == (kernel.entry, (0, 0, 0), (0, 0, 0))
    assert (e.value.line, e.value.buffer) == (line, buffer)
    assert says in str(e.value)
    assert more in str(e.value)


@pytest.mark.parametrize("kernel", [reads_early, writes_early, pure])
def test_what_nobody_else_touches_may_come_before_the_wait(kernel):
    go(kernel, before="")
    go(kernel, before="writes y" if kernel is pure else "reads x")


def test_only_bytes_that_are_touched_count():
    w, x, y = Buffer.of("w", W), Buffer.of("x", X), Buffer("y", 256)
    run(reads_early, grid=1, block=32, args=(w, x, y), overlap=Overlap([Span(x, 128, 256, True, "before")]))
    with pytest.raises(Unwaited, match=r"thread \(32, 0, 0\).*bytes \[128, 132\)"):
        run(reads_early, grid=1, block=64, args=(w, x, y), overlap=Overlap([Span(x, 128, 256, True, "before")]))


def test_a_dependent_launch_must_wait_somewhere():
    with pytest.raises(Unwaited, match="found no thread of this dependent launch that called grid_wait") as e:
        go(never, before="")
    assert e.value.kernel == never.entry


@L.kernel
def signals_first(w: L.In[L.u32], x: L.In[L.u32], y: L.Out[L.u32]):
    L.grid_launch_dependents()
    L.grid_wait()


def test_a_signal_before_the_wait_is_early():
    assert go(signals_first)[0].early


@pytest.mark.parametrize("kernel", [right, waits_for, reads_early, writes_early, never, pure, signals_first])
def test_an_ordinary_launch_need_not_wait(kernel):
    run(kernel, grid=1, block=64, args=(Buffer.of("w", W), Buffer.of("x", X), Buffer("y", 256)))
