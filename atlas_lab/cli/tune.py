"""`tune`: which settings of the arms are best on this GPU, as the table that every later run reads."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from atlas_lab.cli.common import DONE, INTERRUPTED, SAYS_NO, Common, app, check_budget, verb
from atlas_lab.cli.progress import progress
from atlas_lab.core.tuned_file import shipped_path
from atlas_lab.core.tuning import setting, spelled
from atlas_lab.experiments import results, tune_table
from atlas_lab.experiments import tune as tuning
from atlas_lab.experiments.ab import machine, tool
from atlas_lab.experiments.bench import require_gpu
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.report import number, row, table
from atlas_lab.experiments.session import SEED
from atlas_lab.experiments.tune_clock import by_graphs
from atlas_lab.experiments.tune_jobs import jobs, joints_of, shapes_of
from atlas_lab.experiments.tune_results import TuneCell, TuneResult
from atlas_lab.runtime.device import open_device


@verb(app, "tune")
def tune(
    common: Common,
    arms: Annotated[
        list[str] | None, typer.Argument(metavar="[ARM]...", help="Names or patterns; all that have settings without.")
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(metavar="PRESET|NxK|N+NxK,...", help="Weights, or several in a call, instead of six models'."),
    ] = "",
    form: Annotated[str, typer.Option("--format", help="Stored format, instead of the first an arm starts from.")] = "",
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no other shape after these.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Settings of each arm and shape that are measured.")] = tuning.TOP,
    seed: Annotated[int, typer.Option(help="Of weights, activations and order.")] = SEED,
    to: Annotated[Path | None, typer.Option(help="The table's file, instead of the package's own.")] = None,
) -> int:
    """Measure the settings of arms on this GPU, and write the best of each weight's shape into the target's table.

    What the table has of other arms and shapes stays. Exit status 1 where a setting fails parity.
    """
    require_gpu("tune", common.said)
    check_budget(budget)
    registry = common.registry(common.load())
    todo = jobs(registry, arms or [], shapes_of(shapes), form, joints_of(shapes))
    result, status = TuneResult(command=_command(arms or [], shapes, form, budget, top, seed), seed=seed), DONE
    with open_device("cuda") as device:
        path = to or _own(device.target.name)
        results.writable(path, "--to")
        before = tune_table.held(path, device.target.name)
        result.tool, result.machine, result.device = tool(), machine(), device.describe()
        result.target = device.target.name
        tuner = tuning.Tuner(registry, common.said, device, by_graphs, top, seed, before.table)
        try:
            with progress(common.alone) as notify:
                tuning.run(tuner, todo, result, budget=budget, notify=notify)
        except KeyboardInterrupt:
            print("atlas-lab: interrupted; what was done so far is kept", file=sys.stderr)
            status = INTERRUPTED
    _print(common, result)
    count = tune_table.save(path, before, result)
    said = f"written: {path}, {count} measured now" if count else f"nothing measured: {path} is as it was"
    common.console.print(said, markup=False)
    if common.json is not None:
        common.give(results.dumps(result))
    return status or (SAYS_NO if tuning.says_no(result) else DONE)


def _own(target: str) -> Path:
    """The package's own file of a target, its folder made; raises ConfigError where that cannot be."""
    path = shipped_path(target)
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{path.parent}: cannot be made: {e.strerror or e}; name a file by --to") from None
    return path


def _command(arms: list[str], shapes: str, form: str, budget: float | None, top: int, seed: int) -> str:
    given = [("--shapes", shapes), ("--format", form), ("--budget", "" if budget is None else f"{budget:g}")]
    said = [part for name, value in given if value for part in (name, value)]
    return shlex.join(["atlas-lab", "tune", *arms, *said, "--top", str(top), "--seed", str(seed)])


def _print(common: Common, result: TuneResult) -> None:
    t = table("arm", ">N x K", "best", ">us", ">of read", "the model's first", ">us", ">tried", ">of")
    for c in result.cells:
        if c.best is not None:
            best, first = c.tried[c.best], c.tried[0]
            own = "the same" if c.best == 0 else spelled(setting(**first.setting))
            mine = (spelled(setting(**best.setting)), _us(best.us), number(best.of_read, 3))
            row(t, c.arm, c.shape, *mine, own, _us(first.us), len(c.tried), c.legal)
    common.console.print(t)
    for c in result.cells:
        if c.status != "tuned":
            common.console.print(f"{_word(c)}: {c.arm} {c.shape}: {c.reason or 'not reached'}", markup=False)
        elif c.legal == 1:
            common.console.print(f"one setting: {c.arm} {c.shape}: nothing to choose, its times are kept", markup=False)


def _us(times: dict[int, float]) -> str:
    return ", ".join(f"M={m} {us:.2f}" for m, us in times.items())


def _word(c: TuneCell) -> str:
    return c.status.upper() if c.status in ("failed", "crashed") else c.status
