"""Cases of `bench` that are one arm on one weight: planned and loaded together, judged and timed by number of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from atlas_lab import checkpoint
from atlas_lab.checkpoint import Checkpoint
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.registry import Registry
from atlas_lab.core.route import RouteError
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments import bench_peer, peers, trial
from atlas_lab.experiments.ab import Notify
from atlas_lab.experiments.bench_case import BenchCase
from atlas_lab.experiments.bench_results import FLOORS, BenchCell, Must, measured, one_row, relative
from atlas_lab.experiments.cells import launch_result
from atlas_lab.experiments.errors import sentence
from atlas_lab.experiments.numbers import Bench, Parity, activations, digest
from atlas_lab.experiments.peer_graph import Stored
from atlas_lab.experiments.plan import Step, VariantPlan, plan_variant
from atlas_lab.experiments.reference import Reference
from atlas_lab.experiments.settings import Said, levers_for
from atlas_lab.experiments.timed import floor_of, rotated
from atlas_lab.kernels.lang import cache
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Device

JUDGED = 256  # most rows of an output that are compared with float64; of all, bits are compared after the timed loop
OURS, WHOLE, READ, PEER = "ours", "whole", "read", "peer"
AHEAD = f"{READ} ahead"  # reads in dependent launches


@dataclass(frozen=True)
class Measuring:
    """How a run measures: `rounds` blocks of everything a case is compared with, in an order drawn from `seed`."""

    registry: Registry
    said: Said
    with_peers: bool
    rounds: int
    seed: int
    products: bench_peer.Products


def reference_of(case: BenchCase) -> Reference:
    """Synthetic BF16 weights `[n, k]`: the gate of an FFN with these sizes."""
    s = checkpoint.sizes("qwen3.5-27b", hidden=case.k, intermediate=case.n)
    return Reference(case.name, (0,), ("ffn.gate",), seed=1, sizes=s)


def plan_of(cases: Sequence[BenchCase], registry: Registry, said: Said, target: Target) -> VariantPlan:
    """The arm of cases of one group pinned to their weight; raises RouteError where it serves not all of them: another
    would be measured in its name."""
    first, rows = cases[0], [c.m for c in cases]
    ref = reference_of(first)
    context = Context(
        target=target,
        dims=ref.dims,
        levers=levers_for(None, said, target),
        preferences=Preferences((Pin("ffn.gate", first.arm, origin="bench"),)),
        rows=tuple(Rows(m, m) for m in sorted(rows)),
        table=shipped_table(target.name),
    )
    plan = plan_variant(first.name, first.format, ref.sites(first.format), context, rows, registry)
    for case in cases:
        found = [s.assignment.arm for s in plan.steps if s.m == case.m]
        if found != [case.arm]:
            raise RouteError(f"{case.name}: found {', '.join(found)} for these rows, expected {case.arm}")
    return plan


class Projections:
    """The cases of one arm on one weight, and their cells. Raises RouteError where the arm is refused."""

    def __init__(self, cases: Sequence[BenchCase], with_: Measuring, target: Target) -> None:
        self.cases, self.with_ = cases, with_
        self.readings: tuple[probe.Reading, ...] = probe.READINGS
        self._stored: dict[str, Stored] = {}
        self.plan = plan_of(cases, with_.registry, with_.said, target)
        self.cells = [
            BenchCell(name=c.name, arm=c.arm, format=c.format, n=c.n, k=c.k, m=c.m, used=list(c.used)) for c in cases
        ]

    def files(self) -> dict[Hashable, Callable[[], object]]:
        """What writes each file that will be read, unless it is there, by what is in it."""
        ref, folder = reference_of(self.cases[0]), cache.directory()
        formats = {c.format for c in self.cases} | {f for c in self.cases for f in self._read_by_peer(c)}
        return {(f, ref.sizes): partial(ref.file, f, folder) for f in formats}

    @property
    def _held(self) -> Checkpoint:
        return reference_of(self.cases[0]).file(self.cases[0].format, cache.directory())

    @cached_property
    def _parity(self) -> Parity:
        return Parity(self.with_.registry, self.plan, self._held, self.with_.seed, JUDGED)

    def _step(self, case: BenchCase) -> Step:
        (step,) = [s for s in self.plan.steps if s.m == case.m]
        return step

    def prepare(self) -> None:
        """Make what outputs are compared with, ours and those of peers."""
        for step in self.plan.steps:
            self._parity.foresee(step)
        for case in self.cases:
            for format in self._read_by_peer(case):
                step = self._step(case)
                x = activations(step.key, step.call.k, self.with_.seed)
                self._exact(case, self._weight_of_peer(case, format), x, peers.multiplies(case.peer, x))

    def _exact(self, case: BenchCase, stored: Stored, x: np.ndarray, multiplied: np.ndarray | None) -> np.ndarray:
        """The product that a peer's output is compared with, of x or of what it multiplied instead."""
        if multiplied is None:
            return self.with_.products.of(stored, x)
        return self.with_.products.of(stored, multiplied, case.peer)

    def measure(self, device: Device, notify: Notify, done: int, of: int) -> None:
        """Fill the cells. A kernel that faults ends the group, for the context may be lost."""
        try:
            with Bench.of(self.plan, self._held, device) as bench:
                for i, (case, cell) in enumerate(zip(self.cases, self.cells, strict=True)):
                    notify(case.name, done + i, of)
                    step = self._step(case)
                    x = activations(step.key, step.call.k, self.with_.seed)
                    y = _checked(step, cell, self._parity, bench, x)
                    if cell.status == "crashed":
                        return
                    if cell.status == "passed":
                        self._time(case, cell, step, bench, digest(y), x)
        finally:
            self._stored.clear()
            self.__dict__.pop("_parity", None)  # and the weights that it holds

    def _weight_of_peer(self, case: BenchCase, format: str) -> Stored:
        """Kept until the group is measured: its values take longer than their product."""
        if format not in self._stored:
            self._stored[format] = bench_peer.stored(reference_of(case).file(format, cache.directory()))
        return self._stored[format]

    def _read_by_peer(self, case: BenchCase) -> tuple[str, ...]:
        wanted = self.with_.with_peers and case.peer
        return (peers.reads(case.peer, case.format),) if wanted else ()

    def _time(self, case: BenchCase, cell: BenchCell, step: Step, bench: Bench, before: str, x: np.ndarray) -> None:
        """Ours, the read kernel over the same bytes, and the peer, in one run. `before` is the digest of the output
        that passed parity."""
        device, seed = bench.device, self.with_.seed
        with ExitStack() as stack:
            ports = bench.ports(step)
            stack.callback(bench.release)
            device.upload(ports[step.call.x.data.name], x)
            copies, alone = list(rotated(bench, step, device.target.l2)), product_of(step)
            timed = [timing.rotate(OURS, [bench.bind(alone, ports, c) for c in copies])]
            if alone is not step:
                bench.bind(step, ports, copies[0]).run()
                timed.append(timing.rotate(WHOLE, [bench.bind(step, ports, c) for c in copies]))
            for t in timed:
                stack.callback(t.keep.close)
            reader = stack.enter_context(probe.Reader(device, step.program.traffic, name=READ, readings=self.readings))
            self.readings = (reader.reading,)  # of as many bytes, but for x and y
            timed += [t for t in (reader.timed, reader.ahead) if t]
            peer = None
            for format in self._read_by_peer(case):
                stored = self._weight_of_peer(case, format)
                sets = timing.rotations(stored.bytes, device.target.l2)
                peer, cell.peer_failed = bench_peer.made(case.peer, stored, x, sets)
                timed += [replace(peer.timed, name=PEER)] if peer else []
            found = timing.measure(device, timed, rounds=self.with_.rounds, seed=seed)
            y = step.call.y.data
            now = device.download(ports[y.name], y.dtype, y.shape)
            if digest(now) != before:  # other bits than those that passed: right, or not?
                again = self._parity.parity(step, now, device)
                if not again.passed:
                    cell.status, cell.reason = "failed", f"after the timed loop: {again.reason}"
                    return
            blocks = {t.name: [float(s) * 1e6 for s in found.blocks(t.name)] for t in timed}
            fill(cell, step, blocks, device.target, seed)
            if peer is not None:
                exact = self._exact(case, stored, x, peer.x)
                cell.peer = bench_peer.result(peer, exact, blocks[PEER], blocks[OURS], seed)
            cell.must = musts(case, cell)


