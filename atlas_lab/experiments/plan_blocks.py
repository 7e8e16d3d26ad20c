"""Feed-forward blocks of a plan: which launches one takes by M, on which arms and kernels, equal layers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atlas_lab.core.context import Context
from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.program import PlanError
from atlas_lab.core.registry import PluginError, Registry
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.rows import Rows, merged
from atlas_lab.core.tuning import TuningError
from atlas_lab.experiments.plan import Step, block_step, ffn_routes

# Row counts whose programs are made, where they are served: all that decode and verification have, two of prefill.
ROWS = (*range(1, 17), 64, 4096)


@dataclass(frozen=True)
class BlockLaunch:
    """A launch of a block: the roles whose weights it reads and their arm, or, with no arm, what it is called; and its
    kernel's name."""

    does: str
    arm: str
    kernel: str


@dataclass(frozen=True)
class BlockLine:
    """What a block takes at the row counts `rows`: where its gated product is computed, its launches in order, and what
    levers ask for and an arm cannot do. Where there is no program, `reason` says why."""

    rows: tuple[Rows, ...]
    gated: str
    launches: tuple[BlockLaunch, ...]
    said: tuple[str, ...] = ()
    reason: str = ""

    @property
    def short(self) -> str:
        """`2 launches, gated=epilogue: nvfp4_mma_joined, nvfp4_mma`."""
        if self.reason:
            return f"no program: {self.reason}"
        arms = ", ".join(dict.fromkeys(x.arm for x in self.launches if x.arm))
        return f"{len(self.launches)} launches, gated={self.gated}: {arms}"


@dataclass(frozen=True)
class BlockGroup:
    """The blocks of equal layers."""

    layers: tuple[int, ...]
    lines: tuple[BlockLine, ...]


def ffn_blocks(routes: Sequence[Route], context: Context, registry: Registry) -> tuple[BlockGroup, ...]:
    """Every layer that has all of a feed-forward block, layers that are served alike together."""
    rows = _rows(context.rows)
    known: dict[object, tuple[BlockLine, ...]] = {}
    found: dict[tuple[BlockLine, ...], list[int]] = {}
    for gate_up, down in ffn_routes(routes):
        key = (_alike(gate_up), _alike(down))
        if key not in known:
            known[key] = tuple(_lines(gate_up, down, rows, context, registry))
        found.setdefault(known[key], []).append(gate_up.site.layer)
    return tuple(BlockGroup(tuple(layers), lines) for lines, layers in found.items())


def _rows(served: Iterable[Rows]) -> list[int]:
    """Those of ROWS that are served, and the first of each range."""
    served = tuple(served)
    return sorted({r.first for r in served} | {m for m in ROWS if any(m in r for r in served)})


def _alike(r: Route) -> object:
    """What equal layers have in common: shapes, how their weights are stored, what serves them."""
    weights = [
        (p.role, p.n, p.k, p.weight.format, p.weight.geometry, tuple(t.dtype for _, t in p.weight.fields))
        for p in r.site.projections
    ]
    return tuple(weights), tuple((a.rows, a.roles, a.arm, a.version) for a in r.assignments)


def _lines(gate_up: Route, down: Route, rows: Sequence[int], context: Context, registry: Registry) -> list[BlockLine]:
    """Row counts with one answer together."""
    out: dict[BlockLine, list[int]] = {}
    for m in rows:
        try:
            line = _line(block_step(gate_up, down, m, context, registry))
        except (PlanError, PluginError, RouteError, TuningError) as e:
            line = BlockLine((), "", (), reason=str(e).replace(f" for M={m}", "").replace(f" M={m}", ""))
        out.setdefault(line, []).append(m)
    return [
        BlockLine(merged(Rows(m, m) for m in held), x.gated, x.launches, x.said, x.reason) for x, held in out.items()
    ]


def _line(step: Step) -> BlockLine:
    assert step.block is not None
    said = tuple(s.partition(": ")[2] for s in step.block.said)
    return BlockLine((), step.block.gated, tuple(_launch(x, step) for x in step.program.launches), said)


def _launch(x: Enqueued, step: Step) -> BlockLaunch:
    """Whose launch it is follows from the weights that it reads."""
    read = {t.name for t in x.reads}
    for a in step.assignments:
        if any(t.name in read for d in a.declarations for t in d.tensors.values()):
            return BlockLaunch("+".join(a.roles), a.arm, x.entry)
    return BlockLaunch(x.label, "", x.entry)
