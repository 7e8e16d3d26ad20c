"""What a stream captures: the graph, and what its nodes launch, read back from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_lab.core.launch import dims
from atlas_lab.runtime.bind import NOTHING, Launched
from atlas_lab.runtime.cubin import DeviceKernel
from atlas_lab.runtime.driver import bindings, call, text


def captured(stream: Any, run: Callable[[], object], what: str, mode: Any) -> Any:
    """The graph (a CUgraph, the caller's to destroy) of what `run` enqueues on the stream, which does not run. Raises
    what `run` raises, and DeviceError, beginning with `what`."""
    driver = bindings()
    call(what, "cuStreamBeginCapture", stream, mode)
    try:
        run()
    except BaseException:
        # The capture must end before the stream can be used again; what it made is of no use.
        (_, *made) = driver.cuStreamEndCapture(stream)
        if made and int(made[0]):
            driver.cuGraphDestroy(made[0])
        raise
    return call(what, "cuStreamEndCapture", stream)


def nodes_of(graph: Any, kernels: set[DeviceKernel], what: str) -> tuple[Launched, ...]:
    """The nodes of a graph; those that launch one of `kernels` by its entry point."""
    driver = bindings()
    what = f"reading {what}"
    count = int(call(what, "cuGraphGetNodes", graph, 0)[1])
    out = []
    for node in call(what, "cuGraphGetNodes", graph, count)[0] if count else ():
        kind = call(what, "cuGraphNodeGetType", node)
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            out.append(Launched(f"node of type {getattr(kind, 'name', kind)}", NOTHING, NOTHING, 0))
            continue
        p = call(what, "cuGraphKernelNodeGetParams", node)
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        out.append(Launched(_entry(p, kernels, what), dims(grid), dims(block), int(p.sharedMemBytes)))
    return tuple(out)


def _entry(params: Any, kernels: set[DeviceKernel], what: str) -> str:
    """Which kernel a node launches. It has a CUfunction or a CUkernel, whichever the driver keeps for a kernel that
    was launched by its own handle; one that we did not make is called by its name."""
    function, kernel = int(params.func), int(params.kern)
    by_handle = {int(h): k.entry for k in kernels for h in (k.loaded, k.handle)}
    for handle in (function, kernel):
        if handle in by_handle:
            return by_handle[handle]
    name = text(call(what, "cuFuncGetName", params.func) if function else call(what, "cuKernelGetName", params.kern))
    return {k.symbol: k.entry for k in kernels}.get(name, name)
