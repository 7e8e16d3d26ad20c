"""The main job: variants of one BF16 reference, correct first, then timed in alternation, then compared."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from atlas_lab.checkpoint import Checkpoint
from atlas_lab.core.registry import Registry
from atlas_lab.core.target import Target
from atlas_lab.experiments import compare, isolate, timed
from atlas_lab.experiments.cells import cell_of, fill
from atlas_lab.experiments.config import Loaded
from atlas_lab.experiments.errors import ConfigError, sentence
from atlas_lab.experiments.numbers import Judge, Key, Numbers, Products, outputs
from atlas_lab.experiments.plan import Step, VariantPlan
from atlas_lab.experiments.results import AbResult, Cell, ExperimentResult, Residency, VariantResult
from atlas_lab.experiments.session import SEED, Session, open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.errors import LoadError

Notify = Callable[[str, int, int], None]
PACKAGES = ("numpy", "numba", "numba-cuda", "cuda-core", "ml_dtypes")


def silent(what: str, done: int, of: int) -> None:
    """Tells nobody."""


def start(said: Said, target: Target | None) -> Device:
    """The device to run on: what `--device` says, or what is there. Raises DeviceError."""
    return open_device(said.device, target)


def run_ab(
    loaded: Loaded,
    registry: Registry,
    said: Said = Said(),
    name: str | None = None,
    *,
    seed: int = SEED,
    result: AbResult | None = None,
    notify: Notify = silent,
) -> AbResult:
    """Run one experiment. `result` is filled as the run goes, so that whoever interrupts it has what was done; its
    status is `partial` until the end.

    Raises ConfigError, RouteError, DeviceError and the like for bad input, before anything ran.
    """
    result = AbResult() if result is None else result
    wanted = registry.target(loaded.config.target) if loaded.config.target else None
    with start(said, wanted) as device:
        session = open_session(loaded, said, registry, name, device.target, small=device.name == "interpreter")
        result.tool, result.machine, result.device = tool(), machine(), device.describe()
        result.target = {"name": device.target.name, "title": device.target.title, "arch": device.target.arch}
        result.seed = seed
        result.settings = {"file": str(loaded.source.path), "how": loaded.how}
        if device.name == "cuda":
            session.check_libraries()
        x = described(session)
        result.experiments.append(x)
        _compile(session, x, notify)
        products = Products(session.reference_file(), seed)
        judged = _numbers(session, x, device, products, notify)
        if device.name == "cuda":
            timed.run(session, x, device, products, judged, notify)
        x.comparisons = compare.comparisons(session, x, seed)
        x.require = compare.bounds(session, x)
    result.status = "complete"
    return result


def described(session: Session) -> ExperimentResult:
    """The experiment before anything ran: variants, routes, residency, and a cell for every step."""
    x = ExperimentResult(name=session.name, config=session.experiment.model_dump(exclude_none=True))
    for name, p in session.plans.items():
        labels = {r.label: r.bytes for r in p.load.ledger()}
        x.variants[name] = VariantResult(
            weights=p.weights,
            levers=dict(p.context.levers.items()),
            routes=[{**r.to_json(), "hash": r.hash} for r in p.routes],
            residency=Residency(steady=p.load.steady, peak=p.load.peak, labels=labels),
        )
        x.cells += [cell_of(name, s, session.target) for s in p.steps]
    return x


def _compile(session: Session, x: ExperimentResult, notify: Notify) -> None:
    for done, (cell, step) in enumerate(_steps(session, x)):
        notify(f"compiling for {session.target.arch}", done, len(x.cells))
        fill(cell, step, session.target.arch)


def _steps(session: Session, x: ExperimentResult) -> list[tuple[Cell, Step]]:
    steps = {(name, s.key): s for name, p in session.plans.items() for s in p.steps}
    return [(c, steps[c.variant, (c.layer, c.role, c.m)]) for c in x.cells]


def _numbers(
    session: Session, x: ExperimentResult, device: Device, products: Products, notify: Notify
) -> dict[tuple[str, Key], str]:
    """Parity of every cell; returns the digests of the outputs, by variant and step."""
    done, judged = 0, {}
    for name in session.plans:
        cells = {(c.layer, c.role, c.m): c for c in x.cells if c.variant == name}
        notify(f"{name}: weights", done, len(x.cells))
        held = session.file(name)
        plan = session.numbers_plan(name, held)
        judge = Judge(session.registry, plan, held, products)
        steps = {s.key: s for s in plan.steps}
        for key, y in _outputs(session, plan, held, device, list(cells), products.seed):
            dims, step = cells[key].dims, steps[key]
            dims.numbers_n, dims.numbers_k = step.call.n, step.call.k
            found = y if isinstance(y, str) else _judged(judge, step, y, device)
            take(cells[key], found)
            if isinstance(found, Numbers):
                judged[name, key] = found.digest
            done += 1
            notify(f"{name}: parity of {step.label}", done, len(x.cells))
    return judged


def _outputs(
    session: Session, plan: VariantPlan, held: Checkpoint, device: Device, keys: Sequence[Key], seed: int
) -> Iterator[tuple[Key, np.ndarray | str]]:
    """Each step's output, or what went wrong: from this process on the interpreter, from a child on a GPU."""
    if device.name == "cuda":
        yield from isolate.run(session, plan.name, keys, seed)
        return
    try:
        for step, y in outputs(plan, held, device, keys, seed):
            yield step.key, sentence(y) if isinstance(y, Exception) else y
    except LoadError as e:
        raise ConfigError(f"{session.where}, variant {plan.name}: {e}") from None


def _judged(judge: Judge, step: Step, y: np.ndarray, device: Device) -> Numbers | str:
    """The output's numbers; an arm of which no reference can be computed is its own fault, not the run's."""
    try:
        return judge.judge(step, y, device)
    except Exception as e:
        return sentence(e)


def take(cell: Cell, found: Numbers | str) -> None:
    """Write a step's numbers, or its failure, into its cell."""
    if isinstance(found, str):
        cell.status, cell.reason = "crashed", found
        return
    cell.parity, cell.accuracy = found.parity, found.accuracy
    cell.status = "passed" if found.parity.passed else "failed"
    cell.reason = found.parity.reason


def tool() -> dict[str, str]:
    """This package's version and those of what the numbers depend on."""
    versions = {"name": "atlas-lab", "version": metadata.version("atlas-lab")}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, Any]:
    """The host, without its name."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "byteorder": sys.byteorder,
    }
