"""The interpreter as a device: every kernel on any machine, every access checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_lab.core.launch import Program, dims
from atlas_lab.core.target import Target
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime.bind import AnyResolved, Bound, Launched, MapPlace, Place, ResolvedCall, planned, resolve
from atlas_lab.runtime.device import Buffer, Device
from atlas_lab.runtime.errors import BindError
from atlas_lab.runtime.overlap import InFlight
from atlas_lab.simt import Buffer as Memory
from atlas_lab.simt import Options, Stats, run


class InterpreterDevice(Device):
    """Runs launches at once, in the calling thread, with `seed` and `options`; of a library's call its NumPy meaning.

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
            if not isinstance(x, ResolvedCall) and not x.launch.kernel.interpretable:
                where = f"program {program.name}: {x.launch.title}"
                raise BindError(f"{where} names numba.cuda itself: it runs on a GPU only (--device cuda)")
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
    """`stats` are of the last run, one a launch of a kernel."""

    device: InterpreterDevice

    def __init__(
        self,
        program: Program,
        device: InterpreterDevice,
        buffers: Mapping[str, Buffer],
        launches: tuple[AnyResolved, ...],
    ) -> None:
        super().__init__(program, device, buffers)
        most = device.target.shared_per_block
        for x in launches:
            if not isinstance(x, ResolvedCall) and x.launch.shared > most:
                found = f"program {program.name}: {x.launch.title}: found {x.launch.shared} bytes"
                raise BindError(f"{found} of dynamic shared memory, {device.target.name} allows a block {most}")
        self._launches = launches
        self.stats: tuple[Stats, ...] = ()

    def run(self) -> None:
        record: list[Launched] = []
        stats: list[Stats] = []
        in_flight = self.device.in_flight
        for x in self._launches:
            record.append(planned(x.launch))
            if isinstance(x, ResolvedCall):
                _compute(x, self.program.name)
                in_flight.ran(x, None)
                continue
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
        self.record, self.stats = tuple(record), tuple(stats)


def _compute(x: ResolvedCall, program: str) -> None:
    """What a library's call means, in NumPy: its output from its inputs; its workspace is left as it is."""
    call, inputs = x.launch.call, []
    for t, p, a in zip(x.launch.args, call.params, x.arguments, strict=True):
        _check_live(a, program)
        if p.reads:
            inputs.append(a.buffer.memory.array(t.dtype, t.shape, a.offset))
    out, place = x.launch.args[call.output], x.arguments[call.output]
    made = np.ascontiguousarray(call.numpy(*inputs), dtype(out.dtype).numpy)
    if made.shape != out.shape:
        raise BindError(f"program {program}: {x.launch.title}: found {made.shape} computed, expected {out.shape}")
    place.buffer.memory.write(made, place.offset)


def _check_live(a: Place, program: str) -> None:
    if not a.buffer.live:
        raise BindError(f"program {program}: buffer {a.buffer.name!r} was freed after binding")


def _argument(a: Place | int | float, program: str) -> Any:
    if not isinstance(a, Place):
        return a
    _check_live(a, program)
    return (a.buffer.memory, a.map if isinstance(a, MapPlace) else a.offset)
