"""Staged uploads over a lane that copies as late as it may: what is overwritten too early arrives wrong."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.core.loadplan import Alloc, Free, LoadPlan, Upload
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.runtime import pinned, staging
from atlas_lab.runtime.device import Buffer, Device, DeviceError, open_device, target_named
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.runtime.load import execute
from atlas_lab.runtime.pinned import PinnedLane
from atlas_lab.runtime.staging import Lane, Staged, Uploader

LENGTH = 64


class LateLane(Lane):
    """Copies what was sent, in order, when somebody waits for it. `room` sends go through, the next fails."""

    def __init__(self, device: Device, count: int, room: int = 1 << 30) -> None:
        self.device, self.room = device, room
        self.slots = [np.full(LENGTH, 0xEE, np.uint8) for _ in range(count)]
        self.sent: list[tuple[int, Buffer, int, int]] = []

    def send(self, slot: int, buffer: Buffer, offset: int, size: int) -> None:
        assert slot not in [s for s, *_ in self.sent], "a slot was sent again before its copy was waited for"
        if not self.room:
            raise DeviceError("the lane broke")
        self.room -= 1
        self.sent.append((slot, buffer, offset, size))

    def wait(self, slot: int) -> None:
        while slot in [s for s, *_ in self.sent]:
            at, buffer, offset, size = self.sent.pop(0)
            self.device.upload(buffer, self.slots[at][:size], offset)
            self.slots[at][:] = 0xEE


@pytest.fixture(autouse=True)
def _everything_through_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SMALL", 8)


sizes = st.lists(st.integers(0, 5 * LENGTH), min_size=1, max_size=8)


@settings(max_examples=60)
@given(sizes, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_every_byte_arrives_whatever_the_sizes(lengths: list[int], slots: int, helpers: int, seed: int) -> None:
    device = open_device("interpreter")
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, n, np.uint8) for n in lengths]
    buffers = [device.allocate(n + 3, "test", name=f"b{i}") for i, n in enumerate(lengths)]
    lane = LateLane(device, slots)
    with Staged(lane, helpers) as uploader:
        for i, (b, a) in enumerate(zip(buffers, arrays, strict=True)):
            uploader.put(b, a, 3)
            if rng.random() < 0.2:
                uploader.flush()
            if rng.random() < 0.2:
                uploader.finish()
                assert not lane.sent
                assert device.download(b, "u8", (lengths[i],), 3).tobytes() == a.tobytes()
    for b, a in zip(buffers, arrays, strict=True):
        assert device.download(b, "u8", a.shape, 3).tobytes() == a.tobytes()


def test_arrays_of_any_layout_and_rank_are_copied_in_row_major_order() -> None:
    device = open_device("interpreter")
    b = device.allocate(4 * 600, "test", name="b")
    a = np.arange(600, dtype=np.float32).reshape(20, 30)
    with Staged(LateLane(device, 2)) as uploader:
        uploader.put(b, a.T)
        uploader.put(b, np.float32(7).reshape(()), 0)
    found = device.download(b, "f32", (30, 20))
    assert found[0, 0] == 7
    np.testing.assert_array_equal(found.reshape(-1)[1:], np.ascontiguousarray(a.T).reshape(-1)[1:])


def test_bytes_outside_a_buffer_are_refused_before_anything_is_sent() -> None:
    device = open_device("interpreter")
    b, lane = device.allocate(100, "test", name="b"), LateLane(device, 2)
    with (
        pytest.raises(DeviceError, match="upload: found bytes 90 to 101 of buffer 'b', expected at most 100"),
        Staged(lane) as uploader,
    ):
        uploader.put(b, np.zeros(11, np.uint8), 90)
    assert not lane.sent
    b.free()
    with pytest.raises(DeviceError, match="upload: buffer 'b' was freed"), Staged(lane) as uploader:
        uploader.put(b, np.zeros(1, np.uint8))


class LateDevice(InterpreterDevice):
    """Uploads through a late lane of `slots` slots, that breaks after `room` sends."""

    def __init__(self, slots: int = 3, room: int = 1 << 30) -> None:
        super().__init__(target_named("h200"))
        self.lane = LateLane(self, slots, room)

    def uploader(self, nbytes: int) -> Uploader:
        return Staged(self.lane, 2)


def plan_of(count: int) -> tuple[LoadPlan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(count)
    tensors = [Tensor("u8", (int(rng.integers(1, 5 * LENGTH)),), f"t{i}") for i in range(count)]
    steps: list[Any] = []
    for i, t in enumerate(tensors):
        steps += [Alloc(t.name, round_up(t.bytes), "w", "layers.0"), Upload(t)]
        if i % 3 == 2:
            steps.append(Free(t.name))
    return LoadPlan(tuple(steps)), {t.name: rng.integers(0, 256, t.shape, np.uint8) for t in tensors}


def no_check(weight: object, label: str) -> None:
    pass


def test_a_load_through_the_lane_is_the_forecast() -> None:
    plan, arrays = plan_of(10)
    device = LateDevice()
    with execute(plan, lambda t: arrays[t.name], no_check, device) as loaded:
        assert (loaded.rows(), loaded.ledger.peak) == (plan.ledger(), plan.peak)
        for name, buffer in loaded.items():
            assert device.download(buffer, "u8", arrays[name].shape).tobytes() == arrays[name].tobytes()
    device.ledger.check_empty()
    assert not device.lane.sent


def test_a_lane_that_breaks_at_any_copy_leaves_nothing_and_no_thread() -> None:
    plan, arrays = plan_of(7)
    threads = threading.active_count()
    for room in range(100):
        device = LateDevice(2, room)
        try:
            execute(plan, lambda t: arrays[t.name], no_check, device).close()
        except DeviceError:
            assert not device.lane.room
        else:
            break
        finally:
            device.ledger.check_empty()
            assert threading.active_count() == threads
    assert room > 10


def test_a_helper_that_fails_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, arrays = plan_of(7)
    left = [5]

    def copyto(into: np.ndarray, piece: np.ndarray) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("page fault")
        into[:] = piece

    monkeypatch.setattr(staging.np, "copyto", copyto)
    device = LateDevice()
    with pytest.raises(OSError, match="page fault"):
        execute(plan, lambda t: arrays[t.name], no_check, device)
    device.ledger.check_empty()
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if t.name.startswith("upload")]


@pytest.mark.gpu
def test_a_staged_load_on_a_gpu_has_every_byte() -> None:
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.integers(0, 256, n, np.uint8) for i, n in enumerate((1, 50_000_001, 65_537, 30_000_000))}
    tensors = [Tensor("u8", a.shape, name) for name, a in arrays.items()]
    steps = [s for t in tensors for s in (Alloc(t.name, round_up(t.bytes), "w", "layers.0"), Upload(t))]
    with open_device("cuda") as device:
        for _ in range(2):
            with execute(LoadPlan(tuple(steps)), lambda t: arrays[t.name], no_check, device) as loaded:
                for name, a in arrays.items():
                    assert device.download(loaded[name], "u8", a.shape).tobytes() == a.tobytes()
                    device.check_guards(loaded[name])
        device.ledger.check_empty()


class FakeDriver:
    """The few driver calls of a pinned lane, over ordinary memory; copies happen when their event is waited for."""

    def __init__(self, fail: str = "") -> None:
        self.fail, self.memory, self.events, self.queue = fail, {}, {}, []  # type: ignore[var-annotated]

    def call(self, what: str, function: str, *args: Any) -> Any:
        if function == self.fail:
            raise DeviceError(f"{what}: injected")
        if function == "cuMemHostAlloc":
            block = np.full(args[0], 0xEE, np.uint8)
            self.memory[block.ctypes.data] = block
            return block.ctypes.data
        if function == "cuEventCreate":
            self.events[len(self.events)] = 0
            return len(self.events) - 1
        if function == "cuMemcpyHtoDAsync":
            self.queue.append(args)
        elif function == "cuEventRecord":
            self.events[args[0]] = len(self.queue)
        elif function == "cuEventSynchronize":
            for i, (to, source, size, stream) in enumerate(self.queue[: self.events[args[0]]]):
                ctypes.memmove(to, source, size)
                self.queue[i] = (to, source, 0, stream)
        elif function == "cuEventDestroy":
            del self.events[args[0]]
        elif function == "cuMemFreeHost":
            del self.memory[args[0]]
        return None


class FakeGpu(InterpreterDevice):
    stream: Any = type("Stream", (), {"handle": 7})


def pinned_lane(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> PinnedLane:
    monkeypatch.setattr(pinned, "call", driver.call)
    flags = type("Flags", (), {"CU_EVENT_DISABLE_TIMING": 2})
    monkeypatch.setattr(pinned, "bindings", lambda: type("Driver", (), {"CUevent_flags": flags}))
    return PinnedLane(FakeGpu(target_named("h200")), LENGTH, 3)  # type: ignore[arg-type]


def test_a_pinned_lane_s_calls_move_the_bytes_and_give_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    lane = pinned_lane(monkeypatch, driver)
    assert lane.bytes == 3 * LENGTH
    target, data = np.zeros(500, np.uint8), np.random.default_rng(0).integers(0, 256, 490, np.uint8)
    buffer = lane.device.allocate(500, "test", name="b")
    buffer.memory = target.ctypes.data
    with Staged(lane, 2) as uploader:
        uploader.put(buffer, data, 10)
    assert target[10:].tobytes() == data.tobytes()
    assert not target[:10].any()
    lane.close()
    lane.close()
    assert not driver.memory
    assert not driver.events


@pytest.mark.parametrize("fail", ["cuMemHostAlloc", "cuEventCreate"])
def test_a_lane_that_cannot_be_had_keeps_nothing(monkeypatch: pytest.MonkeyPatch, fail: str) -> None:
    driver = FakeDriver(fail)
    with pytest.raises(DeviceError, match="injected"):
        pinned_lane(monkeypatch, driver)
    assert not driver.memory
    assert not driver.events
