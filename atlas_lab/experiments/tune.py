"""Settings measured: of each arm and shape the chip model's best few, correct first, then timed in one run.

Every setting is judged at full size against float64 of the arm's own arithmetic (`tune_weights`); an arm that is exact
to another is judged bit for bit against the model's first setting, and that one by parity with the other arm on a small
weight. Settings may sum in other orders: each has the arm's tolerance. What is best is the least geometric mean, over M
of 1 and 16 where the arm serves them (else 64), of the time over that of the read kernel; whatever is within a
hundredth of it counts as equal, and the model's first of those wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from atlas_lab.core.context import Context, ModelDims, Pin, Preferences
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.numbers import Exact
from atlas_lab.core.program import PlanError
from atlas_lab.core.projection import Site
from atlas_lab.core.registry import PluginError, Registry
from atlas_lab.core.route import RouteError
from atlas_lab.core.rows import Rows
from atlas_lab.core.tuning import Choice, Setting, Table, TuningError
from atlas_lab.experiments import oracle
from atlas_lab.experiments.ab import Notify, silent
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.errors import sentence
from atlas_lab.experiments.numbers import Bench, activations
from atlas_lab.experiments.parity import run_case
from atlas_lab.experiments.plan import Step, VariantPlan, plan_variant
from atlas_lab.experiments.settings import Said, levers_for
from atlas_lab.experiments.tune_jobs import Job
from atlas_lab.experiments.tune_results import TriedSetting, TuneCell, TuneResult
from atlas_lab.experiments.tune_weights import Repeated
from atlas_lab.formats.base import FormatError
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Device

TOP = 8
EQUAL = 1.01
READ = "read"
ROWS = (1, 8, 16)
PREFILL_ROWS = (64,)  # of arms that serve none of them


@dataclass(frozen=True)
class Timeable:
    """A step to be timed over its bench's weights."""

    name: str
    bench: Bench
    step: Step


Clock = Callable[[Device, Sequence[Timeable], int, int], dict[str, float]]
"""Seconds a call by name, and of `read` over so many bytes, alternated in one run drawn from a seed."""


@dataclass(frozen=True)
class Tuner:
    """What all cells of a run share. `table` is what was best before: it is tried again beside the model's `top`."""

    registry: Registry
    said: Said
    device: Device
    clock: Clock
    top: int = TOP
    seed: int = 0
    table: Table = Table()


def run(
    tuner: Tuner, todo: Sequence[Job], result: TuneResult, *, budget: float | None = None, notify: Notify = silent
) -> None:
    """Tune `todo` into `result`, which whoever interrupts it has as far as it came; after `budget` seconds no other is
    begun. A kernel that crashes on a GPU ends the run, for its context may be lost."""
    begin = time.monotonic()
    result.cells += [TuneCell(arm=j.arm.name, format=j.format.name, n=j.n, k=j.k, shape=j.shape) for j in todo]
    for done, (job, cell) in enumerate(zip(todo, result.cells, strict=True)):
        late = budget is not None and time.monotonic() - begin > budget
        if late or any(c.status == "crashed" for c in result.cells[:done]):
            cell.reason = "the budget was spent" if late else "an earlier kernel crashed"
            continue
        notify(f"{job.arm.name} {job.shape}", done, len(todo))
        _cell(tuner, job, cell)
    result.status = "partial" if any(c.status == "left" for c in result.cells) else "complete"


def _cell(tuner: Tuner, job: Job, cell: TuneCell) -> None:
    """One arm on one shape."""
    if job.skip:
        cell.status, cell.reason = "skipped", job.skip
        return
    try:
        weights = Repeated(job.format, job.roles, job.ns, job.k, tuner.seed)
        _plan(tuner, job, weights.whole, Table())
    except (FormatError, RouteError, PlanError, PluginError, TuningError) as e:
        cell.status, cell.reason = "skipped", str(e)
        return
    try:
        settings = _settings(tuner, job, cell)
        if not settings:
            cell.status, cell.reason = "skipped", f"arm {job.arm.name} has no settings for this shape"
            return
        _measure(tuner, job, cell, weights, settings)
    except Exception as e:  # whatever an arm, a kernel or a driver does is that cell's result
        cell.status, cell.reason = "crashed" if tuner.device.name == "cuda" else "failed", sentence(e)


