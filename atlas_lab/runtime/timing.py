"""Timing: rotated weights, graph replays between events, A and B alternated in blocks, in random order.

Ratios hold where absolute times drift: so everything that is compared is measured in one call of `measure`, each in
blocks of at least 20 ms, every round in another order; a block's figure is the median of its intervals, and every
interval is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from atlas_lab.runtime.bind import Bound
from atlas_lab.runtime.cuda import gpu_of
from atlas_lab.runtime.device import Device
from atlas_lab.runtime.driver import bindings, call, check
from atlas_lab.runtime.errors import DeviceError
from atlas_lab.runtime.graph import capture
from atlas_lab.runtime.nvml import Meter

BLOCK = 0.020  # seconds
INTERVAL = 0.0005  # seconds between two events: a thousand times their resolution
CALLS = 16  # least calls a graph holds, so that the gap between two replays hardly counts
FEWEST = 5  # intervals a block


@dataclass(frozen=True)
class Timed:
    """What is measured. `replay` enqueues `calls_per_replay` calls on `stream` (a CUstream, an object with a
    `handle` or a `cuda_stream`, or an integer) and returns; `keep` holds what it needs alive."""

    name: str
    replay: Callable[[], None]
    calls_per_replay: int
    stream: Any
    keep: Any = None


@dataclass(frozen=True)
class Sample:
    """One block of one name. `seconds` a call, one an interval; `replays` an interval; `position` in the whole run;
    `clocks` as NVML read them while it ran, or None."""

    name: str
    round: int
    position: int
    replays: int
    seconds: tuple[float, ...]
    clocks: dict[str, float | None] | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Timing:
    """Samples in the order they were taken. `host` is the host's seconds a call, by name: where it comes near the
    device's, the device waited for the host and the figure is not the kernel's."""

    seed: int
    block: float
    samples: tuple[Sample, ...]
    host: dict[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.host)

    def blocks(self, name: str) -> np.ndarray:
        """Medians of the blocks, float64 seconds a call, by round; raises KeyError for a name not measured."""
        if name not in self.host:
            raise KeyError(f"{name!r} was not measured, expected one of {', '.join(self.host)}")
        return np.array([s.median for s in sorted(self.samples, key=lambda s: s.round) if s.name == name])

    def median(self, name: str) -> float:
        """Median of the blocks' medians, seconds a call."""
        return float(np.median(self.blocks(name)))

    def ratios(self, a: str, b: str) -> np.ndarray:
        """Time of `a` over time of `b`, one a round: the two blocks of a round are neighbours in time."""
        ratios: np.ndarray = self.blocks(a) / self.blocks(b)
        return ratios

    @property
    def starved(self) -> tuple[str, ...]:
        """Names whose replays the host can hardly enqueue as fast as the device runs them."""
        return tuple(n for n, host in self.host.items() if host > 0.8 * self.median(n))

    def to_json(self) -> dict[str, Any]:
        """Plain data, raw samples included."""
        return {
            "seed": self.seed,
            "block_s": self.block,
            "host_s": dict(self.host),
            "samples": [asdict(s) | {"seconds": list(s.seconds)} for s in self.samples],
        }


def rotations(nbytes: int, l2: int, factor: int = 4) -> int:
    """How many sets of weights of `nbytes` to rotate so that together they are at least `factor` times the L2."""
    return max(2, ceil(factor * l2 / max(nbytes, 1)))


