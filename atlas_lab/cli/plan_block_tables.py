"""Feed-forward blocks of plans as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from atlas_lab.core.rows import Rows, merged
from atlas_lab.experiments.grouping import span
from atlas_lab.experiments.plan_diff import Diff
from atlas_lab.experiments.report import row, table
from atlas_lab.experiments.whole_model import ModelPlan


def print_blocks(p: ModelPlan, console: Console) -> None:
    """A row for every launch of a block, by M: those that are named were planned one by one."""
    if not p.blocks:
        return
    t = table("layers", "M", "gated", "launches of a block", "arm", "kernel")
    for b in p.blocks:
        for i, x in enumerate(b.lines):
            head = (span(b.layers) if i == 0 else "", _rows(x.rows), x.gated)
            if x.reason:
                row(t, *head, f"no program: {x.reason}", "", "", style="red")
            for j, launch in enumerate(x.launches):
                row(t, *(head if j == 0 else ("", "", "")), launch.does, launch.arm or "-", launch.kernel)
    dims = p.context.dims
    clamped = f", inputs clamped at {dims.activation_limit:g}" if dims.activation_limit else ""
    console.print(f"feed-forward blocks, {dims.activation}{clamped}:", markup=False)
    console.print(t)
    notes: dict[str, list[Rows]] = {}
    for x in (x for b in p.blocks for x in b.lines):
        for said in x.said:
            notes.setdefault(said, []).extend(x.rows)
    for said, rows in notes.items():
        console.print(f"M {_rows(merged(rows))}: {said}", markup=False)


def print_changed_blocks(d: Diff, names: tuple[str, str], console: Console) -> None:
    """What blocks take otherwise, in short."""
    if d.blocks:
        t = table("layers", "block at M", *names)
        for c in d.blocks:
            row(t, span(c.layers), _rows(c.rows), c.a, c.b)
        console.print(t)


def _rows(rows: Sequence[Rows]) -> str:
    return ", ".join(map(str, rows))
