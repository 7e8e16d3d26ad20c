"""The device a program runs on: memory by buffer, binding, synchronisation; and how one is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_lab.core.launch import Program
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.core.tensor import round_up
from atlas_lab.formats.dtypes import dtype as _dtype
from atlas_lab.runtime.errors import DeviceError, GuardError
from atlas_lab.runtime.ledger import Entry, Ledger
from atlas_lab.runtime.staging import Direct, Uploader

if TYPE_CHECKING:
    from atlas_lab.runtime.bind import Bound

GUARD = 4096
PATTERN = 0xA5
POISON = 0xFF
KINDS = ("auto", "cuda", "interpreter")


class Buffer:
    """Memory of a device. `bytes` are as asked; the ledger counts them rounded to 256.

    `memory` is the device's own: the address of byte 0, or the interpreter's buffer.
    """

    def __init__(self, device: Device, name: str, nbytes: int, memory: Any, entry: Entry) -> None:
        self.device, self.name, self.bytes, self.memory, self._entry = device, name, nbytes, memory, entry
        self.live = True

    @property
    def label(self) -> str:
        return self._entry.label

    @property
    def owner(self) -> str:
        return self._entry.owner

    def free(self) -> None:
        self.device.free(self)

    def __repr__(self) -> str:
        return f"<buffer {self.name!r}, {self.bytes} bytes{'' if self.live else ', freed'}>"


class Device(ABC):
    """`name` is `interpreter` or `cuda`; `target` the card it is, or stands for; `ledger` what is allocated.

    One thread at a time and one stream: a thread other than the one that opened it calls `attach` first. A context
    manager.
    """

    name: str

    def __init__(self, target: Target, guard: int) -> None:
        self.target = target
        self.guard = guard
        self.ledger = Ledger()
        self._buffers: dict[Entry, Buffer] = {}

    def allocate(self, nbytes: int, label: str, owner: str = "", *, name: str = "") -> Buffer:
        """A buffer of `nbytes`, 256-byte aligned, called `name` (default: the label).

        It reads as NaN (0xFF bytes) until it is written, where the device has guard bands or is the interpreter.
        Raises DeviceError if there is no room.
        """
        if nbytes < 0:
            raise DeviceError(f"buffer {name or label!r}: found {nbytes} bytes, expected 0 or more")
        memory = self._take(name or label, nbytes)
        entry = self.ledger.take(name or label, nbytes, label, owner, 2 * self.guard)
        buffer = self._buffers[entry] = Buffer(self, name or label, nbytes, memory, entry)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back after everything launched has finished with it; raises DeviceError for one not live."""
        if buffer.device is not self:
            raise DeviceError(f"buffer {buffer.name!r} belongs to another device")
        self.ledger.give(buffer._entry)
        del self._buffers[buffer._entry]
        buffer.live = False
        self._give(buffer)

    def upload(self, buffer: Buffer, array: np.ndarray, offset: int = 0) -> None:
        """Copy `array`'s bytes, in row-major order, to byte `offset` of the buffer; returns when it may be changed."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.inside(buffer, "upload", offset, raw.nbytes)
        if raw.nbytes:
            self._write(buffer, offset, raw)

    def uploader(self, nbytes: int) -> Uploader:
        """The fastest way of uploading `nbytes` in all."""
        return Direct(self)

    @abstractmethod
    def attach(self) -> None:
        """Let the calling thread use the device."""

    def download(self, buffer: Buffer, dtype: str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """A copy of `shape` elements of type `dtype` (its name) from byte `offset`, after all launched work."""
        host = _dtype(dtype).numpy
        size = prod(shape) * host.itemsize
        self.inside(buffer, "download", offset, size)
        raw = self._read(buffer, offset, size) if size else np.empty(0, np.uint8)
        return raw.view(host).reshape(shape)

    def poison(self, buffer: Buffer) -> None:
        """Fill with 0xFF: NaN in every floating-point format, -1 in integers; uninitialised on the interpreter."""
        self.inside(buffer, "poison", 0, buffer.bytes)
        if buffer.bytes:
            self._poison(buffer)

    def check_guards(self, buffer: Buffer) -> None:
        """Raise GuardError, naming buffer and byte, if the bands around it were written.

        The interpreter has none: there an access outside a buffer is an error where it happens.
        """
        self.inside(buffer, "check_guards", 0, 0)
        if not self.guard:
            return
        after = round_up(buffer.bytes) - buffer.bytes + self.guard
        for start, size in ((-self.guard, self.guard), (buffer.bytes, after)):
            band = self._read(buffer, start, size)
            touched = np.flatnonzero(band != PATTERN)
            if touched.size:
                # The touched byte nearest the buffer.
                i = int(touched[-1] if start < 0 else touched[0])
                side = f"{-(start + i)} before its start" if start < 0 else f"{i + 1} after its end"
                raise GuardError(
                    f"buffer {buffer.name!r} of {buffer.bytes} bytes: byte {side} was overwritten (byte "
                    f"{start + i}, found {band[i]:#04x}), {touched.size} bytes of that guard band in all"
                )

    def inside(self, buffer: Buffer, what: str, offset: int, size: int) -> None:
        """Raise DeviceError, beginning with `what`, unless the buffer is live and has these bytes."""
        if buffer.device is not self:
            raise DeviceError(f"{what}: buffer {buffer.name!r} belongs to another device")
        if not buffer.live:
            raise DeviceError(f"{what}: buffer {buffer.name!r} was freed")
        if offset < 0 or offset + size > buffer.bytes:
            raise DeviceError(
                f"{what}: found bytes {offset} to {offset + size} of buffer {buffer.name!r}, expected at most "
                f"{buffer.bytes}"
            )

    @abstractmethod
    def bind(self, program: Program, buffers: Mapping[str, Buffer]) -> Bound:
        """Resolve every name of the program to an address, once.

        Raises BindError naming a buffer that is missing, freed or too small, or an argument out of its type's range.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything launched; raises DeviceError for a failure the device reports only now."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the device is, for result files: plain data."""

    @abstractmethod
    def _take(self, name: str, nbytes: int) -> Any:
        """The memory of a new buffer, its guard bands filled."""

    @abstractmethod
    def _give(self, buffer: Buffer) -> None: ...

    @abstractmethod
    def _write(self, buffer: Buffer, offset: int, raw: np.ndarray) -> None: ...

    @abstractmethod
    def _read(self, buffer: Buffer, offset: int, size: int) -> np.ndarray:
        """`size` bytes, u8, from `offset`, which is negative or past the end in guard bands."""

    @abstractmethod
    def _poison(self, buffer: Buffer) -> None: ...

    def close(self) -> None:
        """Free the buffers still allocated, and what the device itself holds; every buffer even if the device
        reports an error, which is then raised."""
        failed: DeviceError | None = None
        for buffer in list(self._buffers.values()):
            try:
                self.free(buffer)
            except DeviceError as e:
                failed = failed or e
        if failed is not None:
            raise failed

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A device that failed fails again when it is closed; the first error is the one to tell.
        with suppress(DeviceError) if error is not None else nullcontext():
            self.close()


