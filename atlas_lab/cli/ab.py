"""`ab`: the main job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from atlas_lab.cli.common import DONE, INTERRUPTED, SAYS_NO, Common, app, verb
from atlas_lab.cli.progress import progress
from atlas_lab.experiments import compare, report, results
from atlas_lab.experiments.ab import run_ab
from atlas_lab.experiments.results import AbResult
from atlas_lab.experiments.session import SEED


@verb(app, "ab")
def ab(
    common: Common,
    experiment: Annotated[str | None, typer.Argument(help="An experiment of the file; without it, the first.")] = None,
    seed: Annotated[int, typer.Option(help="Of activations, order and intervals.")] = SEED,
) -> int:
    """Compare an experiment's variants: parity, accuracy, bytes and floors, and on a GPU their times.

    Exit status 1 where a cell fails parity or a `require` bound is not met.
    """
    loaded = common.load()
    registry = common.registry(loaded)
    name, x = loaded.experiment(experiment)
    common.console.print(f"experiment {name}: {len(x.variants)} variants over M {x.m}", markup=False)
    result = AbResult()
    try:
        with progress(common.alone) as notify:
            run_ab(loaded, registry, common.said, name, seed=seed, result=result, notify=notify)
    except KeyboardInterrupt:
        return _interrupted(common, result)
    report.print_ab(result, common.console)
    common.give(results.dumps(result))
    return SAYS_NO if any(compare.says_no(x) for x in result.experiments) else DONE


def _interrupted(common: Common, result: AbResult) -> int:
    """What was done so far, marked as partial."""
    said = "interrupted"
    if result.experiments:
        report.print_ab(result, common.console)
        common.give(results.dumps(result))
        if common.json is not None and not common.alone:
            said += f"; what was done so far is in {common.json}, marked partial"
    print(f"atlas-lab: {said}", file=sys.stderr)
    return INTERRUPTED
