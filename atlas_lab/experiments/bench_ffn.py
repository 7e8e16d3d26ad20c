"""Cases of `bench` that are a whole gated feed-forward block: one load of its weights, each place of the gated product
by number of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from atlas_lab import checkpoint
from atlas_lab.blocks.ffn import DOWN, GATE, UP
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.residency import load_plan
from atlas_lab.core.route import RouteError
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments import trial
from atlas_lab.experiments.ab import Notify
from atlas_lab.experiments.bench_case import FfnCase
from atlas_lab.experiments.bench_projection import OURS, READ, Measuring, fill
from atlas_lab.experiments.bench_results import BenchCell, Must
from atlas_lab.experiments.cells import launch_result
from atlas_lab.experiments.errors import sentence
from atlas_lab.experiments.ffn_parity import FfnParity
from atlas_lab.experiments.numbers import Bench, activations, arrays, digest, reading
from atlas_lab.experiments.plan import Step, VariantPlan, block_step
from atlas_lab.experiments.reference import Reference
from atlas_lab.experiments.settings import levers_for
from atlas_lab.experiments.timed import rotated
from atlas_lab.kernels.lang import cache
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Device


class Blocks:
    """The cases of one block, and their cells. Raises RouteError where an arm is refused, and where it does not serve
    the form of a case: another would be measured in its name."""

    def __init__(self, cases: Sequence[FfnCase], with_: Measuring, target: Target) -> None:
        self.cases, self.with_ = cases, with_
        first = cases[0]
        pins = tuple(
            Pin(r, a, origin="bench") for r, a in ((GATE, first.gate_up), (UP, first.gate_up), (DOWN, first.down))
        )
        self.context = Context(
            target=target,
            dims=self.reference.dims,
            levers=levers_for(None, with_.said, target),
            preferences=Preferences(pins),
            rows=tuple(Rows(m, m) for m in sorted({c.m for c in cases})),
            table=shipped_table(target.name),
        )
        sites = self.reference.sites(first.format)
        self.routes = with_.registry.resolve_all(sites, self.context)
        self.arms = {name: with_.registry.arm(name) for name in first.arms}
        self.parity = FfnParity(self.routes[0], self.routes[1], self.arms, lambda t: self.held.store.read(t.name))
        self.steps = [self._step(c) for c in cases]
        self.plan = VariantPlan(
            first.name, first.format, self.context, self.routes, load_plan(self.routes), tuple(self.steps)
        )
        self.cells = [
            BenchCell(name=c.name, arm=c.form, format=c.format, n=c.intermediate, k=c.hidden, m=c.m) for c in cases
        ]

    @cached_property
    def reference(self) -> Reference:
        """Synthetic BF16 weights of the block."""
        first = self.cases[0]
        s = checkpoint.sizes("qwen3.5-27b", hidden=first.hidden, intermediate=first.intermediate)
        return Reference(f"ffn {first.intermediate} {first.hidden}", (0,), (GATE, UP, DOWN), seed=1, sizes=s)

    @cached_property
    def held(self) -> checkpoint.Checkpoint:
        return self.reference.file(self.cases[0].format, cache.directory())

    def files(self) -> dict[Hashable, Callable[[], object]]:
        """What writes the file of the weights, unless it is there."""
        ref, format = self.reference, self.cases[0].format
        return {(format, ref.sizes, ref.roles): partial(ref.file, format, cache.directory())}

    def prepare(self) -> None:
        """Nothing: what stages are compared with is made of outputs."""

    def measure(self, device: Device, notify: Notify, done: int, of: int) -> None:
        """Fill the cells. A kernel that faults ends the group, for the context may be lost."""
        made: dict[int, tuple[str, str]] = {}
        with Bench.of(self.plan, self.held, device) as bench:
            for i, (case, step, cell) in enumerate(zip(self.cases, self.steps, self.cells, strict=True)):
                notify(case.name, done + i, of)
                y = self._checked(step, cell, bench)
                if cell.status == "crashed":
                    return
                other, bits = made.setdefault(case.m, (case.name, digest(y)))
                if bits != digest(y) and cell.status == "passed":
                    cell.status, cell.reason = "failed", f"its output differs in its bits from that of {other}"
                if cell.status == "passed":
                    self._time(case, cell, step, bench, bits)

    def _step(self, case: FfnCase) -> Step:
        levers = self.context.levers.with_values({"gated": case.gated, "pdl": case.pdl}, "bench")
        context = replace(self.context, levers=levers)
        gate_up, down = self.routes
        found = [gate_up.at(GATE, case.m).arm, gate_up.at(UP, case.m).arm, down.at(DOWN, case.m).arm]
        expected = [case.gate_up, case.gate_up, case.down]
        if found != expected:
            raise RouteError(f"{case.name}: found {', '.join(found)}, expected {', '.join(expected)}")
        step = block_step(gate_up, down, case.m, context, self.with_.registry)
        if step.block and step.block.said:
            raise RouteError(f"{case.name}: {step.block.said[0]}")
        return step

    def _x(self, step: Step) -> np.ndarray:
        return activations(step.key, step.call.k, self.with_.seed)

    def _checked(self, step: Step, cell: BenchCell, bench: Bench) -> np.ndarray:
        """y of the step run with everything checked; in the cell what every stage of it is worth."""
        program, x = step.program, self._x(step)
        cell.bytes, cell.flops = program.traffic, program.flops
        cell.launches = [launch_result(launch) for launch in program.launches]
        inputs = {step.call.x.data.name: x}
        try:
            out = trial.run_program(
                program, step.call, bench.weights, bench.device, inputs, arrays(step, reading(self.held)), step.stages
            )
        except Exception as e:  # whatever an arm, a kernel or a driver does is that case's result
            cell.status, cell.reason = "crashed", sentence(e)
            return np.zeros(0)
        found = trial.apart(out, (step.call.y.data, *step.stages))
        cell.parity = self.parity.parity(program, step.m, self.context.dims, x, found.__getitem__)
        cell.status, cell.reason = ("passed" if cell.parity.passed else "failed"), cell.parity.reason
        return found["y"]

    def _time(self, case: FfnCase, cell: BenchCell, step: Step, bench: Bench, before: str) -> None:
        """Ours and the read kernel over the same bytes, in one run. `before` is the digest of the output that passed
        parity."""
        device, seed = bench.device, self.with_.seed
        with ExitStack() as stack:
            ports = bench.ports(step)
            stack.callback(bench.release)
            device.upload(ports[step.call.x.data.name], self._x(step))
            ours = timing.rotate(OURS, [bench.bind(step, ports, c) for c in rotated(bench, step, device.target.l2)])
            stack.callback(ours.keep.close)
            reader = stack.enter_context(probe.Reader(device, step.program.traffic, name=READ))
            timed = [t for t in (ours, reader.timed, reader.ahead) if t]
            found = timing.measure(device, timed, rounds=self.with_.rounds, seed=seed)
            y = step.call.y.data
            if digest(device.download(ports[y.name], y.dtype, y.shape)) != before:
                cell.status, cell.reason = "failed", "after the timed loop its output has other bits"
                return
            blocks = {t.name: [float(s) * 1e6 for s in found.blocks(t.name)] for t in timed}
            fill(cell, step, blocks, device.target, seed)
            if case.of_floor and cell.of_read:
                speed = cell.of_read.speed
                cell.must = [Must(name="of_floor", limit=case.of_floor, found=speed, passed=speed >= case.of_floor)]