def target_named(name: str) -> Target:
    """A shipped target; raises DeviceError with the known names."""
    for t in shipped_targets():
        if t.name == name:
            return t
    raise DeviceError(f"unknown target {name!r}, expected one of {', '.join(t.name for t in shipped_targets())}")


def open_device(kind: str = "auto", target: Target | str | None = None, *, guards: bool = True) -> Device:
    """The device called for: `cuda`, `interpreter`, or `auto`: the GPU if there is one.

    `target` defaults to the card found, or on the interpreter to `h200`. `guards` puts bands of 4096 bytes around
    every buffer on a GPU. Raises DeviceError, saying what is missing and what to do, if `cuda` cannot be had, and for
    `auto` if there is a GPU but no compiler for it.
    """
    if kind not in KINDS:
        raise DeviceError(f"found device {kind!r}, expected one of {', '.join(KINDS)}")
    wanted = target_named(target) if isinstance(target, str) else target
    if kind != "interpreter":
        from atlas_lab.runtime import cuda

        missing = cuda.missing_gpu()
        if not missing:
            return cuda.CudaDevice(wanted, guard=GUARD if guards else 0)
        if kind == "cuda":
            raise DeviceError(missing)
    from atlas_lab.runtime.interpreter import InterpreterDevice

    return InterpreterDevice(wanted or target_named("h200"))


__all__ = ["GUARD", "Buffer", "Device", "DeviceError", "open_device", "target_named"]
