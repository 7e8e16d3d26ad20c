"""Loads that fail, at every place where they can, and weights that several threads ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from copy_arms import BATCH, FFN, QKV, catalog, context, site
from copy_cases import Files, projection

from atlas_lab.arms import copies
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Program
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import Alloc, Build, LoadPlan, derive_steps, load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.tensor import Tensor
from atlas_lab.runtime.device import DeviceError, open_device, target_named
from atlas_lab.runtime.errors import BindError, LoadError
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.runtime.load import Loaded, execute
from atlas_lab.simt import Uninitialised

MIXES: dict[str, tuple[list[Site], list[tuple[Any, list[str]]]]] = {
    "nvfp4": (
        [site(i, roles, 16, 128, "nvfp4") for i in (0, 1) for roles in (FFN, ("ffn.down",))],
        [(rows(1, 16), ["lanes"]), (BATCH, ["fused", "int8"])],
    ),
    "mixed": (
        [site(0, FFN, 128, 128, "fp8"), site(0, QKV, 16, 64, "nvfp4_ct"), site(1, FFN, 16, 256, "nvfp4", "bf16")],
        [(rows(1), ["inplace"]), (rows_from(2), ["parts", "mmq", "flip8"])],
    ),
}


def no_check(weight: object, label: str) -> None:
    pass


def loadable(mix: str) -> tuple[LoadPlan, Files]:
    sites, orders = MIXES[mix]
    ctx = context(rows(1, 64), orders=orders)
    return load_plan([resolve(s, ctx, catalog()) for s in sites]), Files(*(p for s in sites for p in s.projections))


class Fragile(InterpreterDevice):
    """Has room for `left` allocations, or does `left` of something else; frees may fail too."""

    def __init__(self, what: str, left: int, *, bad_frees: bool = False) -> None:
        super().__init__(target_named("h200"))
        self.what, self.left, self.bad_frees = what, left, bad_frees
        self.failed = False

    def _count(self, what: str) -> None:
        if what == self.what:
            if self.left == 0:
                self.failed = True
                raise DeviceError(f"injected at {what}")
            self.left -= 1

    def _take(self, name: str, nbytes: int) -> Any:
        self._count("allocate")
        return super()._take(name, nbytes)

    def _write(self, buffer: Any, offset: int, raw: np.ndarray) -> None:
        self._count("upload")
        super()._write(buffer, offset, raw)

    def bind(self, program: Program, buffers: Any) -> Any:
        self._count("build")
        return super().bind(program, buffers)

    def _give(self, buffer: Any) -> None:
        super()._give(buffer)
        if self.failed and self.bad_frees:
            raise DeviceError("the card is lost")


@pytest.mark.parametrize("bad_frees", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_out_of_memory_at_every_allocation_in_turn_leaves_nothing(mix: str, bad_frees: bool) -> None:
    plan, files = loadable(mix)
    before = {name: a.tobytes() for name, a in files.arrays.items()}
    count = sum(isinstance(s, Alloc) for s in plan.steps)
    for n in range(count):
        device = Fragile("allocate", n, bad_frees=bad_frees)
        with pytest.raises(DeviceError, match="injected at allocate"):
            execute(plan, files.read, no_check, device)
        device.ledger.check_empty()
        assert device.ledger.peak <= plan.peak
    assert before == {name: a.tobytes() for name, a in files.arrays.items()}
    device = Fragile("allocate", count)
    with execute(plan, files.read, no_check, device) as loaded:
        assert loaded.rows() == plan.ledger()
    device.ledger.check_empty()


@pytest.mark.parametrize("what", ["upload", "build"])
@pytest.mark.parametrize("mix", MIXES)
def test_any_other_failure_of_the_device_leaves_nothing(mix: str, what: str) -> None:
    plan, files = loadable(mix)
    builds: Any = "device" if what == "build" else "host"
    for n in range(1000):
        device = Fragile(what, n)
        try:
            execute(plan, files.read, no_check, device, builds=builds)
        except DeviceError:
            device.ledger.check_empty()
        else:
            break
    assert n > {"build": 3, "upload": 20}[what]


def test_a_reader_that_fails_at_every_tensor_in_turn_leaves_nothing() -> None:
    plan, files = loadable("mixed")
    device = open_device("interpreter")
    for n in range(1000):
        left = [n]

        def read(t: Tensor, left: list[int] = left) -> np.ndarray:
            if not left[0]:
                raise OSError("the disk is gone")
            left[0] -= 1
            return files.read(t)

        try:
            execute(plan, read, no_check, device).close()
        except OSError:
            device.ledger.check_empty()
        else:
            break
    assert n > 20
    device.ledger.check_empty()


def weight(build: Callable[[], None] = lambda: None) -> tuple[Derived, Files, list[str]]:
    """An int8 copy whose host build calls `build`, and the names of threads that built it."""
    p = projection("ffn.down", 16, 64, "bf16")
    plain, builders = copies.int8_32(p), []

    def slow(w: np.ndarray) -> Any:
        builders.append(threading.current_thread().name)
        build()
        return plain.build(w)

    d = Derived("int8_32", source=p.weight, build=slow, dequantize=plain.dequantize, **dict(plain.fields))
    return d, Files(p), builders


def together(count: int, ask: Callable[[], Any]) -> list[Any]:
    """What `ask` returns or raises in each of `count` threads that begin at once."""
    gate, found = threading.Barrier(count), []

    def run() -> None:
        gate.wait()
        try:
            found.append(ask())
        except Exception as e:
            found.append(e)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def empty(files: Files) -> tuple[Loaded, InterpreterDevice]:
    device = open_device("interpreter")
    return execute(LoadPlan(()), files.read, no_check, device), device


def test_a_weight_that_two_threads_ask_for_is_built_once() -> None:
    wait = threading.Event()
    d, files, builders = weight(lambda: wait.wait(0.05))
    loaded, device = empty(files)
    found = together(4, lambda: loaded.derived(d))
    assert len(builders) == 1
    assert all(set(f) == {"q", "scale"} and f["q"] is found[0]["q"] for f in found)
    forecast = LoadPlan(derive_steps(d, ()))
    assert loaded.rows() == forecast.ledger() == device.ledger.rows()
    assert device.ledger.peak == forecast.peak
    expected = d.build(files.read(d.weights[0]["weight"]).astype(np.float32))
    assert device.download(found[0]["q"], "i8", (16, 64)).tobytes() == expected["q"].tobytes()
    loaded.close()
    device.ledger.check_empty()


def test_a_build_that_fails_is_tried_again_by_the_next_who_asks() -> None:
    failures = iter([True, True, False])

    def fail() -> None:
        if next(failures):
            raise ValueError("no luck")

    d, files, builders = weight(fail)
    loaded, device = empty(files)
    found = together(4, lambda: loaded.derived(d))
    assert len(builders) == 3
    assert sum(isinstance(f, LoadError) for f in found) == 2
    assert loaded.rows() == LoadPlan(derive_steps(d, ())).ledger()
    loaded.close()
    with pytest.raises(LoadError, match=r"derived weight 'int8_32' of .*: its weights were closed"):
        loaded.derived(d)
    device.ledger.check_empty()


def test_what_a_plan_built_is_not_built_again_and_what_is_there_is_not_uploaded_again() -> None:
    plan, files = loadable("nvfp4")
    device = open_device("interpreter")
    p = MIXES["nvfp4"][0][1].projections[0]
    with execute(plan, files.read, no_check, device) as loaded:
        rows_before = loaded.rows()
        made = loaded.derived(copies.repacked_nvfp4(p))
        assert made["weight"] is loaded[copies.repacked_nvfp4(p).tensors["weight"].name]
        assert loaded.rows() == rows_before
        loaded.derived(copies.transposed_nvfp4(p))
        assert loaded.ledger.held == plan.steady + 16 * 64 + 2 * 256
    inplace, files = loadable("mixed")
    q = MIXES["mixed"][0][1].projections[0]
    with execute(inplace, files.read, no_check, device, builds="device") as loaded:
        held, freed = loaded.ledger.held, loaded.report().freed
        loaded.derived(copies.block_nvfp4(q))  # its source is bound in place for M = 1: used, and kept
        assert loaded.ledger.held == held + 3 * 256 + 256
        assert loaded.report().freed == freed
        assert q.weight["weight"].name in loaded
    device.ledger.check_empty()


def test_out_of_memory_while_a_thread_asks_leaves_what_was_loaded() -> None:
    plan, files = loadable("nvfp4")
    p = MIXES["nvfp4"][0][1].projections[0]
    d = copies.transposed_nvfp4(p)
    count = sum(isinstance(s, Alloc) for s in plan.steps)
    for n in range(sum(isinstance(s, Alloc) for s in derive_steps(d, ()))):
        device = Fragile("allocate", count + n)
        with execute(plan, files.read, no_check, device) as loaded:
            with pytest.raises(DeviceError, match="injected"):
                loaded.derived(d)
            assert loaded.rows() == plan.ledger()
            device.left = 1000
            loaded.derived(d)
        device.ledger.check_empty()


def test_freed_memory_reads_as_nan() -> None:
    """What was staged for a build, and everything after the load is closed, is poison to whoever still holds it."""
    plan, files = loadable("nvfp4")
    taken = []

    class Watched(InterpreterDevice):
        def _take(self, name: str, nbytes: int) -> Any:
            taken.append(super()._take(name, nbytes))
            return taken[-1]

    device = Watched(target_named("h200"))
    with execute(plan, files.read, no_check, device, builds="device") as loaded:
        live = {id(b.memory) for b in loaded.values()}
        staged = [m for m in taken if id(m) not in live]
        assert len(staged) == sum(r.count for r in plan.report().freed)
        assert all(m.unwritten == [(0, m.size)] for m in staged)
        assert not any(m.unwritten for m in taken if id(m) in live)
    for m in taken:
        assert m.unwritten == [(0, m.size)]
        assert (m.array("u8") == 0xFF).all()


def test_a_use_after_free_is_no_number() -> None:
    """A plan that freed a source before its build: the device refuses it, and one that did not would read poison."""
    p = projection("ffn.up", 16, 64, "nvfp4")
    files, d = Files(p), copies.transposed_nvfp4(p)

    class Careless(InterpreterDevice):
        def _give(self, buffer: Any) -> None:
            buffer.memory.poison()
            buffer.live = self.careless

    steps = derive_steps(d, ())
    at = next(i for i, s in enumerate(steps) if isinstance(s, Build))
    name = p.weight["weight"].name
    for careless, error in ((False, BindError), (True, Uninitialised)):
        device = Careless(target_named("h200"))
        device.careless = careless
        loaded = Loaded(device, files.read, "device")
        loaded.run(steps[:at])
        source = loaded[name]
        loaded.free(name)
        loaded._buffers[name] = source
        with pytest.raises(error):
            loaded.run(steps[at : at + 1])
