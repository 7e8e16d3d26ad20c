"""Plans and their differences as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from atlas_lab.cli.plan_block_tables import print_blocks, print_changed_blocks
from atlas_lab.core.projection import HEAD
from atlas_lab.core.rows import Rows
from atlas_lab.experiments import grouping
from atlas_lab.experiments.grouping import Group, Line, span
from atlas_lab.experiments.invariant import kept_rows
from atlas_lab.experiments.plan_diff import Diff
from atlas_lab.experiments.report import megabytes, row, table
from atlas_lab.experiments.whole_model import NO_ARM, ModelPlan

GIGABYTE = 1e9
SHOWN = 12  # rows of a summary; --json has all


def print_plan(p: ModelPlan, console: Console) -> None:
    """Routes, refusals, memory, KV cache and what is not kept."""
    target = p.context.target
    levers = ", ".join(f"{n}={str(v).lower()} ({p.context.levers.origin(n)})" for n, v in p.context.levers.items())
    console.print(f"\n[bold]{escape(p.name)}[/bold] on {target.name} ({target.arch}); levers: {levers}")
    _routes(p, console)
    for line in kept_rows(p.routes):
        console.print(line, markup=False)
    print_blocks(p, console)
    _gaps(p, console)
    _refusals(p, console)
    _residency(p, console)
    _others(p, console)
    _missing(p, console)
    _memory(p, console)
    _pruned(p, console)


def print_explained(p: ModelPlan, wanted: str, console: Console) -> None:
    """What serves one projection, and every arm's verdict in words."""
    route, role = p.find(wanted)
    q = route.site[role]
    t = table(">place", "arm", "M", "verdict", "named by")
    for c in p.considered(wanted):
        place = "-" if c.rank < 0 else c.rank + 1
        together = f", with {'+'.join(c.roles)} in one call" if c.verdict and len(c.roles) > 1 else ""
        named = c.origin or "nothing: runs only where an order or pin names it"
        row(t, place, c.arm, c.rows, f"{c.verdict}{together}", named)
    served = [f"M {a.rows} by {a.arm} ({a.origin})" for a in route.of(role)]
    served += [f"M {g.rows} by none" for g in p.gaps if (g.layer, g.role) == (q.layer, role)]
    console.print(f"\n[bold]{escape(p.name)}[/bold]: {q.label}, {q.n} x {q.k} in {q.weight.format}")
    console.print(t)
    for c in p.considered(wanted):
        if c.note:
            console.print(f"{c.arm}: {c.note}", markup=False)
    console.print(f"served: {'; '.join(served)}", markup=False)


def print_diff(d: Diff, console: Console) -> None:
    """What `b` does otherwise than `a`."""
    console.print(f"\n[bold]{escape(d.b.name)}[/bold] against [bold]{escape(d.a.name)}[/bold]")
    a, b = _short(d.a.name, d.b.name)
    if d.same:
        console.print("no difference: the same arms serve the same rows, in as many bytes")
        return
    if d.changed:
        t = table("layers", "roles", "M", a, b)
        for c in d.changed:
            row(t, _layers(c.layers, c.roles), " ".join(c.roles), _rows(c.rows), _said(c.a), _said(c.b))
        console.print(t)
    else:
        console.print("routes: no difference")
    print_changed_blocks(d, (a, b), console)
    t = table("resident", f">{a} MB", f">{b} MB", ">difference MB")
    for x in d.labels:
        row(t, x.label, megabytes(x.a), megabytes(x.b), _signed(x.b - x.a))
    row(t, "steady", megabytes(d.a.load.steady), megabytes(d.b.load.steady), _signed(d.more), style="bold")
    row(t, "peak while loading", megabytes(d.a.load.peak), megabytes(d.b.load.peak), _signed(d.more_at_peak))
    if d.more_others:
        others = (megabytes(p.kept_others) for p in (d.a, d.b))
        row(t, "tensors that no projection reads", *others, _signed(d.more_others))
    console.print(t)
    console.print(f"{b} holds {_more(d.more)} {a}", markup=False)
    if d.more_tokens is not None:
        said = f"{_tokens(d.b.kv_tokens)} tokens fit, {_tokens(d.a.kv_tokens)} of {a}: {d.more_tokens:+,}"
        console.print(f"KV cache: {said}", markup=False)


def _routes(p: ModelPlan, console: Console) -> None:
    t = table("layers", "roles", "M", "arm", "because of", "reads", ">MB")
    for g in grouping.groups(p):
        where = (_layers(g.layers, g.roles), " ".join(g.roles))
        for i, line in enumerate(g.lines):
            row(t, *(where if i == 0 else ("", "")), *_line(g, line), style="" if line.arm else "red")
    console.print(t)


def _line(g: Group, x: Line) -> tuple[object, ...]:
    if not x.arm:
        return _rows(x.rows), NO_ARM, "", f"{g.format} as stored", ""
    together = f" ({'+'.join(x.together)} in one call)" if x.together else ""
    return _rows(x.rows), x.arm + together, x.origin, x.reads, megabytes(x.bytes)


def _gaps(p: ModelPlan, console: Console) -> None:
    if not p.gaps:
        return
    t = table("no arm for", "weights", "M", "because")
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for g in p.gaps:
        found.setdefault((g.format, str(g.rows), g.reason), {})[g.role] = None
    for (form, rows, reason), roles in found.items():
        row(t, " ".join(roles), form, rows, reason, style="red")
    console.print(t)
    lacking = {(g.layer, g.role) for g in p.gaps}
    count = sum(len(r.site.projections) for r in p.routes)
    console.print(
        f"[red]cannot run[/red]: {len(lacking)} of {count} projections have rows that no arm serves; their weights are "
        "counted as they are stored"
    )


