"""Dependent launches: which of the earlier ones still count on the interpreter, and what the driver is handed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_kernels import counting_program, digest, expected_count, launch, ports

from atlas_lab.core.launch import Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.runtime import launcher
from atlas_lab.runtime.bind import Launched, Resolved
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.errors import BindError
from atlas_lab.simt import Unwaited

N = 128


@pytest.fixture
def device():
    return open_device("interpreter")


@L.family
def copy(wait_first: bool, signal: bool):
    """y[i] = x[i], read before the wait or after it, with a signal before both or without one."""

    @L.kernel
    def late(x: L.In[L.u32], y: L.Out[L.u32]):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if signal:
            L.grid_launch_dependents()
        L.grid_wait()
        L.stg_b32(y, i, L.ld_in_b32(x, i))

    @L.kernel
    def early(x: L.In[L.u32], y: L.Out[L.u32]):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if signal:
            L.grid_launch_dependents()
        v = L.ld_in_b32(x, i)
        L.grid_wait()
        L.stg_b32(y, i, v)

    return late if wait_first else early


LATE, SIGNALS, EARLY = copy(True, False), copy(True, True), copy(False, False)
A, B, C, D = (Tensor("u32", (N,), name) for name in "abcd")


def chain(*steps: tuple[Any, Tensor, Tensor, bool]) -> Program:
    launches = tuple(launch(kernel, N, x, y, pdl=pdl) for kernel, x, y, pdl in steps)
    return Program("chain", launches, inputs=(A,), outputs=(B, C, D))


def bound(device, program: Program):
    buffers = ports(device, program)
    for name, buffer in buffers.items():
        device.upload(buffer, np.full(N, ord(name), np.uint32))
    return device.bind(program, buffers), buffers


def test_two_dependent_launches_run_as_on_a_gpu(device):
    program = counting_program(N)
    buffers = ports(device, program)
    rng = np.random.default_rng(0)
    w, x = (rng.integers(0, 2**32, N, np.uint32) for _ in range(2))
    for name, data in (("w", w), ("x", x), ("s", np.zeros(N, np.uint32))):
        device.upload(buffers[name], data)
    made = device.bind(program, buffers)
    for _ in range(3):
        made.run()
        made.verify()
    np.testing.assert_array_equal(device.download(buffers["s"], "u32", (N,)), expected_count(w, x, 3))


# The steps, and the buffer that the last one reads too early, if it does.
CHAINS = {
    "the launch before writes it": ([(LATE, A, B, False), (EARLY, B, C, True)], "b"),
    "nobody before writes it": ([(LATE, A, B, False), (EARLY, A, C, True)], None),
    "written two launches ago": ([(LATE, A, B, False), (LATE, A, C, True), (EARLY, B, D, True)], None),
    "two ago, and the one between signals first": (
        [(LATE, A, B, False), (SIGNALS, A, C, True), (EARLY, B, D, True)],
        "b",
    ),
    "two ago, and the one between is ordinary": (
        [(LATE, A, B, False), (SIGNALS, A, C, False), (EARLY, B, D, True)],
        None,
    ),
    "an ordinary launch follows": ([(SIGNALS, A, B, True), (EARLY, B, C, False)], None),
    "a wait ends all before": (
        [(LATE, A, B, False), (SIGNALS, A, C, True), (LATE, C, D, True), (EARLY, B, C, True)],
        None,
    ),
    "it waits": ([(LATE, A, B, False), (SIGNALS, B, C, True), (LATE, C, D, True)], None),
}


@pytest.mark.parametrize("case", CHAINS)
def test_which_launches_may_still_run(device, case):
    steps, early = CHAINS[case]
    made, _ = bound(device, chain(*steps))
    if early is None:
        made.run()
        return
    with pytest.raises(Unwaited, match=rf"this read of bytes \[0, 4\) of global buffer '{early}' comes before") as e:
        made.run()
    assert e.value.kernel == EARLY.entry


def test_the_first_launch_overlaps_with_what_ran_before_until_the_stream_was_waited_for(device):
    first, buffers = bound(device, chain((LATE, A, B, False)))
    second = device.bind(chain((EARLY, B, C, True)), buffers)
    second.run()  # after the uploads
    first.run()
    with pytest.raises(Unwaited, match="global buffer 'b' comes before grid_wait"):
        second.run()
    first.run()
    device.synchronize()
    second.run()
    first.run()
    device.download(buffers["b"], "u32", (N,))
    second.run()


def test_views_of_one_buffer_do_not_touch(device):
    whole = Tensor("u32", (2 * N,), "b")
    low, high = whole.view(0, (N,)), whole.view(N, (N,))
    launches = (launch(LATE, N, A, low), launch(EARLY, N, high, C, pdl=True))
    program = Program("views", launches, inputs=(A,), outputs=(whole, C))
    buffers = ports(device, program)
    for b in buffers.values():
        device.upload(b, np.zeros(b.bytes // 4, np.uint32))
    device.bind(program, buffers).run()


def test_what_the_driver_is_handed(monkeypatch):
    driver = SimpleNamespace(
        CUlaunchAttribute=lambda: SimpleNamespace(id=None, value=SimpleNamespace()),
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
        cuLaunchKernelEx=lambda *args: handed.append(args) or (0,),
        cuLaunchKernel=lambda *args: handed.append(args) or (0,),
    )
    handed: list[Any] = []
    monkeypatch.setattr(launcher, "bindings", lambda: driver)
    monkeypatch.setattr(launcher, "values", lambda params, arguments: [])
    monkeypatch.setattr(launcher, "Packed", lambda values: SimpleNamespace(address=77))
    w, x, s = (Tensor("u32", (N,), name) for name in "wxs")
    kernel, stream = SimpleNamespace(entry="digest", function=5), SimpleNamespace(handle=9)
    for pdl in (True, False):
        resolved = Resolved(launch(digest, N, w, x, s, N, shared=64, pdl=pdl), ())
        made = launcher.PackedLauncher(kernel, resolved, stream, "here")
        assert made() == Launched("digest", (2, 1, 1), (64, 1, 1), 64)
    ((config, *rest), plain) = handed
    assert rest == [5, 77, 0]
    assert plain == (5, 2, 1, 1, 64, 1, 1, 64, 9, 77, 0)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (2, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert (config.sharedMemBytes, config.hStream, config.numAttrs) == (64, 9, 1)
    (attribute,) = config.attrs
    assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == (6, 1)


def test_a_cuda_core_without_dependent_launches_is_refused(monkeypatch):
    def configure(grid, block, shmem_size):
        return grid

    monkeypatch.setattr(launcher, "core", lambda: SimpleNamespace(LaunchConfig=configure, launch=None))
    w, x, s = (Tensor("u32", (N,), name) for name in "wxs")
    resolved = Resolved(launch(digest, N, w, x, s, N, pdl=True), ())
    with pytest.raises(BindError, match=r"here is a dependent launch: found a cuda\.core without them, expected"):
        launcher.CoreLauncher(SimpleNamespace(entry="digest"), resolved, None, "here")
