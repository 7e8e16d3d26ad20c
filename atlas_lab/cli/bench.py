"""`bench`: our own figures, and the page made of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from atlas_lab.cli.common import DONE, INTERRUPTED, SAYS_NO, Common, app, check_budget, verb
from atlas_lab.cli.progress import progress
from atlas_lab.experiments import performance, results, rows_plot, suite_rows
from atlas_lab.experiments.bench import ROUNDS, run_bench, says_no
from atlas_lab.experiments.bench_results import BenchResult, read_bench
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.report import interval, number, row, table
from atlas_lab.experiments.session import SEED
from atlas_lab.experiments.stats import LEAST_BLOCKS
from atlas_lab.experiments.suites import suite as suite_named

PAGE = Path("docs/performance.md")
FOLDER = Path("benchmarks")


@verb(app, "bench")
def bench(
    common: Common,
    suite: Annotated[str, typer.Option(help="Which cases.")] = "foundation",
    only: Annotated[
        str, typer.Option(metavar="GLOB", help="Those whose name matches; the result goes to --json.")
    ] = "",
    peers: Annotated[bool, typer.Option("--peers", help="Measure what one would use instead, too.")] = False,
    rounds: Annotated[int, typer.Option(min=LEAST_BLOCKS, help="Blocks of everything that is compared.")] = ROUNDS,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no other weight after these.")] = None,
    seed: Annotated[int, typer.Option(help="Of activations, order and intervals.")] = SEED,
    render: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Measure nothing: write the page of this result.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Where --render writes.")] = PAGE,
) -> int:
    """Measure arms at full size on this GPU, against the read kernel and their peers, in one run.

    The result goes to benchmarks/SUITE.json, or to --json, which is written after every weight; of a part of the suite
    to --json alone. Exit status 1 where a case fails parity or a bound.
    """
    check_budget(budget)
    if render is not None:
        return _render(common, render, to)
    cases = suite_named(suite, only)
    registry = common.registry(common.load())
    known = {e.arm.name for e in registry.entries}
    unknown = [a for c in cases for a in c.arms if a not in known]
    if unknown:
        raise ConfigError(f"--suite {suite}: found no arm {', '.join(dict.fromkeys(unknown))}, expected it installed")
    result = BenchResult()
    status = DONE
    said = {
        "--suite": suite,
        "--only": only,
        "--rounds": str(rounds) if rounds != ROUNDS else "",
        "--budget": "" if budget is None else f"{budget:g}",
    }
    options = [f"{name} {shlex.quote(value)}" for name, value in said.items() if value]
    command = " ".join(["atlas-lab bench", *options, *(["--peers"] if peers else []), f"--seed {seed}"])
    try:
        with progress(common.alone) as notify:
            run_bench(
                suite,
                cases,
                registry,
                common.said,
                with_peers=peers,
                seed=seed,
                rounds=rounds,
                budget=budget,
                kept=lambda: common.keep(results.dumps(result)),
                command=command,
                result=result,
                notify=notify,
            )
    except KeyboardInterrupt:
        print("atlas-lab: interrupted", file=sys.stderr)
        status = INTERRUPTED
    _print(common, result)
    if result.cells:
        _give(common, suite, result, part=bool(only))
    return status or (SAYS_NO if says_no(result) else DONE)


def _render(common: Common, source: Path, to: Path) -> int:
    """The page of a result, and beside it the plot of those that have one."""
    results.writable(to, "--to")
    result, made = read_bench(source), {}
    if result.suite == suite_rows.SUITE:
        made[to.with_suffix(".svg")] = rows_plot.plot(result)
    made[to] = performance.render(result, source, next((p.name for p in made), ""))
    for path, text in made.items():
        results.write(path, text)
        common.console.print(f"written: {path}", markup=False)
    return DONE


def _give(common: Common, suite: str, result: BenchResult, part: bool) -> None:
    """To `--json`, else into benchmarks/ unless it is a part of the suite."""
    text = results.dumps(result)
    if common.json is not None:
        common.give(text)
        return
    if part:
        return
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{suite}.json"
    results.write(path, text)
    common.console.print(f"written: {path}; next: atlas-lab bench --render {path}", markup=False)


def _print(common: Common, result: BenchResult) -> None:
    t = table("arm", ">N", ">K", ">M", ">us", ">floor us", ">of floor", "peer", ">its us", ">our speed", ">95 %")
    for c in result.cells:
        peer = ("-", "-", "-", "-")
        if c.peer:
            ours = c.peer.ours
            peer = (c.peer.name, number(c.peer.time.median_us, 2), number(ours.speed, 3), interval(ours.ci95))
        us = number(c.ours.median_us if c.ours else None, 2)
        row(t, c.arm, c.n, c.k, c.m, us, number(c.floor_us, 2), number(c.share, 3), *peer, style=_style(c.status))
    common.console.print(t)
    for c in result.cells:
        if c.status in ("failed", "crashed"):
            common.console.print(f"[red]{c.status}[/red]: {c.name}: {c.reason}")
        wrong = c.peer_failed or (c.peer.wrong and f"peer {c.peer.name}: {c.peer.wrong}" if c.peer else "")
        if wrong:
            common.console.print(f"[red]no peer[/red]: {c.name}: {wrong}")
        for m in c.must:
            word = "met" if m.passed else "[red]NOT MET[/red]"
            common.console.print(f"must {m.name} {m.limit:g}: {c.name}: {word}, found {m.found:.3f}")


def _style(status: str) -> str:
    return "red" if status in ("failed", "crashed") else ""