def rotate(name: str, programs: Sequence[Bound], *, calls: int = CALLS, factor: int = 4) -> Timed:
    """A graph of `programs` (the same one over different weights), cycled through until it holds at least `calls`.

    Raises DeviceError if their weights together are less than `factor` times the L2 (programs without weights read
    activations, which are hot in a model too), VerifyError if the graph is not the plan.
    """
    graph = capture([*programs] * max(1, ceil(calls / max(len(programs), 1))))
    weights = {(id(b.buffers[t.name]), t.offset): t.bytes for b in programs for t in b.program.persistent}
    l2 = graph.device.target.l2
    found, least = sum(weights.values()), factor * l2
    if weights and found < least:
        need = rotations(found // len(programs), l2, factor)
        graph.close()
        raise DeviceError(
            f"timing {name}: found {found} bytes of weights in {len(programs)} sets, expected at least {least}, "
            f"{factor} times the L2: rotate {need} sets"
        )
    graph.verify()
    return Timed(name, graph.replay, len(graph.programs), graph.device.stream, keep=graph)


def order(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """Every name once a round, each round in an order drawn from `seed`."""
    rng = np.random.default_rng(seed)
    return [[names[i] for i in rng.permutation(len(names))] for _ in range(rounds)]


def measure(device: Device, timed: Sequence[Timed], *, rounds: int = 20, block: float = BLOCK, seed: int = 0) -> Timing:
    """Time several things against each other: `rounds` blocks of at least `block` seconds of each.

    Raises DeviceError on the interpreter, for names given twice, and for what the device reports.
    """
    gpu = gpu_of(device)
    by_name = {t.name: t for t in timed}
    if len(by_name) != len(timed) or not timed:
        raise DeviceError(f"timing: found the names {[t.name for t in timed]}, expected one or more, each once")
    events = _Events()
    meter = Meter(gpu.card)
    samples: list[Sample] = []
    try:
        spans = {t.name: _calibrate(t, events, block) for t in timed}
        for round_, names in enumerate(order(list(by_name), rounds, seed)):
            for name in names:
                replays, intervals, _ = spans[name]
                clocks, seconds = _block(by_name[name], events, replays, intervals, meter)
                samples.append(Sample(name, round_, len(samples), replays, seconds, clocks))
    finally:
        events.close()
    return Timing(seed, block, tuple(samples), {n: host for n, (_, _, host) in spans.items()})


def _calibrate(t: Timed, events: _Events, block: float) -> tuple[int, int, float]:
    """Replays an interval, intervals a block, host seconds a call; the device is warm afterwards."""
    for _ in range(3):
        t.replay()
    _wait(t.name)
    host = []
    for _ in range(8):
        begin = time.perf_counter()
        t.replay()
        host.append(time.perf_counter() - begin)
    _wait(t.name)
    _, seconds = _block(t, events, 1, 8, None)
    for _ in range(2):  # again over a whole block: clocks rise with load
        replay = max(float(np.median(seconds)) * t.calls_per_replay, 1e-6)
        replays = max(1, ceil(INTERVAL / replay))
        intervals = max(FEWEST, ceil(block / (replays * replay)))
        _, seconds = _block(t, events, replays, intervals, None)
    return replays, intervals, min(host) / t.calls_per_replay


def _block(
    t: Timed, events: _Events, replays: int, intervals: int, meter: Meter | None
) -> tuple[dict[str, float | None] | None, tuple[float, ...]]:
    """One block: clocks, and seconds a call of each interval. The first interval warms up and is not kept."""
    stream = _handle(t.stream)
    marks = events.take(intervals + 2)
    events.record(marks[0], stream)
    for mark in marks[1:]:
        for _ in range(replays):
            t.replay()
        events.record(mark, stream)
    clocks = meter.read() if meter else None
    _wait(t.name)
    calls = replays * t.calls_per_replay
    return clocks, tuple(events.seconds(a, b) / calls for a, b in pairwise(marks[1:]))


def _wait(name: str) -> None:
    call(f"timing {name}", "cuCtxSynchronize")


def _handle(stream: Any) -> Any:
    for attribute in ("cuda_stream", "handle"):
        if hasattr(stream, attribute):
            return getattr(stream, attribute)
    return stream


class _Events:
    """CUDA events, made once and used again."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._record = bindings().cuEventRecord

    def take(self, count: int) -> list[Any]:
        while len(self._made) < count:
            self._made.append(call("timing", "cuEventCreate", 0))
        return self._made[:count]

    def record(self, event: Any, stream: Any) -> None:
        status = self._record(event, stream)[0]
        if status:
            check(status, "timing")

    def seconds(self, a: Any, b: Any) -> float:
        return float(call("timing", "cuEventElapsedTime", a, b)) / 1e3

    def close(self) -> None:
        for event in self._made:
            bindings().cuEventDestroy(event)
        self._made.clear()
