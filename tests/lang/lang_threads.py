"""The least of an interpreter: 32 lanes over one bytearray a space, no checks. The interpreter proper is `simt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from atlas_lab.kernels import lang as L


def pointer(data: Any, dtype: L.Scalar, space: str = "global", mode: str = "inout") -> L.Pointer:
    """A pointer to the first byte of a bytearray or of an array's memory."""
    buffer = data if isinstance(data, bytearray) else memoryview(data.view(np.uint8)).cast("B")
    return L.Pointer(buffer, 0, dtype, space, mode)


class Thread:
    def __init__(self, lane: int, log: list[Any]) -> None:
        self.lane, self.warp, self.log = lane, 0, log
        self.threadIdx = SimpleNamespace(x=lane, y=0, z=0)

    @staticmethod
    def _view(p: L.Pointer, index: int, unit: L.Scalar, count: int) -> np.ndarray:
        start = p.offset + index * p.dtype.bytes
        return np.frombuffer(p.buffer, np.uint8)[start : start + unit.bytes * count].view(unit.numpy)

    def read(self, p: L.Pointer, index: int, unit: L.Scalar, count: int, order: str = "weak") -> tuple[Any, ...]:
        self.log.append(("read", order))
        values = self._view(p, index, unit, count)
        return tuple(values) if unit is L.f32 else tuple(values.tolist())

    def write(self, p: L.Pointer, index: int, unit: L.Scalar, values: Sequence[Any], order: str = "weak") -> None:
        self.log.append(("write", order))
        self._view(p, index, unit, len(values))[:] = values

    def update(self, p: L.Pointer, index: int, unit: L.Scalar, change: Callable[[Any], Any], order: str = "") -> Any:
        (old,) = self.read(p, index, unit, 1)
        self.write(p, index, unit, (change(old),))
        return old

    def warp_op(self, name: str, mask: int, arg: Any, combine: Callable[..., Any]) -> Any:
        return getcurrent().parent.switch((name, mask, arg, combine))

    def shared(self, site: Any, dtype: L.Scalar, count: int, align: int) -> L.Pointer:
        self.log.append(("shared", site))
        return pointer(bytearray(count * dtype.bytes), dtype, "shared")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.log.append((name, *args))


def run_warp(body: Callable[[int], Any], log: list[Any] | None = None) -> list[Any]:
    """What `body(lane)` returns on each of 32 lanes, which meet at every warp-wide operation."""
    log = [] if log is None else log
    fibers = []
    for lane in range(32):
        fiber = greenlet(body)
        fiber.thread = Thread(lane, log)
        fibers.append(fiber)
    waiting = [f.switch(lane) for lane, f in enumerate(fibers)]
    while not all(f.dead for f in fibers):
        assert not any(f.dead for f in fibers), "some lanes left and others wait"
        assert len({(name, mask) for name, mask, _, _ in waiting}) == 1
        results = waiting[0][3]([f.thread for f in fibers], [arg for _, _, arg, _ in waiting])
        waiting = [f.switch(r) for f, r in zip(fibers, results, strict=True)]
    return waiting


def run_thread(body: Callable[[], Any], log: list[Any] | None = None) -> Any:
    """What `body()` returns on one thread."""
    fiber = greenlet(body)
    fiber.thread = Thread(0, [] if log is None else log)
    return fiber.switch()
