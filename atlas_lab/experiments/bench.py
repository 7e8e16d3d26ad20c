"""Our own figures: arms at full size against their peers and the read kernel, alternated in one run on one card."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any, Protocol

from atlas_lab.core.registry import Registry
from atlas_lab.core.target import Target
from atlas_lab.experiments import bench_load, bench_peer
from atlas_lab.experiments.ab import Notify, machine, silent, tool
from atlas_lab.experiments.bench_case import BenchCase, Case, FfnCase
from atlas_lab.experiments.bench_ffn import Blocks
from atlas_lab.experiments.bench_projection import Measuring, Projections, of_more_rows, of_one_row, of_peers
from atlas_lab.experiments.bench_results import SPENT, BenchCell, BenchResult
from atlas_lab.experiments.errors import ConfigError, sentence
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.driver import INSTEAD, missing_gpu

ROUNDS = 20
WRITERS = 8


class Group(Protocol):
    """Cases that are measured together, planned when it is made."""

    cells: list[BenchCell]

    def files(self) -> dict[Hashable, Callable[[], object]]:
        """What writes each file that it reads, by what is in it; those of all groups are written before anything is
        timed."""
        ...

    def prepare(self) -> None:
        """What takes the host long and needs no device: several groups' at once, while nothing is timed."""
        ...

    def measure(self, device: Device, notify: Notify, done: int, of: int) -> None:
        """Fill the cells; `done` cases of `of` went before."""
        ...


# What measures a group, by the type of its cases.
KINDS: dict[type, Callable[[Sequence[Any], Measuring, Target], Group]] = {BenchCase: Projections, FfnCase: Blocks}


def run_bench(
    suite: str,
    cases: Sequence[Case],
    registry: Registry,
    said: Said,
    *,
    with_peers: bool,
    seed: int,
    command: str,
    result: BenchResult,
    rounds: int = ROUNDS,
    budget: float | None = None,
    kept: Callable[[], None] = lambda: None,
    notify: Notify = silent,
) -> BenchResult:
    """Measure `cases` into `result`, whose status is `partial` until the end; after `budget` seconds no other weight is
    begun, and it stays so. `kept` is called whenever there is more in it.

    Raises ConfigError without a GPU: figures are measured or they are not figures; RouteError where an arm is refused,
    before anything is measured.
    """
    require_gpu("bench", said)
    with open_device("cuda") as device:
        result.suite, result.command, result.seed = suite, command, seed
        result.tool, result.machine, result.device = tool(), machine(), device.describe()
        target = device.target
        result.target = {"name": target.name, "title": target.title, "arch": target.arch}
        with_ = Measuring(registry, said, with_peers, rounds, seed, bench_peer.Products())
        all_of = measure(cases, with_, device, result, notify, budget=budget, kept=kept)
        if suite == bench_load.SUITE:
            result.cells.append(bench_load.run_load(device, seed, notify))
    result.status = "complete" if all_of else "partial"
    return result


def require_gpu(verb: str, said: Said) -> None:
    """Raise ConfigError where a verb that measures speed has nothing to measure on."""
    if said.device == "interpreter":
        raise ConfigError(f"{verb}: found --device interpreter, expected a GPU: the interpreter's times mean nothing")
    missing = missing_gpu()
    if missing:
        raise ConfigError(f"{verb}: no speed is measured without a GPU: {missing.removesuffix(', ' + INSTEAD)}")


def measure(
    cases: Sequence[Case],
    with_: Measuring,
    device: Device,
    result: BenchResult,
    notify: Notify,
    *,
    budget: float | None = None,
    kept: Callable[[], None] = lambda: None,
) -> bool:
    """Measure cases into `result`, group by group; what fails is its group's result, settings excepted. Returns whether
    none was left for want of time."""
    groups = [
        KINDS[type(found[0])](found, with_, device.target)
        for found in (list(g) for _, g in groupby(cases, key=lambda c: (type(c), c.group)))
    ]
    notify("writing the weights", 0, len(cases))
    files = {what: write for group in groups for what, write in group.files().items()}
    for written in _at_once(list(files.values())):
        written.result()
    prepared: list[Future[object]] = []
    done, begin, late = 0, time.monotonic(), False
    for at, group in enumerate(groups):
        result.cells.extend(group.cells)
        late = late or (budget is not None and time.monotonic() - begin > budget)
        if late:
            for cell in group.cells:
                cell.reason = SPENT
            continue
        if at % WRITERS == 0:
            prepared = _at_once([g.prepare for g in groups[at : at + WRITERS]])
        try:
            prepared[at % WRITERS].result()
            group.measure(device, notify, done, len(cases))
        except ConfigError:
            raise
        except Exception as e:  # of a card, a driver or an arm: the cases before it are not lost
            _failed(group.cells, e)
        done += len(group.cells)
        kept()
    for case, cell in zip(cases, result.cells, strict=True):
        if isinstance(case, BenchCase):
            cell.must += [must for of in (of_one_row, of_peers, of_more_rows) for must in of(case, cell, result.cells)]
    return not late


def _at_once(todo: Sequence[Callable[[], object]]) -> list[Future[object]]:
    """What was done, on several cores, until nothing is left: each result or what it raised."""
    with ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as pool:
        return [pool.submit(one) for one in todo]


def _failed(cells: Sequence[BenchCell], e: Exception) -> None:
    """Put an exception to the case that was being measured: the first that has no time and was not judged wrong."""
    for cell in cells:
        if cell.ours is None and cell.status in ("passed", "not run"):
            cell.status, cell.reason = "crashed", sentence(e)
            return


def says_no(result: BenchResult) -> bool:
    """Whether a case failed parity, or what it must reach, or its peer was no yardstick."""
    failed = any(c.status in ("failed", "crashed") for c in result.cells)
    peer = any(c.peer_failed or (c.peer and c.peer.wrong) for c in result.cells)
    return failed or peer or any(not m.passed for c in result.cells for m in c.must)
