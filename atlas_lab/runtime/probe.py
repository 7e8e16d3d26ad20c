"""What the card is and what it reaches: a description for result files, the read rate, the host's cost of a launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from math import ceil
from typing import Any

import numpy as np

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.kernels.lang import DEPENDENT
from atlas_lab.kernels.probe import read_xor
from atlas_lab.runtime.cuda import CudaBound, CudaDevice, gpu_of
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.graph import Graph
from atlas_lab.runtime.nvml import Meter
from atlas_lab.runtime.timing import Timed, measure, rotate, rotations

VECTOR = 16  # bytes
PACKAGES = ("cuda-bindings", "cuda-core", "numba-cuda", "nvidia-nvjitlink", "nvmath-python", "nvidia-cublas")


@dataclass(frozen=True)
class Reading:
    """A way to read: warps a block, loads a thread in flight, blocks an SM (0: one block a chunk)."""

    warps: int = 8
    unroll: int = 8
    per_sm: int = 0

    def grid(self, vectors: int, sms: int) -> int:
        """Blocks for so many vectors."""
        chunks = max(1, ceil(vectors / (32 * self.warps * self.unroll)))
        return min(chunks, sms * self.per_sm) if self.per_sm else chunks


READINGS = (Reading(8, 4), Reading(8, 8), Reading(16, 4, 4), Reading(8, 8, 8), Reading(32, 4, 2), Reading(16, 8, 2))


def read_program(
    nbytes: int, reading: Reading, sms: int, at: int = 0, whole: Tensor | None = None, pdl: bool = False
) -> Program:
    """Read `nbytes` (rounded up to 16) once, from byte `at` of the buffer `data`; `out` receives one XOR a warp. With
    `pdl` it may begin before the launch before it is over."""
    vectors = max(1, ceil(nbytes / VECTOR))
    grid = reading.grid(vectors, sms)
    data = Tensor("u32", (4 * vectors,), "data", offset=at)
    out = Tensor("u32", (grid * reading.warps,), "out")
    kernel = read_xor(reading.warps, reading.unroll)
    launch = Launch(kernel, grid=grid, block=32 * reading.warps, args=(data, out, vectors), pdl=pdl, label="read")
    return Program(f"read of {nbytes} bytes", (launch,), inputs=(whole or data,), outputs=(out,))


class Reader:
    """The read kernel over rotated random data: the floor beside which a kernel that reads `nbytes` is timed.

    The fastest of `readings` at that size is used. `timed` goes into `measure` beside the kernels; `ahead`, if the card
    can, is the same in dependent launches, as arms have them: each begins to read while the one before it ends. A
    context manager that frees the data.
    """

    def __init__(
        self,
        device: Device,
        nbytes: int,
        *,
        name: str = "read",
        sets: int = 0,
        readings: tuple[Reading, ...] = READINGS,
    ) -> None:
        gpu = gpu_of(device)
        self.bytes = nbytes
        step = round_up(max(nbytes, VECTOR))
        sets = sets or rotations(nbytes, gpu.target.l2)
        self._buffers: list[Buffer] = []
        try:
            data = self._allocate(gpu, sets * step, "data")
            fill_random(gpu, data)
            made = partial(self._timed, gpu, data, sets, step)
            self._graphs = [made(r) for r in readings]
            best = 0
            if len(readings) > 1:
                timing = measure(gpu, self._graphs, rounds=3)
                best = min(range(len(readings)), key=lambda i: timing.median(self._graphs[i].name))
            self.reading = readings[best]
            self.timed, self.ahead = replace(self._graphs[best], name=name), None
            if gpu.target.meets(DEPENDENT):
                self._graphs.append(made(self.reading, pdl=True))
                self.ahead = replace(self._graphs[-1], name=f"{name} ahead")
        except BaseException:
            self.close()
            raise

    def _allocate(self, device: Device, nbytes: int, name: str) -> Buffer:
        self._buffers.append(device.allocate(nbytes, "probe", name=name))
        return self._buffers[-1]

    def _timed(self, device: CudaDevice, data: Buffer, sets: int, step: int, r: Reading, *, pdl: bool = False) -> Timed:
        whole = Tensor("u8", (sets * step,), "data")
        programs = [read_program(self.bytes, r, device.card.sms, i * step, whole, pdl) for i in range(sets)]
        out = self._allocate(device, programs[0].outputs[0].bytes, "out")
        bound = [device.bind(p, {"data": data, "out": out}) for p in programs]
        return rotate(f"read {r.warps}x{r.unroll}x{r.per_sm}", bound)

    def close(self) -> None:
        """Destroy the graphs and free the data."""
        for t in self.__dict__.pop("_graphs", ()):
            if isinstance(t.keep, Graph):
                t.keep.close()
        while self._buffers:
            self._buffers.pop().free()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches. `read_rate` in bytes a second over `bytes` by `reading`; `free` and `total` bytes of
    memory; `clocks` as NVML reads them under that load, or None."""

    read_rate: float
    bytes: int
    reading: Reading
    free: int
    total: int
    sms: int
    l2: int
    clocks: dict[str, float | None] | None


