"""Calls of libraries on the interpreter, on a GPU, and as records: a copy, which needs no library but the driver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_kernels import bf16, launch, ports, scale_rows

from atlas_lab.core.launch import Program
from atlas_lab.core.library import LibraryCall, LibraryLaunch
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime import driver, library
from atlas_lab.runtime.bind import NOTHING, Launched, resolve
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.errors import BindError, DeviceError, VerifyError
from atlas_lab.runtime.graph import Graph, capture

X, Y, SPACE = Tensor("bf16", (3, 40), "x"), Tensor("bf16", (3, 40), "y"), Tensor("u8", (64,), "space")


class Copy:
    """cuMemcpyDtoDAsync."""

    description = "a copy"

    def __init__(self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...], stream: int, context: int) -> None:
        (x, _, _), (source, target, _) = tensors, addresses
        self.args = (target, source, x.bytes, stream)

    def __call__(self) -> None:
        driver.call(self.description, "cuMemcpyDtoDAsync", *self.args)


COPY = LibraryCall(
    "copy",
    "the driver",
    tuple(
        Parameter(m, L.u8 if n == "space" else L.bf16, name=n) for m, n in (("in", "x"), ("out", "y"), ("out", "space"))
    ),
    L.Needs((8, 0)),
    Copy,
    lambda: "",
    np.copy,
    workspace="space",
)
CALL = LibraryLaunch(COPY, (X, Y, SPACE), label="x to y")
PROGRAM = Program("copied", (CALL,), inputs=(X,), outputs=(Y,), temporaries=(SPACE,))
RECORD = Launched("library call copy", NOTHING, NOTHING, 0)


def changed(**fields: Any) -> Program:
    return replace(PROGRAM, launches=(replace(CALL, call=replace(COPY, **fields)),))


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param) as opened:
        yield opened


def test_it_runs_and_is_recorded(device) -> None:
    buffers = ports(device, PROGRAM)
    x = bf16(np.random.default_rng(0), *X.shape)
    device.upload(buffers["x"], x)
    bound = device.bind(PROGRAM, buffers)
    bound.run()
    bound.verify()
    assert bound.record == (RECORD,)
    y = device.download(buffers["y"], "bf16", Y.shape)
    assert y.tobytes() == x.tobytes()
    space = device.download(buffers["space"], "u8", SPACE.shape)
    assert (space == 0xFF).all()


def test_beside_launches_of_kernels(device) -> None:
    z = Tensor("bf16", Y.shape, "z")
    program = replace(PROGRAM, launches=(CALL, launch(scale_rows, 120, Y, z, 120, 0.5)), outputs=(Y, z))
    buffers = ports(device, program)
    x = bf16(np.random.default_rng(1), *X.shape)
    device.upload(buffers["x"], x)
    bound = device.bind(program, buffers)
    bound.run()
    bound.verify()
    assert [r.entry for r in bound.record] == ["library call copy", scale_rows.entry]
    found = device.download(buffers["z"], "bf16", z.shape)
    assert (found.astype(np.float32) == x.astype(np.float32) / 2).all()


def test_a_buffer_freed_after_binding(device) -> None:
    buffers = ports(device, PROGRAM)
    bound = device.bind(PROGRAM, buffers)
    buffers["space"].free()
    with pytest.raises(BindError, match=r"program copied: buffer 'space' was freed after binding"):
        bound.run()


def test_a_meaning_of_another_shape() -> None:
    with open_device("interpreter") as device:
        program = changed(numpy=lambda x: x[:1])
        bound = device.bind(program, ports(device, program))
        with pytest.raises(
            BindError, match=r"library call copy \(x to y\): found \(1, 40\) computed, expected \(3, 40\)"
        ):
            bound.run()


@pytest.mark.gpu
def test_a_graph_holds_what_the_call_launched_when_captured_alone(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device("cuda") as device:
        buffers = ports(device, PROGRAM)
        x = bf16(np.random.default_rng(2), *X.shape)
        device.upload(buffers["x"], x)
        bound = device.bind(PROGRAM, buffers)
        assert [n.entry for n in bound.nodes] == ["node of type CU_GRAPH_NODE_TYPE_MEMCPY"]
        with capture([bound, bound]) as graph:
            graph.verify()
            assert graph.record == bound.nodes * 2
            graph.replay()
            device.synchronize()
        assert device.download(buffers["y"], "bf16", Y.shape).tobytes() == x.tobytes()


class FakeDriver:
    """What `LibraryLauncher` asks of the driver, and what a capture of its call holds."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[tuple[Any, ...]] = []
        self.destroyed: list[str] = []
        monkeypatch.setattr(library, "bindings", lambda: self)
        monkeypatch.setattr(library, "call", lambda what, function: {"cuCtxGetCurrent": 77}[function])
        monkeypatch.setattr(library, "captured", self.captured)
        monkeypatch.setattr(
            library, "nodes_of", lambda graph, kernels, what: (Launched("gemm<1>", (2, 1, 1), (128, 1, 1), 0),)
        )

    def captured(self, stream: Any, run: Any, what: str, mode: Any) -> str:
        run()
        self.captures.append((stream, mode))
        return "graph"

    def cuGraphDestroy(self, graph: str) -> None:  # noqa: N802
        self.destroyed.append(graph)