def _settings(tuner: Tuner, job: Job, cell: TuneCell) -> list[Setting]:
    """The model's best, and what was best before."""
    legal = list(job.arm.settings(job.n, job.k, tuner.device.target))
    cell.legal = len(legal)
    if len(set(legal)) < len(legal):
        raise TuningError(f"arm {job.arm.name}: found a setting twice in {job.shape}'s, expected each once")
    before = tuner.table.find(job.arm.name, job.n, job.k)
    chosen = legal[: tuner.top]
    return [*chosen, before] if before in legal and before not in chosen else chosen


def rows_of(job: Job) -> list[int]:
    """The row counts that are timed: of 1, 8 and 16, or 64, or the arm's first where it serves none of these."""
    few = [m for m in ROWS if m in job.arm.rows]
    return few or [m for m in PREFILL_ROWS if m in job.arm.rows] or [job.arm.rows.first]


def _plan(tuner: Tuner, job: Job, site: Site, table: Table) -> VariantPlan:
    target, ms = tuner.device.target, rows_of(job)
    context = Context(
        target=target,
        dims=ModelDims("tune", hidden=job.k, intermediate=job.n, layers=1),
        levers=levers_for(None, tuner.said, target),
        preferences=Preferences(tuple(Pin(role, job.arm.name, origin="tune") for role in site.roles)),
        rows=tuple(Rows(m, m) for m in ms),
        table=table,
    )
    return plan_variant(job.arm.name, job.format.name, [site], context, ms, tuner.registry)


def _measure(tuner: Tuner, job: Job, cell: TuneCell, weights: Repeated, settings: Sequence[Setting]) -> None:
    """Run each setting, judge it, and time those that are right."""
    device, timeable = tuner.device, []
    with ExitStack() as stack:
        benches: dict[Any, Bench] = {}
        judge = _Judge(tuner, job, weights)
        for i, s in enumerate(settings):
            tried = TriedSetting(setting=dict(s))
            cell.tried.append(tried)
            plan = _plan(tuner, job, weights.whole, Table.of([Choice(job.arm.name, job.n, job.k, s)]))
            layout = _layout(plan.routes[0].declarations)
            if layout not in benches:
                held = load.execute(plan.load, weights.read, lambda w, label: None, device)
                benches[layout] = stack.enter_context(Bench(plan, held, device))
            for step in plan.steps:
                wrong = judge.wrong(s, step, output(benches[layout], step, tuner.seed))
                tried.reason = tried.reason or wrong
                timeable.append(Timeable(f"{i} M={step.m}", benches[layout], step))
            tried.passed = not tried.reason
        timeable = [t for t in timeable if cell.tried[int(t.name.split()[0])].passed]
        if not cell.tried[0].passed:
            cell.status, cell.reason = "failed", f"the model's first setting: {cell.tried[0].reason}"
            return
        found = tuner.clock(device, timeable, timeable[0].step.program.traffic, tuner.seed)
    read = found[READ]
    cell.read_us = read * 1e6
    for t in timeable:
        tried = cell.tried[int(t.name.split()[0])]
        tried.us[t.step.m] = found[t.name] * 1e6
    for tried in cell.tried:
        ratios = [us / cell.read_us for us in tried.us.values()]
        tried.of_read = prod(ratios) ** (1 / len(ratios)) if ratios else None
    cell.best, cell.status = winner([t.of_read for t in cell.tried]), "tuned"
    wrong = next((t.reason for t in cell.tried if t.reason), "")
    if wrong:
        cell.status, cell.reason = "failed", wrong