def ceilings(device: Device, nbytes: int = 1 << 29, *, rounds: int = 5) -> Ceilings:
    """Measure the read rate over `nbytes`, and read what the driver knows; raises DeviceError on the interpreter."""
    gpu = gpu_of(device)
    free, total = gpu.memory_info()
    with Reader(gpu, nbytes) as reader:
        timing = measure(gpu, [reader.timed], rounds=rounds)
        rate = nbytes / timing.median(reader.timed.name)
        return Ceilings(rate, nbytes, reader.reading, free, total, gpu.card.sms, gpu.card.l2, timing.samples[-1].clocks)


def launch_overhead(device: Device, launcher: str = "packed", *, launches: int = 2000) -> float:
    """Host seconds to enqueue one launch of a small kernel through a bound program: median of batches of 100."""
    gpu = gpu_of(device)
    before, gpu.launcher = gpu.launcher, launcher
    data, out = gpu.allocate(4096, "probe", name="data"), gpu.allocate(4096, "probe", name="out")
    try:
        fill_random(gpu, data)
        bound: CudaBound = gpu.bind(read_program(4096, READINGS[0], 1), {"data": data, "out": out})
        spent = []
        for _ in range(max(1, launches // 100)):
            gpu.synchronize()
            spent.append(_batch(bound.run, 100))
        gpu.synchronize()
        return float(np.median(spent))
    finally:
        gpu.launcher = before
        data.free()
        out.free()


def _batch(run: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def fill_random(device: Device, buffer: Buffer, seed: int = 0, piece: int = 1 << 25) -> None:
    """Random bytes all over a buffer, repeating every `piece` bytes."""
    block = np.random.default_rng(seed).integers(0, 256, min(piece, buffer.bytes), np.uint8)
    for at in range(0, buffer.bytes, piece):
        device.upload(buffer, block[: buffer.bytes - at], at)


def describe_device(device: Device) -> dict[str, Any]:
    """What the device is, for result files: plain data. On the interpreter only what it stands for."""
    if not isinstance(device, CudaDevice):
        return device.describe()
    card, meter = device.card, Meter(device.card)
    free, total = device.memory_info()
    return {
        "kind": device.name,
        "name": card.name,
        "target": device.target.name,
        "capability": list(card.capability),
        "driver": meter.driver(),
        "cuda": card.cuda,
        "packages": {p: _version(p) for p in PACKAGES},
        "memory": {"total": total, "free": free},
        "sms": card.sms,
        "l2": card.l2,
        "shared_per_block": card.shared_optin,
        "clocks": meter.read(),
        "clocks_max_mhz": {"sm": card.clock_khz / 1000, "memory": card.memory_clock_khz / 1000},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
