"""`parity`: arms on awkward shapes and values, the same checks as pytest's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.cli.progress import progress
from atlas_lab.core.arm import Arm
from atlas_lab.core.registry import Registry
from atlas_lab.experiments.ab import machine, tool
from atlas_lab.experiments.cases import Budget
from atlas_lab.experiments.checks import Check, checks_of, run_check
from atlas_lab.experiments.config import Loaded
from atlas_lab.experiments.parity import ParityResult
from atlas_lab.experiments.parity_child import run_isolated
from atlas_lab.experiments.report import number, row, table
from atlas_lab.experiments.results import clean
from atlas_lab.experiments.settings import chosen_arms, from_here
from atlas_lab.runtime.device import Device, open_device

Found = tuple[Check, ParityResult]


@verb(app, "parity")
def parity(
    common: Common,
    arms: Annotated[
        list[str] | None, typer.Argument(metavar="[ARM]...", help="Names or patterns; all without.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="A row for every check.")] = False,
) -> int:
    """Check arms: outputs against float64 of their own arithmetic, refusals, bytes, builds, tolerances, machine code.

    On a GPU in child processes. Exit status 1 where a check fails.
    """
    loaded = common.load()
    registry = common.registry(loaded)
    chosen = chosen_arms(registry, arms or ["*"])
    found: list[Found] = []
    with open_device(common.device) as device, progress(common.alone) as notify:
        budget: Budget = "gpu" if device.name == "cuda" else "interpreter"
        listed = {a.name: checks_of(a, device.target, budget, registry.formats) for a in chosen}
        count = sum(map(len, listed.values()))
        told = device.describe()
        for a in chosen:
            for one in _run(common, loaded, registry, a, listed[a.name], device):
                found.append(one)
                notify(f"{a.name}: {one[0].id}", len(found), count)
    _print(common, chosen, found, verbose)
    answer = {
        "schema": "atlas-lab.parity/1",
        "tool": tool(),
        "machine": machine(),
        "device": told,
        "checks": [{**c.to_json(), "id": c.id, "result": r.to_json()} for c, r in found],
    }
    common.give(json.dumps(clean(answer), indent=1) + "\n")
    return SAYS_NO if any(not r.ok and not r.skipped for _, r in found) else DONE


def _run(
    common: Common, loaded: Loaded, registry: Registry, arm: Arm, checks: Sequence[Check], device: Device
) -> Iterator[Found]:
    """In order; on a GPU what touches it runs in children."""
    peers = {e.arm.name: e.arm for e in registry.entries}
    away = device.name == "cuda"
    for check in checks:
        if not (away and check.on_device):
            yield check, run_check(check, arm, device, peers)
    if away:
        base = loaded.base.resolve()
        plugins = [*loaded.config.plugins, *from_here(common.plugins)]
        yield from run_isolated(arm.name, [c for c in checks if c.on_device], plugins, base, device=device.name)


def _print(common: Common, chosen: Sequence[Arm], found: Sequence[Found], verbose: bool) -> None:
    if verbose:
        t = table("arm", "check", "", ">of bound", ">SNR dB")
        for c, r in found:
            row(t, c.arm, c.id, _word(r), number(r.worst, 2), number(r.snr_db), style=_style(r))
        common.console.print(t)
    t = table("arm", ">checks", ">passed", ">failed", ">not run", ">worst of bound")
    for a in chosen:
        mine = [(c, r) for c, r in found if c.arm == a.name]
        worst = max((r.worst for c, r in mine if c.kind == "parity" and r.worst is not None), default=None)
        row(
            t,
            *(a.name, len(mine), _count(mine, _passed), _count(mine, _failed), _count(mine, lambda r: r.skipped)),
            number(worst, 2),
        )
    common.console.print(t)
    for c, r in found:
        if _failed(r):
            common.console.print(f"[red]failed[/red]: {c.arm} {c.id}: {c.case or ''}")
            common.console.print(f"  {r.sentence}", markup=False)
    for sentence in dict.fromkeys(r.sentence for _, r in found if r.skipped):
        common.console.print(f"not run: {sentence}", markup=False)


def _count(found: Sequence[Found], wanted: Callable[[ParityResult], Any]) -> int:
    return sum(bool(wanted(r)) for _, r in found)


def _passed(r: ParityResult) -> bool:
    return r.ok


def _failed(r: ParityResult) -> bool:
    return not r.ok and not r.skipped


def _word(r: ParityResult) -> str:
    return "ok" if r.ok else "not run" if r.skipped else "FAILED"


def _style(r: ParityResult) -> str:
    return "red" if _failed(r) else ""
