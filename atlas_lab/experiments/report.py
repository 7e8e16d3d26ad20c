"""Results as tables and sentences for people, at 100 columns; nothing is cut, long words fold."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atlas_lab.experiments.results import AbResult, Bound, Cell, Comparison, ExperimentResult

MEGABYTE = 1e6


def table(*columns: str, title: str = "") -> Table:
    """A plain table; a column whose name starts with `>` is aligned right, names of arms stay whole."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=escape(title) or None, title_justify="left")
    for name in columns:
        out.add_column(
            escape(name.removeprefix(">")),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=name == "arm",  # a name is there to be copied
        )
    return out


def row(t: Table, *values: object, style: str = "") -> None:
    t.add_row(*(escape("-" if v is None else str(v)) for v in values), style=style)


def megabytes(n: float) -> str:
    return f"{n / MEGABYTE:,.1f}" if n >= 1e5 else f"{n / MEGABYTE:.3f}"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def parity_word(c: Cell) -> str:
    """`ok 0.21`: the worst error over its bound."""
    if c.status == "crashed":
        return "crashed"
    if c.parity is None:
        return "not run"
    worst = "" if c.parity.worst is None else f" {c.parity.worst:.2f}"
    return ("ok" if c.parity.passed else "FAILED") + worst


def print_ab(result: AbResult, console: Console, name: str = "") -> None:
    """The last screen of `ab`."""
    for x in result.experiments:
        timed = any(c.time for c in x.cells)
        console.print(_timed(x) if timed else _forecast(x, str(result.target.get("name", ""))))
        _launches_without_report(x, console)
        _failures(x.cells, console)
        for note in dict.fromkeys(f"{c.variant}: {note}" for c in x.cells for note in c.notes):
            console.print(note, markup=False)
        console.print(_memory(x))
        _comparisons(x.comparisons, console, totals=timed)
        _bounds(x.require, console)
        _proven(result, x, console)


def _forecast(x: ExperimentResult, target: str) -> Table:
    t = table(
        *("variant", "role", ">M", "arm", "parity", ">SNR dB", ">MB", ">regs", ">spills"),
        f">floor us\n{target}, forecast",
    )
    for c in x.cells:
        registers, spills = _compiled(c)
        row(
            t,
            *(c.variant, _role(c, x), c.m, _arm(c), parity_word(c), _snr(c), megabytes(c.bytes), registers, spills),
            number(c.floor_us),
            style=_style(c),
        )
    return t


def _timed(x: ExperimentResult) -> Table:
    base = x.comparisons[0].a if x.comparisons else "baseline"
    t = table(*("variant", "role", ">M", "arm", "parity", ">SNR dB", ">us", f">of {base}", ">95 %", ">of ceiling"))
    compared = {(k.b, k.layer, k.role, k.m): k for k in x.comparisons}
    for c in x.cells:
        mine = compared.get((c.variant, c.layer, c.role, c.m))
        row(
            t,
            *(c.variant, _role(c, x), c.m, _arm(c), parity_word(c), _snr(c)),
            number(c.time.median_us if c.time else None, 2),
            *_ratio(mine),
            _share(c),
            style=_style(c),
        )
    return t


def _share(c: Cell) -> str:
    """Of the read rate, unless another ceiling is named."""
    if c.time is None or c.time.share is None:
        return "-"
    by = "" if c.time.bound_by == "read" else f" {c.time.bound_by}"
    return f"{100 * c.time.share:.0f} %{by}"


def _role(c: Cell, x: ExperimentResult) -> str:
    several = len({k.layer for k in x.cells}) > 1
    return (f"{c.layer}.{c.role}" if several else c.role) + (f"\n{c.gated}" if c.gated else "")


def _arm(c: Cell) -> str:
    return c.arm.replace(", ", ",\n")


def _style(c: Cell) -> str:
    return "red" if c.status in ("failed", "crashed") else ""


def _snr(c: Cell) -> str:
    if c.accuracy is None:
        return "-"
    return number(c.accuracy.snr_db) if c.accuracy.snr_db is None or c.accuracy.snr_db < 1e6 else "exact"


def _compiled(c: Cell) -> tuple[str, str]:
    known = [x for x in c.launches if x.registers is not None]
    if not known:
        return "-", "-"
    return str(max(x.registers or 0 for x in known)), str(sum(x.spills or 0 for x in known))


def _ratio(c: Comparison | None) -> tuple[str, str]:
    if c is None or c.ratio is None or c.ci95 is None:
        return "-", "-"
    return f"{c.ratio:.3f}", interval(c.ci95)


def interval(ci95: tuple[float, float]) -> str:
    return f"{ci95[0]:.3f}-{ci95[1]:.3f}"