def _refusals(p: ModelPlan, console: Console) -> None:
    """What arms said no; those that only find weights of other formats in one line."""
    found = grouping.refusals_in_short(p)
    if found:
        t = table("refused", "roles", "why")
        for arms, roles, why in found[:SHOWN]:
            row(t, " ".join(arms), " ".join(roles), why)
        console.print(t)
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN} more refusals (--json has all)")
    said = [(c.arm, c.verdict.code) for r in p.routes for c in r.considered]
    asked = {arm for arm, code in said if code not in ("source", "role")}
    others = dict.fromkeys(arm for arm, code in said if code == "source" and arm not in asked)
    if others:
        console.print(f"start from formats that are not here: {', '.join(others)}", markup=False)


def _residency(p: ModelPlan, console: Console) -> None:
    report = p.load.report()
    t = table("projections' weights", ">MB", ">buffers", "")
    for said, rows in (("kept", report.kept), ("freed while loading", report.freed), ("not built", report.not_built)):
        for r in rows:
            row(t, r.label, megabytes(r.bytes), r.count, said)
    console.print(t)
    more = p.load.steady - p.stored
    beside = f"; {_more(more)} the {megabytes(p.stored)} MB that are stored" if more else ""
    console.print(
        f"steady {megabytes(p.load.steady)} MB, peak {megabytes(p.load.peak)} MB while loading{beside}; "
        f"{megabytes(p.load.reads)} MB are read from the file",
        markup=False,
    )


def _others(p: ModelPlan, console: Console) -> None:
    if not p.others:
        return
    t = table("tensors that no projection reads", ">MB", ">tensors", "")
    for o in p.others:
        row(t, o.meaning, megabytes(o.bytes), o.count, "kept" if o.kept else "not loaded")
    console.print(t)


def _missing(p: ModelPlan, console: Console) -> None:
    if not p.missing:
        return
    more = f" and {len(p.missing) - SHOWN} more" if len(p.missing) > SHOWN else ""
    names = escape(", ".join(p.missing[:SHOWN]))
    console.print(f"[yellow]missing from the checkpoint, and counted nowhere[/yellow]: {names}{more}")


def _memory(p: ModelPlan, console: Console) -> None:
    c = p.context
    if not p.runs and not p.over_budget and not p.kv_tokens_each and p.whole:
        console.print("[red]does not fit[/red]: no page of KV cache is left for each sequence")
    if p.over_budget:
        others = f", {megabytes(p.kept_others)} of other tensors" if p.kept_others else ""
        console.print(
            f"[red]does not fit[/red]: {megabytes(p.load.peak)} MB at the peak{others} and {megabytes(c.reserve)} "
            f"reserved are {megabytes(p.over_budget)} MB more than the budget of {megabytes(c.memory_budget)} MB"
        )
    elif p.kv_tokens is not None:
        states = f", {megabytes(p.states)} of states" if p.states else ""
        each = f", {_tokens(p.kv_tokens_each)} each" if c.sequences > 1 else ""
        console.print(
            f"KV cache: {_tokens(p.kv_tokens)} tokens{each} of {p.kv_bytes_per_token:,} bytes ({c.kv_dtype}, pages of "
            f"{c.kv_page}) for {c.sequences} {'sequence' if c.sequences == 1 else 'sequences'}: of "
            f"{megabytes(c.memory_budget)} MB, {megabytes(p.load.steady)} are projections, "
            f"{megabytes(p.kept_others)} other tensors{states}, {megabytes(c.reserve)} reserved",
            markup=False,
        )


def _pruned(p: ModelPlan, console: Console) -> None:
    if not p.load.pruned:
        console.print("pruned: nothing, every stored weight stays")
        return
    total = sum(x.tensor.bytes for x in p.load.pruned)
    console.print(f"pruned: {len(p.load.pruned)} stored tensors, {megabytes(total)} MB, do not stay on the device")
    t = table("layers", "roles", "tensors", ">MB", ">count", "why")
    found = grouping.pruned(p)
    for x in found[:SHOWN]:
        where = (_layers(x.layers, x.roles), " ".join(x.roles), " ".join(x.fields))
        row(t, *where, megabytes(x.bytes), x.count, x.reason)
    console.print(t)
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN} more (--json has all)")


def _short(a: str, b: str) -> tuple[str, str]:
    """Paths as their last components, where those differ."""
    last = (a.rstrip("/").rpartition("/")[2], b.rstrip("/").rpartition("/")[2])
    return (a, b) if last[0] == last[1] or not all(last) else last


def _layers(layers: Sequence[int], roles: Sequence[str]) -> str:
    return "" if tuple(roles) == (HEAD,) else span(layers)


def _rows(rows: Sequence[Rows]) -> str:
    return ", ".join(map(str, rows))


def _said(served: tuple[str, str]) -> str:
    arm, reads = served
    return f"{arm}: {reads}" if reads else arm


def _signed(n: int) -> str:
    return ("+" if n > 0 else "-" if n < 0 else "") + megabytes(abs(n))


def _more(n: int) -> str:
    """`3,208.6 MB (3.21 GB) more than`."""
    if n == 0:
        return "as many bytes as"
    large = f" ({abs(n) / GIGABYTE:.2f} GB)" if abs(n) >= GIGABYTE else ""
    return f"{megabytes(abs(n))} MB{large} {'more' if n > 0 else 'less'} than"


def _tokens(n: int | None) -> str:
    return "-" if n is None else f"{n:,}"
