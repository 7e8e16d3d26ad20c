"""Page-locked host memory of a GPU's driver, in slots that its copy engine reads in the background."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_lab.runtime.device import Buffer
from atlas_lab.runtime.driver import bindings, call
from atlas_lab.runtime.staging import CHUNK, HELPERS, Lane

if TYPE_CHECKING:
    from atlas_lab.runtime.cuda import CudaDevice


class PinnedLane(Lane):
    """Two slots a helper, so that one is filled while the other travels; copies go through the device's stream.

    Raises DeviceError if the memory cannot be had; nothing is kept then.
    """

    def __init__(self, device: CudaDevice, chunk: int = CHUNK, count: int = 2 * HELPERS) -> None:
        self.device = device
        self._stream = device.stream.handle
        self._base = 0
        self._events: list[Any] = []
        try:
            self._base = int(call(f"page-locking {chunk * count} bytes", "cuMemHostAlloc", chunk * count, 0))
            flags = int(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)
            for _ in range(count):
                self._events.append(call("making an event", "cuEventCreate", flags))
        except BaseException:
            self.close()
            raise
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * (chunk * count)).from_address(self._base))
        self.slots = [whole[i * chunk : (i + 1) * chunk] for i in range(count)]

    def send(self, slot: int, buffer: Buffer, offset: int, size: int) -> None:
        what = f"upload to buffer {buffer.name!r}"
        source = self._base + slot * self.slots[0].nbytes
        call(what, "cuMemcpyHtoDAsync", buffer.memory + offset, source, size, self._stream)
        call(what, "cuEventRecord", self._events[slot], self._stream)

    @property
    def bytes(self) -> int:
        """Of all slots."""
        return sum(s.nbytes for s in self.slots)

    def send_all(self, buffer: Buffer) -> None:
        """Begin to copy all slots to the buffer at once."""
        call("copying", "cuMemcpyHtoDAsync", buffer.memory, self._base, self.bytes, self._stream)

    def wait(self, slot: int) -> None:
        call("waiting for an upload", "cuEventSynchronize", self._events[slot])

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        self.slots = ()
        while self._events:
            call("destroying an event", "cuEventDestroy", self._events.pop())
        base, self._base = self._base, 0
        if base:
            call("giving back page-locked memory", "cuMemFreeHost", base)
