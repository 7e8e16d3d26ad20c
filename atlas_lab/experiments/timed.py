"""Times of an experiment's cells on a GPU: every variant's programs of one M against each other, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import trial
from atlas_lab.experiments.numbers import Bench, Judge, Key, Products, activations, digest
from atlas_lab.experiments.plan import Step
from atlas_lab.experiments.results import Cell, ExperimentResult, TimeResult
from atlas_lab.experiments.session import Session
from atlas_lab.experiments.stats import interval
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.bind import Bound
from atlas_lab.runtime.device import Buffer, Device

ROUNDS = 20
MOST_SETS = 256
IN_L2 = "L2: its weights are too small to rotate"
Notify = Callable[[str, int, int], None]
Digests = Mapping[tuple[str, Key], str]
"""Of the outputs that parity judged, by variant and step."""


@dataclass
class Running:
    """A step on the device: its rotated programs, the ports they share."""

    cell: Cell
    step: Step
    bench: Bench
    bound: list[Bound]
    ports: dict[str, Buffer]

    @property
    def name(self) -> str:
        return f"{self.cell.variant} {self.step.label}"

    @property
    def in_l2(self) -> bool:
        """Whether there are fewer sets of weights than it takes to outgrow the L2."""
        return len(self.bound) == MOST_SETS


def run(
    session: Session, x: ExperimentResult, device: Device, products: Products, judged: Digests, notify: Notify
) -> None:
    """Time every cell that passed parity. Each variant's weights stay loaded from its own plan while all of one M
    alternate; outputs are checked again afterwards, where their bits are not those `judged`, and a cell whose output
    is wrong fails."""
    passed = [c for c in x.cells if c.status == "passed"]
    notify("measuring what the card reaches", 0, len(passed))
    reached = probe.ceilings(device).read_rate
    with ExitStack() as stack:
        benches: dict[str, Bench] = {}
        judges: dict[str, Judge] = {}
        for name in dict.fromkeys(c.variant for c in passed):
            held = session.file(name)
            plan = session.numbers_plan(name, held)
            benches[name] = stack.enter_context(Bench.of(plan, held, device))
            judges[name] = Judge(session.registry, plan, held, products)
        done = 0
        for layer, m in dict.fromkeys((c.layer, c.m) for c in passed):
            group = [c for c in passed if (c.layer, c.m) == (layer, m)]
            notify(f"timing layers.{layer} M={m}", done, len(passed))
            _together(group, benches, judges, judged, device, session.target, reached, products.seed)
            done += len(group)


def _together(
    cells: list[Cell],
    benches: dict[str, Bench],
    judges: dict[str, Judge],
    judged: Digests,
    device: Device,
    target: Target,
    reached: float,
    seed: int,
) -> None:
    with ExitStack() as stack:
        for c in cells:
            stack.callback(benches[c.variant].release)
        running = [_start(c, benches[c.variant], device, seed) for c in cells]
        timed = []
        for r in running:
            timed.append(_clock(r, device))
            if timed[-1].keep is not None:
                stack.callback(timed[-1].keep.close)
        found = timing.measure(device, timed, rounds=ROUNDS, seed=seed)
        for r in running:
            _check_again(r, judges[r.cell.variant], judged.get((r.cell.variant, r.step.key)), device)
            if r.cell.status == "passed":
                blocks = [float(s) * 1e6 for s in found.blocks(r.name)]
                r.cell.time = time_of(blocks, r.step, target, reached, seed)
                if r.in_l2:
                    r.cell.time.bound_by = IN_L2
                if r.name in found.starved:
                    r.cell.time.bound_by = "the host"


def _start(c: Cell, bench: Bench, device: Device, seed: int) -> Running:
    """Bind a step over rotated copies of its weights, and run it once."""
    step = bench.plan.step((c.layer, c.role, c.m))
    assert step is not None
    ports = bench.ports(step)
    bound = [bench.bind(step, ports, w) for w in rotated(bench, step, device.target.l2)]
    x = activations(step.key, step.call.k, seed)
    device.upload(ports[step.call.x.data.name], x)
    for t in (*step.program.outputs, *step.program.temporaries):
        device.poison(ports[t.name])
    bound[0].run()
    device.synchronize()
    return Running(c, step, bench, bound, ports)


def rotated(bench: Bench, step: Step, l2: int) -> Iterator[dict[str, Buffer]]:
    """The step's own weights, then copies of them, together at least four times the L2 (but no more than 256)."""
    yield {}
    tensors = step.program.persistent
    sets = min(MOST_SETS, timing.rotations(sum(t.bytes for t in tensors), l2))
    for _ in range(sets - 1):
        copy = {}
        for name in dict.fromkeys(t.name for t in tensors):  # views of one buffer are copied with it, once
            original = bench.weights[name]
            whole = Tensor("u8", (original.bytes,), name)
            copy[name] = bench.take(whole, "rotation")
            bench.device.upload(copy[name], bench.device.download(original, "u8", whole.shape))
        yield copy


def _clock(r: Running, device: Device) -> timing.Timed:
    """Rotated programs as a graph, or with the lever `graph` off launched one by one."""
    if r.step.call.context.levers.graph:
        return timing.rotate(r.name, r.bound, factor=0 if r.in_l2 else 4)

    def launch() -> None:
        for b in r.bound:
            b.run()

    return timing.Timed(r.name, launch, len(r.bound), getattr(device, "stream", None))


def _check_again(r: Running, judge: Judge, before: str | None, device: Device) -> None:
    """The output after the timed loop, a block's stages with it, must be the one that passed parity, by its digest, or
    at least as right."""
    now = trial.downloaded(device, r.ports, (r.step.call.y.data, *r.step.stages))
    if digest(now) == before:
        return
    again = judge.judge(r.step, now, device).parity
    if not again.passed:
        r.cell.status, r.cell.reason = "failed", f"after the timed loop: {again.reason}"
        r.cell.parity = again


def floor_of(read_us: float, launches: Iterable[Enqueued], target: Target) -> tuple[float, str]:
    """Microseconds that launches whose bytes take `read_us` to read need at least, and what bounds them, `read` or a
    math pipe; pipes without a figure count for nothing."""
    math = [x for x in launches if x.flops and x.pipe in target.math]
    needed = sum(x.flops / target.math[x.pipe].value for x in math) * 1e6
    return (needed, math[0].pipe) if needed > read_us else (read_us, "read")


def time_of(blocks: list[float], step: Step, target: Target, reached: float, seed: int) -> TimeResult:
    """A cell's time beside its floor: bytes over the read rate measured in this run, operations over the target's
    rates."""
    floor, by = floor_of(step.program.traffic / reached * 1e6, step.program.launches, target)
    median = float(np.median(blocks))
    return TimeResult(
        median_us=median,
        ci95=interval(blocks, seed),
        blocks=blocks,
        floor_us=floor,
        share=floor / median,
        bound_by=by,
    )
