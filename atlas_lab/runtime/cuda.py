"""A CUDA GPU as a device. Importing this module needs neither a GPU nor CUDA's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from atlas_lab.core.launch import Program
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import ALIGNMENT, round_up
from atlas_lab.kernels.lang import Kernel, Needs
from atlas_lab.runtime.bind import Bound, Launched, Resolved, ResolvedCall, planned, resolve
from atlas_lab.runtime.card import Card, card_of, target_of
from atlas_lab.runtime.cubin import DeviceKernel
from atlas_lab.runtime.device import GUARD, PATTERN, POISON, Buffer, Device
from atlas_lab.runtime.driver import call, core, missing_gpu
from atlas_lab.runtime.errors import BindError, DeviceError
from atlas_lab.runtime.launcher import LAUNCHERS, Launcher
from atlas_lab.runtime.library import LibraryLauncher
from atlas_lab.runtime.pinned import PinnedLane
from atlas_lab.runtime.staging import Staged, Uploader

STAGED_FROM = 32 << 20


class CudaDevice(Device):
    """One GPU and one stream of it, in the primary context, which other libraries in the process share.

    Memory is taken with plain allocations (cuMemAlloc). `launcher` is `packed` or `core`. Raises DeviceError if
    there is no GPU, no compiler, or another card than `target`.
    """

    name = "cuda"

    def __init__(
        self, target: Target | None = None, *, guard: int = GUARD, ordinal: int = 0, launcher: str = "packed"
    ) -> None:
        from atlas_lab.kernels.lang.compile import compiler_missing

        for missing in (missing_gpu(), compiler_missing()):
            if missing:
                raise DeviceError(missing)
        self._core = core().Device(ordinal)
        self._core.set_current()
        self.card: Card = card_of(ordinal)
        super().__init__(target_of(self.card, target), guard)
        self.stream = self._core.create_stream()
        self.launcher = launcher
        self._kernels: dict[tuple[Kernel, str], DeviceKernel] = {}
        self._last = "opening the device"
        self._lane: PinnedLane | None = None
        self.frees = 0

    def bind(self, program: Program, buffers: Mapping[str, Buffer]) -> CudaBound:
        """Besides resolving names: compiles what is not cached, loads it, packs arguments, opts in to shared memory."""
        launches = resolve(program, buffers, self)
        made = LAUNCHERS[self.launcher]
        launchers: list[Launcher] = []
        kernels: list[DeviceKernel] = []
        for x in launches:
            where = f"program {program.name}: {x.launch.title}"
            if isinstance(x, ResolvedCall):
                self._meet(x.launch.call.needs, where)
                launchers.append(LibraryLauncher(x, self.stream, where))
                continue
            kernel = self._kernel(x, where)
            kernel.admit(x, where)
            launchers.append(made(kernel, x, self.stream, where))
            kernels.append(kernel)
        return CudaBound(program, self, buffers, tuple(launchers), tuple(kernels))

    def _meet(self, needs: Needs, where: str) -> None:
        if not self.target.meets(needs):
            raise BindError(f"{where} needs {needs}, found {self.card.name} ({self.target.arch})")

    def _kernel(self, x: Resolved, where: str) -> DeviceKernel:
        from atlas_lab.kernels.lang.compile import compile_kernel

        key = (x.launch.kernel, self.target.arch)
        if key not in self._kernels:
            kernel = x.launch.kernel
            self._meet(kernel.needs, where)
            compiled = compile_kernel(kernel, self.target.arch)
            self._kernels[key] = DeviceKernel(kernel, compiled, self.card)
        return self._kernels[key]

    def note(self, what: str) -> None:
        """Remember what was enqueued last, for the sentence of a failure that is reported later."""
        self._last = what

    def synchronize(self) -> None:
        call(f"waiting for {self._last}", "cuStreamSynchronize", self.stream.handle)

    def uploader(self, nbytes: int) -> Uploader:
        """Through page-locked memory, which is taken once, from the size on where that pays."""
        return super().uploader(nbytes) if nbytes < STAGED_FROM else Staged(self.lane())

    def lane(self) -> PinnedLane:
        """The page-locked memory that uploads go through."""
        if self._lane is None:
            self._lane = PinnedLane(self)
        return self._lane

    def attach(self) -> None:
        self._core.set_current()

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the card."""
        free, total = call("asking for free memory", "cuMemGetInfo")
        return int(free), int(total)

    def describe(self) -> dict[str, Any]:
        from atlas_lab.runtime.probe import describe_device

        return describe_device(self)

    def _take(self, name: str, nbytes: int) -> int:
        size = max(round_up(nbytes) + 2 * self.guard, ALIGNMENT)
        try:
            base = int(call(f"buffer {name!r} of {nbytes} bytes", "cuMemAlloc", size))
        except DeviceError as e:
            room = ""
            with suppress(DeviceError):
                room = "; {} of {} bytes are free".format(*self.memory_info())
            raise DeviceError(f"{e}{room}") from None
        address = base + self.guard
        if address % ALIGNMENT:
            call(f"freeing {name!r}", "cuMemFree", base)
            raise DeviceError(f"buffer {name!r}: found address {address:#x}, expected a multiple of {ALIGNMENT}")
        if self.guard:
            self._fill(base, PATTERN, size)
            if nbytes:
                self._fill(address, POISON, nbytes)
        return address

    def _give(self, buffer: Buffer) -> None:
        self.frees += 1
        base, buffer.memory = buffer.memory - self.guard, None
        if self.guard:  # where errors are looked for, a use after this free is to read NaN
            self._fill(base, POISON, round_up(buffer.bytes) + 2 * self.guard)
        self.synchronize()
        call(f"freeing buffer {buffer.name!r}", "cuMemFree", base)

    def _fill(self, address: int, byte: int, size: int) -> None:
        call("filling memory", "cuMemsetD8Async", address, byte, size, self.stream.handle)

    def _write(self, buffer: Buffer, offset: int, raw: np.ndarray) -> None:
        what = f"upload to buffer {buffer.name!r} (after {self._last})"
        call(what, "cuMemcpyHtoDAsync", buffer.memory + offset, raw.ctypes.data, raw.nbytes, self.stream.handle)
        # `raw` may be a temporary of the caller's: it must not be given back before it was copied.
        call(what, "cuStreamSynchronize", self.stream.handle)

    def _read(self, buffer: Buffer, offset: int, size: int) -> np.ndarray:
        out = np.empty(size, np.uint8)
        what = f"download of buffer {buffer.name!r} (after {self._last})"
        call(what, "cuMemcpyDtoHAsync", out.ctypes.data, buffer.memory + offset, size, self.stream.handle)
        call(what, "cuStreamSynchronize", self.stream.handle)
        return out

    def _poison(self, buffer: Buffer) -> None:
        self._fill(buffer.memory, POISON, buffer.bytes)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._kernels.clear()
            lane, self._lane = self._lane, None
            try:
                if lane is not None:
                    lane.close()
            finally:
                self.stream.close()