def product_of(step: Step) -> Step:
    """The step without the launches that quantize x, whose outputs a run of the whole left; the step itself if it has
    none."""
    rest = tuple(launch for launch in step.program.launches if not launch.quantizes)
    if len(rest) == len(step.program.launches):
        return step
    return replace(step, program=replace(step.program, launches=rest))


def _checked(step: Step, cell: BenchCell, parity: Parity, bench: Bench, x: np.ndarray) -> Any:
    """The step run once with everything checked: its output, and in the cell what it is worth."""
    cell.bytes, cell.flops = step.program.traffic, step.program.flops
    cell.launches = [launch_result(launch) for launch in step.program.launches]
    try:
        y = trial.run_program(
            *(step.program, step.call, bench.weights, bench.device, {step.call.x.data.name: x}, parity.arrays(step))
        )
    except Exception as e:  # whatever an arm, a kernel or a driver does is that case's result
        cell.status, cell.reason = "crashed", sentence(e)
        return None
    cell.parity = parity.parity(step, y, bench.device)
    cell.status, cell.reason = ("passed" if cell.parity.passed else "failed"), cell.parity.reason
    return y


def fill(cell: BenchCell, step: Step, blocks: dict[str, list[float]], target: Target, seed: int) -> None:
    """Times, floor and share from the blocks of ours and of the read kernel."""
    cell.ours, cell.read = measured(blocks[OURS], seed), measured(blocks[READ], seed)
    cell.ahead = measured(blocks[AHEAD], seed) if AHEAD in blocks else None
    cell.of_read = relative(blocks[READ], blocks[OURS], seed)
    cell.whole = measured(blocks[WHOLE], seed) if WHOLE in blocks else None
    cell.floor_us, cell.bound_by = floor_of(cell.read.median_us, step.program.launches, target)
    cell.share = cell.floor_us / cell.ours.median_us


