"""How fast a checkpoint in the page cache reaches the card, beside how fast the card takes page-locked memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atlas_lab.checkpoint import Store
from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.core.loadplan import Alloc, LoadPlan, Upload
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.cuda import CudaDevice, gpu_of
from atlas_lab.runtime.device import Device
from atlas_lab.runtime.errors import LoadError
from atlas_lab.runtime.load import Loaded, Read, execute

BYTES = 8_000_000_000
SHAPE = (17408, 5120)  # of an FFN weight of a 27B model, BF16
PIECE = 1 << 22  # elements written at once
COPIES = 16  # of all page-locked memory: 2 GB


@dataclass(frozen=True)
class LoadRate:
    """Seconds of each load of `bytes` in `tensors`, and seconds that copying as many bytes from page-locked memory
    takes, measured in turn."""

    bytes: int
    tensors: int
    loads: tuple[float, ...]
    copies: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Bytes a second, by the median load."""
        return self.bytes / float(np.median(self.loads))

    @property
    def share(self) -> float:
        """Rate over the copy rate."""
        return float(np.median(self.copies) / np.median(self.loads))


def write_bulk(folder: Path, nbytes: int = BYTES, shape: tuple[int, int] = SHAPE) -> None:
    """A checkpoint of BF16 tensors `shape`, at least `nbytes` in all, of finite random values; `folder` exists.

    Raises CheckpointError where it cannot be written.
    """
    size = Tensor("bf16", shape).bytes
    tensors = [Tensor("bf16", shape, f"layers.{i}.weight") for i in range(-(-nbytes // size))]
    # an exponent of 0x7F or less at the top, so that no value is infinite
    block = np.random.default_rng(0).integers(0, 1 << 16, PIECE, np.uint16) & np.uint16(0xBFFF)
    values = block.view(dtype("bf16").numpy)

    def pieces(t: Tensor, i: int) -> Iterator[np.ndarray]:
        at = 997 * i % PIECE  # each tensor begins elsewhere: no two are equal
        left = t.elements
        while left:
            piece = values[at : at + left]
            yield piece
            left -= piece.size
            at = 0

    def group(t: Tensor, i: int) -> Group:
        return Group((t,), lambda: {t.name: pieces(t, i)})

    write_files(folder, [group(t, i) for i, t in enumerate(tensors)], {"format": "pt"})


def plan_of(store: Store) -> LoadPlan:
    """Everything a checkpoint has, in its order."""
    steps: list[Alloc | Upload] = []
    for t in store.tensors.values():
        steps += [Alloc(t.name, round_up(t.bytes), "checkpoint", "layers"), Upload(t)]
    return LoadPlan(tuple(steps))


def load_rate(
    device: Device, path: Path, *, loads: int = 5, notify: Callable[[str, int, int], None] = lambda what, done, of: None
) -> LoadRate:
    """Load the checkpoint at `path` `loads` times, each from a map of its own, and once before to warm the page cache;
    copy from page-locked memory after each.

    A load begins at the first allocation and ends when everything has arrived; value checks are not part of it. Raises
    DeviceError on the interpreter, LoadError where a tensor arrives changed.
    """
    spent, copied = [], []
    with _Copies(gpu_of(device)) as copies:
        for i in range(loads + 1):
            notify("loading", i, loads + 1)
            store = Store.open(path)
            plan, read = plan_of(store), _reader(store)
            begin = time.perf_counter()
            with execute(plan, read, lambda w, label: None, device) as loaded:
                spent.append(time.perf_counter() - begin)
                if not i:
                    _compare(device, loaded, read, list(store.tensors.values()))
            copied.append(copies.seconds(store.bytes))
    return LoadRate(store.bytes, len(store.tensors), tuple(spent[1:]), tuple(copied[1:]))


def _reader(store: Store) -> Read:
    return lambda t: store.read(t.name)


def _compare(device: Device, loaded: Loaded, read: Read, tensors: list[Tensor]) -> None:
    """Raise LoadError unless the first and the last tensor arrived bit for bit."""
    for t in (tensors[0], tensors[-1]):
        found = device.download(loaded[t.name], t.dtype, t.shape)
        if not np.array_equal(found.view(np.uint8), np.asarray(read(t)).view(np.uint8)):
            raise LoadError(f"tensor {t.name!r} arrived changed")


class _Copies:
    """Copies from page-locked memory alone: what no load can beat."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._lane = device, device.lane()
        self._buffer = device.allocate(self._lane.bytes, "copy rate", name="copies")

    def seconds(self, nbytes: int) -> float:
        """Of a copy of `nbytes`, by COPIES copies of all the memory."""
        self._device.synchronize()
        begin = time.perf_counter()
        for _ in range(COPIES):
            self._lane.send_all(self._buffer)
        self._device.synchronize()
        return (time.perf_counter() - begin) * nbytes / (COPIES * self._lane.bytes)

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.free()