class CudaBound(Bound):
    """`run` enqueues on the device's stream and returns. `kernels` are those of its launches, in order, libraries' left
    out; `nodes` is what a graph of it should hold."""

    device: CudaDevice

    def __init__(
        self,
        program: Program,
        device: CudaDevice,
        buffers: Mapping[str, Buffer],
        launchers: tuple[Launcher, ...],
        kernels: tuple[DeviceKernel, ...],
    ) -> None:
        super().__init__(program, device, buffers)
        self._launchers, self.kernels = launchers, kernels
        self.nodes: tuple[Launched, ...] = tuple(
            node
            for x, made in zip(program.launches, launchers, strict=True)
            for node in (made.nodes if isinstance(made, LibraryLauncher) else (planned(x),))
        )
        self._what = f"program {program.name}"
        self._frees = device.frees

    def run(self) -> None:
        device = self.device
        if device.frees != self._frees:
            self.check_live()
        device.note(self._what)
        self.record = tuple([launch() for launch in self._launchers])

    def check_live(self) -> None:
        """Raise BindError if one of the buffers was freed after binding."""
        for name, buffer in self.buffers.items():
            if not buffer.live:
                raise BindError(f"{self._what}: buffer {name!r} was freed after binding")
        self._frees = self.device.frees


def gpu_of(device: Device) -> CudaDevice:
    """The device as a GPU, for what measures speed; raises DeviceError on the interpreter."""
    if not isinstance(device, CudaDevice):
        raise DeviceError(f"no speed is measured without a GPU: found the {device.name}; its times mean nothing")
    return device


__all__ = ["CudaBound", "CudaDevice", "gpu_of", "missing_gpu"]