def launcher_of(program: Program) -> library.LibraryLauncher:
    """The launcher of its call over buffers of the interpreter that say they have addresses."""
    with open_device("interpreter") as device:
        (x,) = resolve(program, ports(device, program), device)
        for at, a in enumerate(x.arguments):
            a.buffer.memory, a.buffer.live = 1000 * (at + 1), False
        device._buffers.clear()
        return library.LibraryLauncher(x, SimpleNamespace(handle=5), "here")


def test_it_is_prepared_once_and_captured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, prepared, calls = FakeDriver(monkeypatch), [], []

    class Enqueue:
        description = "algorithm 7"

        def __init__(self, *args: Any) -> None:
            prepared.append(args)

        def __call__(self) -> None:
            calls.append(len(fake.captures))

    made = launcher_of(changed(prepare=Enqueue))
    assert prepared == [((X, Y, SPACE), (1000, 2000, 3000), 5, 77)]
    assert (fake.captures, fake.destroyed) == ([(5, "relaxed")], ["graph"])
    assert (made.nodes, made.description) == ((Launched("gemm<1>", (2, 1, 1), (128, 1, 1), 0),), "algorithm 7")
    assert made() == RECORD
    assert calls == [0, 1]


def test_a_library_that_refuses_or_fails_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    with pytest.raises(BindError, match=r"^here: SomeLib is not installed; pip install 'atlas-lab\[some\]'$"):
        launcher_of(changed(missing=lambda: "SomeLib is not installed; pip install 'atlas-lab[some]'"))

    def refuse(*_: Any) -> Any:
        raise ValueError("no\nalgorithm")

    with pytest.raises(BindError, match=r"^here: the driver reported ValueError: no algorithm$"):
        launcher_of(changed(prepare=refuse))

    class Late:
        description, failing = "algorithm 7", False

        def __init__(self, *_: Any) -> None: ...

        def __call__(self) -> None:
            if Late.failing:
                raise RuntimeError("lost")

    made = launcher_of(changed(prepare=Late))
    Late.failing = True
    with pytest.raises(DeviceError, match=r"^here: algorithm 7: RuntimeError: lost$"):
        made()
    with pytest.raises(BindError, match=r"^here: algorithm 7: RuntimeError: lost$"):
        launcher_of(changed(prepare=Late))


def test_a_graph_that_holds_another_kernel_is_not_the_plan() -> None:
    node = Launched("gemm<1>", (2, 1, 1), (128, 1, 1), 0)
    graph = object.__new__(Graph)
    graph._what, graph._executable = "graph of p", None
    graph.programs, graph.record = (SimpleNamespace(nodes=(node,)),), (node,)
    graph.verify()
    graph.record = (replace(node, entry="gemm<2>"),)
    with pytest.raises(VerifyError, match=r"graph of p: found 0 launches of gemm<1> grid .*, expected the plan's 1"):
        graph.verify()
    graph.record = (node, node)
    with pytest.raises(VerifyError, match=r"graph of p: found 2 launches of gemm<1> "):
        graph.verify()
