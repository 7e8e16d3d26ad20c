"""Executing a load plan: the steps the forecast folds, on a device, with everything given back on a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType

import numpy as np

from atlas_lab import formats
from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import Packed, WeightSource
from atlas_lab.core.residency import Alloc, Build, Check, Free, LoadPlan, Row, Upload
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import DeviceError, LoadError
from atlas_lab.runtime.ledger import Entry, Ledger

Read = Callable[[Tensor], np.ndarray]
CheckValues = Callable[[WeightSource, str], None]


class Loaded(Mapping[str, Buffer]):
    """Buffers by name, as a plan left them. `ledger` has this plan's allocations alone, with their peak.

    A context manager: `close` frees everything.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ledger = Ledger()
        self._buffers: dict[str, Buffer] = {}
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Buffer:
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def rows(self) -> tuple[Row, ...]:
        return self.ledger.rows()

    def allocate(self, name: str, nbytes: int, label: str, owner: str) -> Buffer:
        """A buffer that `close` will free; raises LoadError if `name` is taken."""
        if name in self._buffers:
            raise LoadError(f"buffer {name!r} is allocated twice")
        buffer = self.device.allocate(nbytes, label, owner, name=name)
        self._buffers[name] = buffer
        self._entries[name] = self.ledger.take(name, nbytes, label, owner, 2 * self.device.guard)
        return buffer

    def free(self, name: str) -> None:
        """Free one buffer; raises LoadError for a name that is not allocated."""
        if name not in self._buffers:
            raise LoadError(f"buffer {name!r} is freed but not allocated")
        self.ledger.give(self._entries.pop(name))
        self.device.free(self._buffers.pop(name))

    def close(self) -> None:
        """Free every buffer, all of them even if the device reports an error, which is then raised."""
        failed: DeviceError | None = None
        for name in list(self._buffers):
            try:
                self.free(name)
            except DeviceError as e:
                failed = failed or e
        if failed is not None:
            raise failed

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def execute(plan: LoadPlan, read: Read, check: CheckValues, device: Device) -> Loaded:
    """Execute `plan`: every check, then allocations, uploads, builds and frees in order, on the calling thread.

    `read` returns a stored tensor's array in its own dtype and shape; `check(source, label)` raises for values no
    kernel may be handed. A failure anywhere frees all that was allocated and is raised again: as LoadError where a
    build or a tensor does not fit its declaration, else as it came. Ledger and peak of the result equal the
    forecast.
    """
    for s in plan.steps:
        if isinstance(s, Check):
            check(s.weight, s.label)
    sizes = _sizes(plan)
    loaded = Loaded(device)
    try:
        for s in plan.steps:
            if isinstance(s, Alloc):
                loaded.allocate(s.buffer, sizes.get(s.buffer, s.bytes), s.label, s.owner)
            elif isinstance(s, Upload):
                device.upload(_buffer(loaded, s.tensor), stored(read, s.tensor), s.tensor.offset)
            elif isinstance(s, Build):
                for t, array in build(s.derived, s.owner, read):
                    device.upload(_buffer(loaded, t), array, t.offset)
            elif isinstance(s, Free):
                loaded.free(s.buffer)
        _same(plan, loaded)
    except BaseException:
        # The first failure is the one to tell, whatever a device in trouble says to the frees.
        with suppress(DeviceError):
            loaded.close()
        raise
    return loaded


def build(d: Derived, owner: str, read: Read) -> list[tuple[Tensor, np.ndarray]]:
    """The tensors of a derived weight, built on the host from its sources.

    Raises LoadError, naming key and field, unless `build` returns exactly the declared fields, dtypes and shapes.
    """
    where = f"derived weight {d.label!r} of {owner}"
    arguments = [_source(s, read) for s in d.sources]
    try:
        made = d.build(*arguments)
    except Exception as e:
        raise LoadError(f"{where}: build raised {type(e).__name__}: {e}") from e
    if not isinstance(made, Mapping) or set(made) != set(d.tensors):
        found = sorted(made) if isinstance(made, Mapping) else type(made).__name__
        raise LoadError(f"{where}: build returned {found}, expected the fields {sorted(d.tensors)}")
    out = []
    for field, t in d.tensors.items():
        array, host = made[field], dtype(t.dtype).numpy
        if not isinstance(array, np.ndarray) or array.dtype != host or array.shape != t.shape:
            raise LoadError(f"{where}: field {field!r} is {_spell(array)}, expected {host}{list(t.shape)}")
        out.append((t, array))
    return out


def stored(read: Read, t: Tensor) -> np.ndarray:
    """A stored tensor's array; raises LoadError unless it has the tensor's dtype and shape."""
    array = read(t)
    host = dtype(t.dtype).numpy
    if not isinstance(array, np.ndarray) or array.dtype != host or array.shape != t.shape:
        raise LoadError(f"tensor {t.name!r} was read as {_spell(array)}, expected {host}{list(t.shape)}")
    return array


def _source(s: WeightSource | Packed, read: Read) -> np.ndarray | dict[str, np.ndarray]:
    """What `build` is handed: float32 `[N, K]` values, or the stored arrays by field."""
    weight = s.weight if isinstance(s, Packed) else s
    arrays = {field: stored(read, t) for field, t in weight.fields}
    if isinstance(s, Packed):
        return arrays
    return formats.get(weight.format).dequantize(arrays).astype(np.float32)


def _spell(array: object) -> str:
    return f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__


def _buffer(loaded: Loaded, t: Tensor) -> Buffer:
    if t.name not in loaded:
        raise LoadError(f"tensor {t.name!r} has no buffer: the plan fills it before it is allocated")
    return loaded[t.name]


def _sizes(plan: LoadPlan) -> dict[str, int]:
    """Unrounded bytes of the buffers the plan fills, so that bounds are checked to the byte."""
    out: dict[str, int] = {}
    rounded = {s.buffer: s.bytes for s in plan.steps if isinstance(s, Alloc)}
    for s in plan.steps:
        tensors = (
            (s.tensor,) if isinstance(s, Upload) else tuple(s.derived.tensors.values()) if isinstance(s, Build) else ()
        )
        for t in tensors:
            size = t.offset + t.bytes
            if round_up(size) == rounded.get(t.name):
                out[t.name] = size
    return out


def _same(plan: LoadPlan, loaded: Loaded) -> None:
    """The ledger is the forecast; anything else is a fault of the plan."""
    for what, found, expected in (
        ("rows", loaded.rows(), plan.ledger()),
        ("peak", loaded.ledger.peak, plan.peak),
    ):
        if found != expected:
            raise LoadError(f"load plan: the ledger's {what} are {found}, expected the forecast's {expected}")
