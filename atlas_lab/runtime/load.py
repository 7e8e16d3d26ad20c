"""Executing a load plan: the steps the forecast folds, on a device, with everything given back on a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import RLock
from types import TracebackType
from typing import Literal

from atlas_lab.core.declare import Derived
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.residency import Alloc, Build, Check, Free, LoadPlan, Report, Row, Step, Upload, derive_steps
from atlas_lab.core.residency import rows_of as _rows_of
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.runtime.build import Read, build, launch_build, stored
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import DeviceError, LoadError
from atlas_lab.runtime.ledger import Entry, Ledger
from atlas_lab.runtime.staging import HELPERS, Uploader

CheckValues = Callable[[WeightSource, str], None]
Builds = Literal["auto", "host", "device"]


class Loaded(Mapping[str, Buffer]):
    """Buffers by name, as a plan left them. `ledger` has this plan's allocations alone, with their peak.

    A context manager: `close` frees everything. Threads may ask it for derived weights; one at a time is served.
    """

    def __init__(self, device: Device, read: Read | None = None, builds: Builds = "auto") -> None:
        self.device = device
        self.ledger = Ledger()
        self.freed: list[tuple[str, int]] = []
        self.not_built: tuple[Row, ...] = ()
        self._read, self._on_device = read, builds == "device" or (builds == "auto" and device.name == "cuda")
        self._buffers: dict[str, Buffer] = {}
        self._entries: dict[str, Entry] = {}
        self._built: set[object] = set()
        self._lock = RLock()
        self._closed = False

    def __getitem__(self, name: str) -> Buffer:
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def rows(self) -> tuple[Row, ...]:
        return self.ledger.rows()

    def report(self) -> Report:
        """What is kept, what was freed on the way and what was not built, by label."""
        return Report(self.rows(), _rows_of(self.freed), self.not_built)

    def allocate(self, name: str, nbytes: int, label: str, owner: str) -> Buffer:
        """A buffer that `close` will free; raises LoadError if `name` is taken."""
        with self._lock:
            if name in self._buffers:
                raise LoadError(f"buffer {name!r} is allocated twice")
            buffer = self.device.allocate(nbytes, label, owner, name=name)
            self._buffers[name] = buffer
            self._entries[name] = self.ledger.take(name, nbytes, label, owner, 2 * self.device.guard)
            return buffer

    def free(self, name: str) -> None:
        """Free one buffer; raises LoadError for a name that is not allocated."""
        with self._lock:
            if name not in self._buffers:
                raise LoadError(f"buffer {name!r} is freed but not allocated")
            entry = self._entries.pop(name)
            self.ledger.give(entry)
            self.freed.append((entry.label, entry.bytes))
            self.device.free(self._buffers.pop(name))

    def derived(self, d: Derived) -> dict[str, Buffer]:
        """The buffers of a derived weight by field (for a part, of the tensors it is a view of), built if nobody did.

        Any thread may ask: whoever comes first builds, the others wait. A build that fails leaves nothing behind,
        is raised, and is tried again by the next who asks. Raises LoadError after `close`.
        """
        with self._lock:
            if self._closed:
                raise LoadError(f"derived weight {d.label!r} of {d.owner}: its weights were closed")
            if d.identity not in self._built:
                self.device.attach()
                before = set(self._buffers)
                steps = derive_steps(d, before)
                try:
                    self.run(steps)
                except BaseException:
                    self._drop([name for name in self._buffers if name not in before])
                    raise
            return {field: self._buffers[t.name] for field, t in d.tensors.items()}

    def run(self, steps: Sequence[Step]) -> None:
        """Execute steps other than checks, in order; what they allocated stays on a failure."""
        sizes = _sizes(steps)
        total = sum(s.tensor.bytes for s in steps if isinstance(s, Upload))
        with self.device.uploader(total) as uploader:
            for s in steps:
                if isinstance(s, Alloc):
                    self.allocate(s.buffer, sizes.get(s.buffer, s.bytes), s.label, s.owner)
                elif isinstance(s, Upload):
                    uploader.put(self._of(s.tensor), stored(self._reader(), s.tensor), s.tensor.offset)
                elif isinstance(s, Build):
                    self._build(s, uploader)
                elif isinstance(s, Free):
                    uploader.finish()
                    self.free(s.buffer)

    def _build(self, s: Build, uploader: Uploader) -> None:
        if self._on_device and s.derived.device is not None:
            uploader.flush()
            launch_build(s.derived, s.owner, self.device, self._buffers)
        else:
            for t, array in build(s.derived, s.owner, self._reader()):
                uploader.put(self._of(t), array, t.offset)
        self._built.add(s.derived.identity)

    def _reader(self) -> Read:
        if self._read is None:
            raise LoadError("load plan: it reads stored tensors, and was given nothing to read them with")
        return self._read

    def _of(self, t: Tensor) -> Buffer:
        if t.name not in self._buffers:
            raise LoadError(f"tensor {t.name!r} has no buffer: the plan fills it before it is allocated")
        return self._buffers[t.name]

    def close(self) -> None:
        """Free every buffer, all of them even if the device reports an error, which is then raised."""
        with self._lock:
            self._closed = True
            failed = self._drop(list(self._buffers))
        if failed is not None:
            raise failed

    def _drop(self, names: Sequence[str]) -> DeviceError | None:
        """Free these buffers, newest first, whatever the device says to it; its first error."""
        failed: DeviceError | None = None
        for name in reversed(names):
            try:
                self.free(name)
            except DeviceError as e:
                failed = failed or e
        return failed

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def execute(plan: LoadPlan, read: Read, check: CheckValues, device: Device, *, builds: Builds = "auto") -> Loaded:
    """Execute `plan`: every check, then allocations, uploads, builds and frees in order, on the calling thread.

    `read` returns a stored tensor's array in its own dtype and shape; `check(source, label)` raises for values no
    kernel may be handed, and may be called from several threads. Derived weights that can be are built on the device
    if `builds` says so; `auto` builds there on a GPU, and on the interpreter by the host's build, which has the same
    bits and is faster. What is held when is the same for all three.

    A failure anywhere frees all that was allocated and is raised again: as LoadError where a build or a tensor does
    not fit its declaration, else as it came. Ledger and peak of the result equal the forecast.
    """
    _check([s for s in plan.steps if isinstance(s, Check)], check, HELPERS if device.name == "cuda" else 1)
    loaded = Loaded(device, read, builds)
    try:
        loaded.run([s for s in plan.steps if not isinstance(s, Check)])
        _same(plan, loaded)
        device.synchronize()  # a dependent launch reads weights before it waits for what was launched before it
    except BaseException:
        # The first failure is the one to tell, whatever a device in trouble says to the frees.
        with suppress(DeviceError):
            loaded.close()
        raise
    loaded.not_built = plan.not_built
    return loaded


def _check(checks: Sequence[Check], check: CheckValues, threads: int) -> None:
    """Every check, on so many threads; raises what the first that fails raises, in the order of the plan."""
    if threads == 1:
        for c in checks:
            check(c.weight, c.label)
        return
    with ThreadPoolExecutor(threads, "check") as pool:
        made = [pool.submit(check, c.weight, c.label) for c in checks]
        try:
            for future in made:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _sizes(steps: Sequence[Step]) -> dict[str, int]:
    """Unrounded bytes of the buffers the steps fill, so that bounds are checked to the byte."""
    out: dict[str, int] = {}
    rounded = {s.buffer: s.bytes for s in steps if isinstance(s, Alloc)}
    for s in steps:
        tensors = (
            (s.tensor,) if isinstance(s, Upload) else tuple(s.derived.tensors.values()) if isinstance(s, Build) else ()
        )
        for t in tensors:
            size = t.offset + t.bytes
            if round_up(size) == rounded.get(t.name):
                out[t.name] = max(size, out.get(t.name, 0))
    return out


def _same(plan: LoadPlan, loaded: Loaded) -> None:
    """The ledger is the forecast; anything else is a fault of the plan."""
    for what, found, expected in (
        ("rows", loaded.rows(), plan.ledger()),
        ("peak", loaded.ledger.peak, plan.peak),
    ):
        if found != expected:
            raise LoadError(f"load plan: the ledger's {what} are {found}, expected the forecast's {expected}")


__all__ = ["Builds", "CheckValues", "LoadError", "Loaded", "Read", "build", "execute", "stored"]
