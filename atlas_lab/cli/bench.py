"""`bench`: our own figures, and the page made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atlas_lab.cli.common import DONE, INTERRUPTED, SAYS_NO, Common, app, verb
from atlas_lab.cli.progress import progress
from atlas_lab.experiments import performance, results
from atlas_lab.experiments.bench import run_bench, says_no
from atlas_lab.experiments.bench_results import BenchResult, read_bench
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.report import interval, number, row, table
from atlas_lab.experiments.session import SEED
from atlas_lab.experiments.suites import suite as suite_named

PAGE = Path("docs/performance.md")
FOLDER = Path("benchmarks")


@verb(app, "bench")
def bench(
    common: Common,
    suite: Annotated[str, typer.Option(help="Which cases.")] = "foundation",
    peers: Annotated[bool, typer.Option("--peers", help="Measure what one would use instead, too.")] = False,
    seed: Annotated[int, typer.Option(help="Of activations, order and intervals.")] = SEED,
    render: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Measure nothing: write the page of this result.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Where --render writes.")] = PAGE,
) -> int:
    """Measure arms at full size on this GPU, against the read kernel and their peers, in one run.

    The result goes to benchmarks/SUITE.json, or to --json. Exit status 1 where a case fails parity or a bound.
    """
    if render is not None:
        results.writable(to, "--to")
        results.write(to, performance.render(read_bench(render), render))
        common.console.print(f"written: {to}", markup=False)
        return DONE
    cases = suite_named(suite)
    registry = common.registry(common.load())
    unknown = [c.arm for c in cases if c.arm not in {e.arm.name for e in registry.entries}]
    if unknown:
        raise ConfigError(f"--suite {suite}: found no arm {', '.join(dict.fromkeys(unknown))}, expected it installed")
    result = BenchResult()
    status = DONE
    command = f"atlas-lab bench --suite {suite}{' --peers' if peers else ''} --seed {seed}"
    try:
        with progress(common.alone) as notify:
            run_bench(
                suite,
                cases,
                registry,
                common.said,
                with_peers=peers,
                seed=seed,
                command=command,
                result=result,
                notify=notify,
            )
    except KeyboardInterrupt:
        print("atlas-lab: interrupted", file=sys.stderr)
        status = INTERRUPTED
    _print(common, result)
    if result.cells:
        _give(common, suite, result)
    return status or (SAYS_NO if says_no(result) else DONE)


def _give(common: Common, suite: str, result: BenchResult) -> None:
    """To `--json`, else into benchmarks/."""
    text = results.dumps(result)
    if common.json is not None:
        common.give(text)
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
        for m in c.must:
            word = "met" if m.passed else "[red]NOT MET[/red]"
            common.console.print(f"must {m.name} {m.limit:g}: {c.name}: {word}, found {m.found:.3f}")


def _style(status: str) -> str:
    return "red" if status in ("failed", "crashed") else ""