def musts(case: BenchCase, cell: BenchCell) -> list[Must]:
    """What the case by itself must reach, and whether it did: without a peer's time nothing is said of it, and nothing
    is faster than a peer that is wrong."""
    out = []
    if case.of_peer and cell.peer:
        speed = cell.peer.ours.speed
        met = speed >= case.of_peer and not cell.peer.wrong
        out.append(Must(name="of_peer", limit=case.of_peer, found=speed, passed=met))
    if case.of_floor and cell.of_read:
        speed = cell.of_read.speed
        out.append(Must(name="of_floor", limit=case.of_floor, found=speed, passed=speed >= case.of_floor))
    return out


def of_one_row(case: BenchCase, cell: BenchCell, cells: Sequence[BenchCell]) -> list[Must]:
    """What the case must reach of its arm's speed for one row of the same weight, or of 1.4 floors where those take
    longer; nothing is said unless both were measured."""
    one = one_row(cell, cells)
    if not case.of_one_row or one is None or one.ours is None or cell.ours is None or cell.floor_us is None:
        return []
    speed = max(one.ours.median_us, FLOORS * cell.floor_us) / cell.ours.median_us
    return [Must(name="of_one_row", limit=case.of_one_row, found=speed, passed=speed >= case.of_one_row)]


def of_peers(case: BenchCase, cell: BenchCell, cells: Sequence[BenchCell]) -> list[Must]:
    """What the arm must reach of its peer's speed in the geometric mean over all shapes measured with the same rows;
    nothing is said of one shape alone."""
    if not case.of_peers or cell.peer is None:
        return []
    same = (cell.arm, cell.format, cell.m, cell.peer.name)
    peers = [c.peer for c in cells if c.peer and (c.arm, c.format, c.m, c.peer.name) == same]
    if len(peers) < 2:
        return []
    speed = float(np.exp(np.mean([np.log(p.ours.speed) for p in peers])))
    met = speed >= case.of_peers and not any(p.wrong for p in peers)
    return [Must(name="of_peers", limit=case.of_peers, found=speed, passed=met)]


def of_more_rows(case: BenchCase, cell: BenchCell, cells: Sequence[BenchCell]) -> list[Must]:
    """What the case must reach of the speed of more rows of the same weight: the least of their times over its own;
    nothing is said of the most rows."""
    if not case.of_more_rows or cell.ours is None:
        return []
    same = (cell.format, cell.n, cell.k)
    more = [c.ours.median_us for c in cells if c.ours and (c.format, c.n, c.k) == same and c.m > cell.m]
    if not more:
        return []
    speed = min(more) / cell.ours.median_us
    return [Must(name="of_more_rows", limit=case.of_more_rows, found=speed, passed=speed >= case.of_more_rows)]