def _launches_without_report(x: ExperimentResult, console: Console) -> None:
    reasons = dict.fromkeys(launch.not_compiled for c in x.cells for launch in c.launches if launch.not_compiled)
    for reason in reasons:
        console.print(f"not compiled: {escape(reason)}", soft_wrap=False)
    for problem in dict.fromkeys(p for c in x.cells for launch in c.launches for p in launch.problems):
        console.print(f"[yellow]compiles with a fault[/yellow]: {escape(problem)}", soft_wrap=False)


def _failures(cells: Iterable[Cell], console: Console) -> None:
    for c in cells:
        if c.status in ("failed", "crashed"):
            console.print(f"[red]{c.status}[/red]: {escape(f'{c.variant} {c.label} {c.arm}')}:")
            console.print(f"  {escape(c.reason)}")


def _memory(x: ExperimentResult) -> Table:
    t = table(
        "variant", "weights", ">steady MB", ">peak MB", "resident, full model", title="memory of these layers and roles"
    )
    for name, v in x.variants.items():
        labels = ", ".join(f"{label} {megabytes(size)}" for label, size in v.residency.labels.items())
        row(t, name, v.weights, megabytes(v.residency.steady), megabytes(v.residency.peak), labels)
    return t


def _comparisons(comparisons: Iterable[Comparison], console: Console, *, totals: bool) -> None:
    whole = [c for c in comparisons if c.role is None and c.ratio is not None]
    if totals and whole:
        t = table("time over time", ">M", ">ratio", ">95 %", "verdict", title="sum over roles and layers")
        for c in whole:
            row(t, f"{c.b} over {c.a}", c.m, *_ratio(c), c.verdict)
        console.print(t)
    same = [c for c in comparisons if c.role is not None and c.reason.startswith("same route")]
    for (a, b), group in groupby(same, key=lambda c: (c.a, c.b)):
        cells = ", ".join(f"{c.role} M={c.m}" for c in group)
        console.print(f"not compared: {escape(f'{b} and {a} resolve to the same route for {cells}')}")


def _bounds(bounds: Iterable[Bound], console: Console) -> None:
    for b in bounds:
        what = f"require {b.variant}.{b.name} {b.limit:g}"
        if b.passed is None:
            console.print(escape(f"{what}: not measured: {b.reason}"))
        else:
            word = "met" if b.passed else "[red]NOT MET[/red]"
            console.print(f"{escape(what)}: {word}, found {b.found:.4g}" + (f" ({escape(b.where)})" if b.where else ""))


def _proven(result: AbResult, x: ExperimentResult, console: Console) -> None:
    cells = x.cells
    passed = [c for c in cells if c.status == "passed"]
    where = "on the interpreter" if result.device.get("kind") == "interpreter" else f"on {result.device.get('name')}"
    sizes = ""
    if any((c.dims.n, c.dims.k) != (c.dims.numbers_n, c.dims.numbers_k) for c in cells):
        sizes = ", on small weights; bytes, registers and floors are of the full model"
    elif cells:
        sizes = ", on the full weights"
    console.print(
        f"[bold]proven[/bold] {escape(where)}: {len(passed)} of {len(cells)} cells within the bound of their arithmetic"
        f" (parity is the worst error over its bound){sizes}"
    )
    timed = [c for c in cells if c.time]
    if timed:
        blocks = min(len(c.time.blocks) for c in timed if c.time)
        console.print(
            f"[bold]measured[/bold] {escape(where)}: medians of {blocks} blocks in random order, weights rotated; "
            f"the ceiling is the read rate measured in this run, or {escape(str(result.target.get('name')))}'s rate "
            "of the math pipe that is named"
        )
    for sentence in not_proven(result, x):
        console.print(f"[bold]not proven[/bold]: {escape(sentence)}")
    console.print(f"[bold]next[/bold]: {escape(next_command(result, x))}")


def not_proven(result: AbResult, x: ExperimentResult) -> list[str]:
    """What the run leaves open, in sentences."""
    out = []
    if result.status == "partial":
        out.append("the run was interrupted; this is what was done so far")
    if result.device.get("kind") == "interpreter":
        out.append("no speed was measured: no GPU")
    failed = [c for c in x.cells if c.status in ("failed", "crashed")]
    if failed:
        out.append(f"{len(failed)} cells failed parity and were not timed")
    return out


def next_command(result: AbResult, x: ExperimentResult) -> str:
    """What to run next, and why."""
    file = f" -c {result.settings['file']}" if result.settings.get("how") == "-c" else ""
    failed = next((c for c in x.cells if c.status in ("failed", "crashed")), None)
    if failed:
        return f"atlas-lab parity {failed.arm.replace(',', '')}{file}    the same arm on awkward shapes"
    if result.device.get("kind") == "interpreter":
        return f"atlas-lab ab {x.name}{file} --device cuda    on a machine with a GPU: the same, timed"
    return f"atlas-lab plan -e {x.name}{file}    why each arm was chosen, and what was refused"
