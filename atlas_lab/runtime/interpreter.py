"""The interpreter as a device: every kernel on any machine, every access checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_lab.core.launch import Program, dims
from atlas_lab.core.target import Target
from atlas_lab.runtime.bind import Bound, Launched, MapPlace, Place, Resolved, planned, resolve, title
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import BindError
from atlas_lab.runtime.overlap import InFlight
from atlas_lab.simt import Buffer as Memory
from atlas_lab.simt import Options, Stats, run


class InterpreterDevice(Device):
    """Runs launches at once, in the calling thread, with `seed` and `options`.

    `run` raises simt's SimtError for everything a kernel does wrong.
    """

    name = "interpreter"

    def __init__(self, target: Target, *, seed: int = 0, options: Options = Options()) -> None:
        super().__init__(target, guard=0)
        self.seed, self.options = seed, options
        self.in_flight = InFlight()

    def bind(self, program: Program, buffers: Mapping[str, Buffer]) -> InterpreterBound:
        launches = resolve(program, buffers, self)
        for x in launches:
            if not x.launch.kernel.interpretable:
                raise BindError(
                    f"program {program.name}: {x.title} names numba.cuda itself: it runs on a GPU only (--device cuda)"
                )
        return InterpreterBound(program, self, buffers, launches)

    def attach(self) -> None:
        """Any thread may, one at a time."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding; on a GPU it might have been."""
        self.in_flight.end()

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "name": None, "stands_for": self.target.name}

    def _take(self, name: str, nbytes: int) -> Memory:
        return Memory(name, nbytes)

    def _give(self, buffer: Buffer) -> None:
        self.in_flight.end()
        buffer.memory.poison()  # whoever still holds it reads NaN
        buffer.memory = None

    def _write(self, buffer: Buffer, offset: int, raw: np.ndarray) -> None:
        self.in_flight.end()
        buffer.memory.write(raw, offset)

    def _read(self, buffer: Buffer, offset: int, size: int) -> np.ndarray:
        self.in_flight.end()
        view: np.ndarray = buffer.memory.array(np.uint8, (size,), offset)
        return view.copy()

    def _poison(self, buffer: Buffer) -> None:
        self.in_flight.end()
        buffer.memory.poison()


class InterpreterBound(Bound):
    """`stats` are of the last run, one a launch."""

    device: InterpreterDevice

    def __init__(
        self,
        program: Program,
        device: InterpreterDevice,
        buffers: Mapping[str, Buffer],
        launches: tuple[Resolved, ...],
    ) -> None:
        super().__init__(program, device, buffers)
        most = device.target.shared_per_block
        for x in launches:
            if x.launch.shared > most:
                found = f"program {program.name}: {title(x.launch)}: found {x.launch.shared} bytes"
                raise BindError(f"{found} of dynamic shared memory, {device.target.name} allows a block {most}")
        self._launches = launches
        self.stats: tuple[Stats, ...] = ()

    def run(self) -> None:
        record: list[Launched] = []
        stats: list[Stats] = []
        in_flight = self.device.in_flight
        for x in self._launches:
            overlap = in_flight.overlap(x)
            stats.append(
                run(
                    x.launch.kernel,
                    grid=dims(x.launch.grid),
                    block=dims(x.launch.block),
                    cluster=dims(x.launch.cluster),
                    args=[_argument(a, self.program.name) for a in x.arguments],
                    shared_bytes=x.launch.shared,
                    seed=self.device.seed,
                    options=self.device.options,
                    overlap=overlap,
                )
            )
            in_flight.ran(x, overlap)
            record.append(planned(x.launch))
        self.record, self.stats = tuple(record), tuple(stats)


def _argument(a: Place | int | float, program: str) -> Any:
    if not isinstance(a, Place):
        return a
    if not a.buffer.live:
        raise BindError(f"program {program}: buffer {a.buffer.name!r} was freed after binding")
    return (a.buffer.memory, a.map if isinstance(a, MapPlace) else a.offset)