def winner(of_read: Sequence[float | None]) -> int:
    """The first in the model's order that is within a hundredth of the least; None are not in the race."""
    least = min(r for r in of_read if r is not None)
    return next(i for i, r in enumerate(of_read) if r is not None and r <= EQUAL * least)


def output(bench: Bench, step: Step, seed: int) -> np.ndarray:
    """What the step makes of its input, over poisoned outputs and scratch; raises GuardError and what binding and the
    device report. What it took is free again."""
    device, call = bench.device, step.call
    try:
        ports = bench.ports(step)
        device.upload(ports[call.x.data.name], activations(step.key, call.k, seed))
        for t in (*step.program.outputs, *step.program.temporaries):
            device.poison(ports[t.name])
        bound = bench.bind(step, ports, {})
        bound.run()
        device.synchronize()
        bound.verify()
        for buffer in ports.values():
            device.check_guards(buffer)
        return device.download(ports[call.y.data.name], call.y.data.dtype, call.y.data.shape)
    finally:
        bench.release()


class _Judge:
    """Judges the outputs of one cell; the tile's product is computed once for equal weights and M."""

    def __init__(self, tuner: Tuner, job: Job, weights: Repeated) -> None:
        self.tuner, self.job, self.weights = tuner, job, weights
        self._first: dict[int, np.ndarray] = {}
        self._known: dict[Any, oracle.Reference] = {}

    def wrong(self, s: Setting, step: Step, y: np.ndarray) -> str:
        """What is wrong with the output of a setting; "" for nothing. The model's first setting is asked first."""
        arm = self.job.arm
        if isinstance(arm.tolerance, Exact) and arm.tolerance.to != "reference":
            if step.m not in self._first:
                self._first[step.m] = y
                return self._parity(s, step.m)
            same = oracle.same_bits(y, self._first[step.m])
            return "" if same else f"M={step.m}: other bits than the model's first setting"
        expected = self.weights.expected(self._tile(s, step))
        found = oracle.compare(y, expected, arm.tolerance, self.job.k)
        return "" if found.ok else f"M={step.m}: {found}"

    def _table(self, s: Setting, rows: int) -> Table:
        """The setting for weights of so few rows together, if it is legal there; else the model's first is."""
        arm, k = self.job.arm, self.job.k
        known = s in arm.settings(rows, k, self.tuner.device.target)
        return Table.of([Choice(arm.name, rows, k, s)] if known else [])

    def _parity(self, s: Setting, m: int) -> str:
        arm, device = self.job.arm, self.tuner.device
        rows = self.weights.rows[0]  # a case has as many for each role
        roles, form = self.weights.tile.roles, self.job.format.name
        case = Case(arm.name, roles, m, rows, self.job.k, form, self.tuner.seed, "tune")
        context = replace(base_context(device.target), table=self._table(s, rows * len(roles)))
        found = run_case(case, arm, device, context, {e.arm.name: e.arm for e in self.tuner.registry.entries})
        return "" if found.ok else f"M={m}: {found.sentence}"

    def _tile(self, s: Setting, step: Step) -> oracle.Reference:
        arm, k = self.job.arm, self.job.k
        steps = _plan(self.tuner, self.job, self.weights.tile, self._table(s, sum(self.weights.rows))).steps
        small = next(t for t in steps if t.m == step.m)
        declarations = small.assignment.declarations
        key = (step.m, _layout(declarations), s if arm.reference is not None else ())
        if key not in self._known:
            x, _ = oracle.activations(activations(step.key, k, self.tuner.seed), arm.activation)
            held = oracle.declared(declarations, self.weights.read)
            self._known[key] = oracle.reference(arm, small.call, declarations, held, x)[0]
        return self._known[key]


def _layout(declarations: Sequence[Declaration]) -> tuple[Any, ...]:
    """What makes two settings read the same buffers."""
    return tuple(d if isinstance(d, Bind) else d.identity for d in declarations)


def says_no(result: TuneResult) -> bool:
    """Whether a setting failed parity, or a kernel crashed."""
    return any(c.status in ("failed", "crashed") for c in result.cells)
