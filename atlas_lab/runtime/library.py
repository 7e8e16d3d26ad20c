"""A library's call on a GPU: made ready once, enqueued, and known by what it launches when it is captured alone."""

from __future__ import annotations

from typing import Any

from atlas_lab.runtime.bind import Launched, ResolvedCall, planned
from atlas_lab.runtime.capture import captured, nodes_of
from atlas_lab.runtime.driver import bindings, call
from atlas_lab.runtime.errors import BindError, DeviceError


class LibraryLauncher:
    """Enqueues the call; raises DeviceError naming it. `nodes` is what a graph holds of it, `description` what the
    library chose.

    Raises BindError where the library is not installed, refuses the call, or cannot be captured.
    """

    def __init__(self, x: ResolvedCall, stream: Any, where: str) -> None:
        self._where = where
        made = x.launch.call
        missing = made.missing()
        if missing:
            raise BindError(f"{where}: {missing}")
        context = int(call(where, "cuCtxGetCurrent"))
        addresses = tuple(a.buffer.memory + a.offset for a in x.arguments)
        try:
            self._enqueue = made.prepare(x.launch.args, addresses, int(stream.handle), context)
        except Exception as e:
            raise BindError(f"{where}: {made.library} reported {_said(e)}") from e
        self.description = self._enqueue.description
        self.launched = planned(x.launch)
        # A library loads a kernel when it launches it first, which only a relaxed capture allows.
        mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        try:
            graph = captured(stream.handle, self, f"{where}: capturing it alone", mode)
        except DeviceError as e:
            raise BindError(str(e)) from e
        try:
            self.nodes = nodes_of(graph, set(), where)
        finally:
            bindings().cuGraphDestroy(graph)

    def __call__(self) -> Launched:
        try:
            self._enqueue()
        except Exception as e:  # each library has a class of its own
            raise DeviceError(f"{self._where}: {self.description}: {_said(e)}") from e
        return self.launched


def _said(e: Exception) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())
