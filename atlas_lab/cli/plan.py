"""`plan`: what would run, why not the rest, what it needs in memory, and what another configuration would change."""

from __future__ import annotations

from typing import Annotated

import typer

from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.cli.plan_tables import print_diff, print_explained, print_plan
from atlas_lab.experiments.configurations import Memory, Planner, parse_bytes, parse_rank
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan_diff import Diff, compare
from atlas_lab.experiments.plan_results import result_of
from atlas_lab.experiments.results import dumps
from atlas_lab.experiments.whole_model import ModelPlan


@verb(app, "plan")
def plan(
    common: Common,
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="A checkpoint's folder or file; EXPERIMENT:VARIANT; or CHECKPOINT@EXPERIMENT:VARIANT."),
    ] = None,
    experiment: Annotated[str | None, typer.Option("-e", "--experiment", help="Plan its variants instead.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What differs from this checkpoint or variant: routes, bytes, KV capacity."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="LAYER.ROLE", help="What every arm had to say to one projection.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Budget, instead of the target's memory: 141GB, 80GiB.")] = None,
    reserve: Annotated[str, typer.Option(help="Of it, for the context, libraries and activations.")] = "0",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Of the KV cache: bf16, f16, fp8.")] = "bf16",
    sequences: Annotated[int, typer.Option(help="How many are served at a time.")] = 1,
    tensor_parallel: Annotated[
        str, typer.Option("--tensor-parallel", metavar="RANK/SIZE", help="Plan one rank's slice of a checkpoint.")
    ] = "0/1",
) -> int:
    """Show which arm serves what and why, what every other arm said, memory at its steady state and peak.

    Reads headers only. Exit status 1 where rows are served by no arm, and where the weights or a page of KV cache do
    not fit the memory.
    """
    if (checkpoint is None) == (experiment is None):
        raise ConfigError("plan: found neither or both of CHECKPOINT and --experiment, expected one of them")
    budget = None if memory is None else parse_bytes("--memory", memory)
    shared = Memory(budget, parse_bytes("--reserve", reserve), kv_dtype, sequences)
    loaded = common.load()
    planner = Planner(loaded, common.said, common.registry(loaded), shared, parse_rank(tensor_parallel))
    plans, diffs = _plans(planner, checkpoint, experiment, against)
    for p in plans:
        if explain is not None:
            print_explained(p, explain, common.console)
        elif not diffs:
            print_plan(p, common.console)
    for d in diffs if explain is None else ():
        print_diff(d, common.console)
    if common.json is not None:
        common.give(dumps(result_of(plans, diffs)))
    return DONE if all(p.runs for p in plans) else SAYS_NO


def _plans(
    planner: Planner, name: str | None, experiment: str | None, against: str | None
) -> tuple[list[ModelPlan], list[Diff]]:
    if name is not None:
        mine = planner.plan(name)
        if against is None:
            return [mine], []
        base = planner.plan(against)
        return [base, mine], [compare(base, mine)]
    variants = planner.variants(experiment)
    plans = list(variants.values())
    if against is None:
        return plans, []
    base = variants[against] if against in variants else planner.plan(against)
    return plans, [compare(base, p) for p in plans if p is not base]
