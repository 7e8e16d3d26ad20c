"""Filling device buffers from host memory: directly, or through a ring of page-locked slots that helper threads fill
while earlier ones travel."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atlas_lab.runtime.errors import DeviceError

if TYPE_CHECKING:
    from atlas_lab.runtime.device import Buffer, Device

CHUNK = 4 << 20  # bytes of a slot: long enough that the start of a copy does not count, short enough for caches
HELPERS = max(1, min(8, (os.cpu_count() or 1) // 2))
SMALL = 64 << 10  # filled at once: handing these to a thread takes longer


class Uploader(ABC):
    """Copies arrays into buffers, in the order of the calls. A context manager: leaving it finishes, or on an
    exception gives up what is not yet on its way, and no array is read any more."""

    @abstractmethod
    def put(self, buffer: Buffer, array: np.ndarray, offset: int = 0) -> None:
        """Copy `array`'s bytes, in row-major order, to byte `offset`; it must not change before `finish`."""

    @abstractmethod
    def flush(self) -> None:
        """Hand everything put so far to the device: work launched after this sees it."""

    @abstractmethod
    def finish(self) -> None:
        """Return when everything put so far has arrived."""

    @abstractmethod
    def abandon(self) -> None:
        """Wait for what reads host memory, and forget the rest."""

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.abandon()


class Direct(Uploader):
    """One copy a call, done when it returns."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def put(self, buffer: Buffer, array: np.ndarray, offset: int = 0) -> None:
        self._device.upload(buffer, array, offset)

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Lane(ABC):
    """What a device offers to a staged upload: slots of host memory that it can copy from in the background."""

    device: Device
    slots: Sequence[np.ndarray]
    """u8, all of one length; a slot is known by its index."""

    @abstractmethod
    def send(self, slot: int, buffer: Buffer, offset: int, size: int) -> None:
        """Begin to copy the slot's first `size` bytes, after everything sent before."""

    @abstractmethod
    def wait(self, slot: int) -> None:
        """Return when the slot's last copy is done."""


class _Filling(NamedTuple):
    slot: int
    filled: Future[None] | None
    buffer: Buffer
    offset: int
    size: int


class Staged(Uploader):
    """Through the lane's slots: `helpers` threads fill them, the calling thread does everything else.

    A slot is filled again only when its copy is done. Buffers must stay allocated until `finish`.
    """

    def __init__(self, lane: Lane, helpers: int = HELPERS) -> None:
        self._lane = lane
        self._pool = ThreadPoolExecutor(helpers, "upload")
        self._free = deque(range(len(lane.slots)))
        self._filling: deque[_Filling] = deque()
        self._flying: deque[int] = deque()

    def put(self, buffer: Buffer, array: np.ndarray, offset: int = 0) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._lane.device.inside(buffer, "upload", offset, raw.nbytes)
        length = self._lane.slots[0].nbytes
        for at in range(0, raw.nbytes, length):
            piece = raw[at : at + length]
            slot = self._take()
            into = self._lane.slots[slot][: piece.nbytes]
            filled = None
            if piece.nbytes > SMALL:
                filled = self._pool.submit(np.copyto, into, piece)
            else:
                np.copyto(into, piece)
            self._filling.append(_Filling(slot, filled, buffer, offset + at, piece.nbytes))
            self._send_filled()

    def flush(self) -> None:
        while self._filling:
            self._send()

    def finish(self) -> None:
        self.flush()
        while self._flying:
            self._land()

    def abandon(self) -> None:
        wait([f.filled for f in self._filling if f.filled is not None and not f.filled.cancel()])
        self._filling.clear()
        with suppress(DeviceError):  # a device in trouble has said so before
            while self._flying:
                self._land()
        self._pool.shutdown()

    def _take(self) -> int:
        """A slot to fill, of the oldest copy if none is free."""
        while not self._free:
            if self._flying:
                self._land()
            else:
                self._send()
        return self._free.popleft()

    def _send_filled(self) -> None:
        while self._filling and (self._filling[0].filled is None or self._filling[0].filled.done()):
            self._send()

    def _send(self) -> None:
        """Send the oldest slot, once it is filled."""
        f = self._filling[0]
        if f.filled is not None:
            f.filled.result()
        self._lane.send(f.slot, f.buffer, f.offset, f.size)
        self._filling.popleft()
        self._flying.append(f.slot)

    def _land(self) -> None:
        self._lane.wait(self._flying[0])
        self._free.append(self._flying.popleft())
