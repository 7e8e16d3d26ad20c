"""`plan`: what would run, why not the rest, and what it needs in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from atlas_lab.checkpoint import open_checkpoint
from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.core.context import Context
from atlas_lab.core.registry import Registry
from atlas_lab.experiments.config import Loaded
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.explain import Explained, explained, span
from atlas_lab.experiments.report import megabytes, row, table
from atlas_lab.experiments.session import open_session, target_for
from atlas_lab.experiments.settings import levers_for, preferences_for

PRUNED_SHOWN = 6


@verb(app, "plan")
def plan(
    common: Common,
    checkpoint: Annotated[Path | None, typer.Argument(help="A checkpoint's folder or file.")] = None,
    experiment: Annotated[str | None, typer.Option("-e", "--experiment", help="Plan its variants instead.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="LAYER.ROLE", help="What every arm had to say to one projection.")
    ] = None,
) -> int:
    """Show which arm serves what and why, what every other arm said, memory at its steady state and peak.

    Reads headers only. Exit status 1 where the weights do not fit the target's memory.
    """
    if (checkpoint is None) == (experiment is None):
        raise ConfigError("plan: found neither or both of CHECKPOINT and --experiment, expected one of them")
    loaded = common.load()
    registry = common.registry(loaded)
    plans = list(_plans(common, loaded, registry, checkpoint, experiment))
    for p in plans:
        if explain is not None:
            _explain(p, explain, common.console)
        else:
            _print(p, common.console)
    common.give(json.dumps({"schema": "atlas-lab.plan/1", "plans": [p.to_json() for p in plans]}, indent=1) + "\n")
    return SAYS_NO if any(p.over_budget for p in plans) else DONE


def _plans(
    common: Common, loaded: Loaded, registry: Registry, path: Path | None, experiment: str | None
) -> Iterator[Explained]:
    if path is None:
        session = open_session(loaded, common.said, registry, experiment)
        for name, p in session.plans.items():
            yield explained(f"{session.name}: {name}", p.context, p.routes, whole=False)
        return
    held = open_checkpoint(path, registry.models or None)
    target = target_for(loaded, registry)
    context = Context(
        target=target,
        dims=held.dims,
        levers=levers_for(loaded, common.said, target),
        preferences=preferences_for(loaded),
        memory_budget=int(target.memory.value),
    )
    yield explained(str(path), context, (registry.resolve(s, context) for s in held.sites))


def _print(p: Explained, console: Console) -> None:
    target = p.context.target
    levers = ", ".join(f"{n}={str(v).lower()} ({p.context.levers.origin(n)})" for n, v in p.context.levers.items())
    console.print(f"\n[bold]{p.name}[/bold] on {target.name} ({target.arch}); levers: {levers}")
    t = table("layers", "roles", "M", "arm", "because of", "reads")
    for s in p.served:
        row(t, span(s.layers), " ".join(s.roles), s.rows, s.arm, s.origin, s.reads)
    console.print(t)
    _refusals(p, console)
    t = table("resident", ">MB", ">buffers")
    for r in p.load.ledger():
        row(t, r.label, megabytes(r.bytes), r.count)
    console.print(t)
    budget = megabytes(p.context.memory_budget)
    console.print(
        f"steady {megabytes(p.load.steady)} MB, peak {megabytes(p.load.peak)} MB while loading, of {budget} MB; "
        f"{megabytes(p.load.reads)} MB are read from the file"
    )
    if p.over_budget:
        console.print(f"[red]does not fit[/red]: {megabytes(p.over_budget)} MB more than {target.title} has")
    elif p.whole and p.kv_tokens:
        console.print(
            f"KV cache: {p.kv_tokens:,} tokens fit beside these weights ({p.context.kv_dtype}, pages of "
            f"{p.context.kv_page}; nothing set aside for activations and the context)"
        )
    _pruned(p, console)


def _refusals(p: Explained, console: Console) -> None:
    """What arms said no; those that start from another stored format in one line."""
    others = dict.fromkeys(x.arm for x in p.refused if x.code == "source")
    rest = [x for x in p.refused if x.code != "source"]
    if rest:
        t = table("layers", "roles", "refused", "why")
        for x in rest:
            row(t, span(x.layers), " ".join(x.roles), x.arm, x.sentence)
        console.print(t)
    if others:
        console.print(f"start from other stored formats: {', '.join(others)}", markup=False)


def _pruned(p: Explained, console: Console) -> None:
    if not p.load.pruned:
        console.print("pruned: nothing, every stored weight is read in place")
        return
    total = sum(x.tensor.bytes for x in p.load.pruned)
    console.print(f"pruned: {len(p.load.pruned)} stored tensors, {megabytes(total)} MB, never uploaded")
    for x in p.load.pruned[:PRUNED_SHOWN]:
        console.print(f"  {x.tensor}: {x.reason}", markup=False)
    if len(p.load.pruned) > PRUNED_SHOWN:
        console.print(f"  and {len(p.load.pruned) - PRUNED_SHOWN} more (--json has all)")


def _explain(p: Explained, wanted: str, console: Console) -> None:
    t = table(">place", "arm", "M", "verdict", "named by")
    for c in p.considered(wanted):
        place = "-" if c.rank < 0 else c.rank + 1
        row(t, place, c.arm, c.rows, c.verdict, c.origin or "nothing: runs only where an order or pin names it")
    console.print(f"\n[bold]{p.name}[/bold]: layers.{wanted.removeprefix('layers.')}")
    console.print(t)
