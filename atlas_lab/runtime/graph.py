"""CUDA graphs of bound programs: captured once, replayed at no host cost a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from atlas_lab.runtime.bind import Bound
from atlas_lab.runtime.capture import captured, nodes_of
from atlas_lab.runtime.cuda import CudaBound, CudaDevice
from atlas_lab.runtime.driver import bindings, call, check
from atlas_lab.runtime.errors import DeviceError, VerifyError


class Graph:
    """Programs captured in order, on one device. It keeps them, and so their parameters and buffers, alive.

    `replay` enqueues all of them on the device's stream; `record` is what the graph holds, read back from it. A
    context manager.
    """

    def __init__(self, device: CudaDevice, programs: tuple[CudaBound, ...], graph: Any, executable: Any) -> None:
        self.device, self.programs = device, programs
        self._graph, self._executable = graph, executable
        self._what = f"graph of {programs[0].program.name}" + (f" and {len(programs) - 1} more" if programs[1:] else "")
        self._stream = device.stream.handle
        self._launch = bindings().cuGraphLaunch
        self._frees = device.frees
        self.record = nodes_of(graph, {k for p in programs for k in p.kernels}, self._what)

    def replay(self) -> None:
        """Enqueue the graph; raises BindError if a buffer was freed since the capture."""
        if self._executable is None:
            raise DeviceError(f"{self._what} was closed")
        if self.device.frees != self._frees:
            for p in self.programs:
                p.check_live()
            self._frees = self.device.frees
        self.device.note(self._what)
        status = self._launch(self._executable, self._stream)[0]
        if status:
            check(status, self._what)

    def verify(self) -> None:
        """Raise VerifyError unless the graph holds the programs' launches and nothing else; of a library's call that is
        what it launched when it was captured alone."""
        expected = Counter(n for p in self.programs for n in p.nodes)
        found = Counter(self.record)
        for launched in (*expected, *found):
            if found[launched] != expected[launched]:
                raise VerifyError(
                    f"{self._what}: found {found[launched]} launches of {launched}, expected the plan's "
                    f"{expected[launched]}"
                )

    def close(self) -> None:
        """Destroy the graph; it may not be running."""
        executable, self._executable = self._executable, None
        if executable is not None:
            call(f"closing {self._what}", "cuGraphExecDestroy", executable)
            call(f"closing {self._what}", "cuGraphDestroy", self._graph)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def capture(programs: Bound | Sequence[Bound]) -> Graph:
    """A graph of one run of every program, in order; a program may be in it several times.

    Nothing runs. Raises DeviceError for programs that are not bound to one GPU, or if a capture fails.
    """
    bound = tuple([programs] if isinstance(programs, Bound) else programs)
    if not bound:
        raise DeviceError("graph: found no program to capture, expected one or more")
    gpu = [b for b in bound if isinstance(b, CudaBound)]
    if len(gpu) != len(bound) or any(b.device is not gpu[0].device for b in gpu):
        raise DeviceError("graph: found programs of several devices or of the interpreter, expected one GPU's")
    device, driver = gpu[0].device, bindings()
    what = f"capturing {bound[0].program.name}"
    stream = device.stream.handle
    device.synchronize()

    def run() -> None:
        for b in gpu:
            b.run()

    graph = captured(stream, run, what, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        executable = call(what, "cuGraphInstantiate", graph, 0)
    except BaseException:
        driver.cuGraphDestroy(graph)
        raise
    # Uploading now keeps the first replay from doing it.
    call(what, "cuGraphUpload", executable, stream)
    device.note(what)
    return Graph(device, tuple(gpu), graph, executable)
