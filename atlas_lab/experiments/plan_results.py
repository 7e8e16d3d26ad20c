"""The answer of `plan` as versioned data: `atlas-lab.plan/1`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from atlas_lab.core.residency import Row
from atlas_lab.core.rows import Rows
from atlas_lab.experiments import grouping
from atlas_lab.experiments.plan_blocks import BlockLine
from atlas_lab.experiments.plan_diff import Diff
from atlas_lab.experiments.results import Part, read
from atlas_lab.experiments.whole_model import ModelPlan

PLAN = "atlas-lab.plan/1"

Range = tuple[int, int]


class LineResult(Part):
    """What serves `rows`; `arm` is null where none does, `together` the roles it serves in one call."""

    rows: list[Range]
    arm: str | None
    together: list[str]
    origin: str
    reads: str
    bytes: int


class GroupResult(Part):
    """Projections of equal layers that are served alike, and the bytes that are resident for them."""

    layers: list[int]
    roles: list[str]
    format: str
    served: list[LineResult]
    resident: int


class BlockLaunchResult(Part):
    """A launch of a block: the roles whose weights it reads and their arm, or with no arm what it is called; and its
    kernel."""

    does: str
    arm: str | None
    kernel: str


class BlockLineResult(Part):
    """A feed-forward block as one program: what it takes at these rows, each planned by itself; where there is none,
    `reason` says why. `said` is what levers ask for and an arm cannot do."""

    rows: list[Range]
    gated: str
    launches: list[BlockLaunchResult]
    said: list[str]
    reason: str


class BlockResult(Part):
    """The feed-forward blocks of equal layers."""

    layers: list[int]
    programs: list[BlockLineResult]


class GapResult(Part):
    """Rows of a projection that no arm serves, and what every arm said."""

    layer: int
    role: str
    rows: Range
    format: str
    reason: str


class RefusalResult(Part):
    """Why an arm serves these roles of these layers nowhere."""

    layers: list[int]
    roles: list[str]
    arm: str
    code: str
    sentence: str
    found: list[str]
    allowed: str


class LabelResult(Part):
    """A row of a ledger."""

    label: str
    bytes: int
    count: int


class ResidencyResult(Part):
    """Bytes of the projections' weights: after loading and at its peak, by label; `stored` is what they would hold if
    each were read as it is stored, `reads` what is read from the file."""

    steady: int
    peak: int
    stored: int
    reads: int
    labels: dict[str, int]
    kept: list[LabelResult]
    freed: list[LabelResult]
    not_built: list[LabelResult]


class MemoryResult(Part):
    """What the weights share the card with, in bytes: `others` are the model's other tensors, `states` what sequences
    hold whatever their length."""

    budget: int
    reserve: int
    others: int
    states: int
    sequences: int
    kv_dtype: str
    kv_page: int
    kv_bytes_per_token: int


class OtherResult(Part):
    """Tensors that no projection reads, by what they are for; those that are not `kept` are not loaded."""

    meaning: str
    bytes: int
    count: int
    kept: bool


class PrunedResult(Part):
    """A stored tensor that does not stay on the device."""

    tensor: str
    bytes: int
    reason: str


class PlannedModel(Part):
    """One configuration. `kv_tokens` is null for part of a model; `missing` are tensors that its checkpoint lacks."""

    name: str
    target: str
    levers: dict[str, Any]
    groups: list[GroupResult]
    gaps: list[GapResult]
    routes: list[dict[str, Any]]
    refused: list[RefusalResult]
    residency: ResidencyResult
    memory: MemoryResult
    others: list[OtherResult]
    kv_tokens: int | None
    kv_tokens_each: int | None
    over_budget: int
    pruned: list[PrunedResult]
    missing: list[str] = Field(default_factory=list)
    activation: str = ""
    activation_limit: float = 0.0
    blocks: list[BlockResult] = Field(default_factory=list)


class ChangedResult(Part):
    """Rows that two configurations serve otherwise: the arm, and what it reads."""

    layers: list[int]
    roles: list[str]
    rows: list[Range]
    arms: tuple[str, str]
    reads: tuple[str, str]


class ChangedBlockResult(Part):
    """Rows at which two configurations compute feed-forward blocks otherwise, in short."""

    layers: list[int]
    rows: list[Range]
    programs: tuple[str, str]


class DiffResult(Part):
    """Configuration `b` against `a`: `more` bytes in the steady state and at the peak, and KV tokens."""

    a: str
    b: str
    same: bool
    changed: list[ChangedResult]
    labels: dict[str, tuple[int, int]]
    more: int
    more_at_peak: int
    more_tokens: int | None
    blocks: list[ChangedBlockResult] = Field(default_factory=list)


class PlanResult(Part):
    """A whole answer."""

    schema_: Literal["atlas-lab.plan/1"] = Field(default="atlas-lab.plan/1", alias="schema")
    plans: list[PlannedModel]
    diffs: list[DiffResult]


def read_plan(path: Path) -> PlanResult:
    """A file that `plan --json` wrote; raises ConfigError where it cannot be read or is of another schema."""
    return read(path, PlanResult, PLAN)


def result_of(plans: Iterable[ModelPlan], diffs: Iterable[Diff] = ()) -> PlanResult:
    """Plans and what differs between them, as data."""
    return PlanResult(plans=[_planned(p) for p in plans], diffs=[_diff(d) for d in diffs])


def _planned(p: ModelPlan) -> PlannedModel:
    context = p.context
    return PlannedModel(
        name=p.name,
        target=context.target.name,
        levers=dict(context.levers.items()),
        groups=[_group(g) for g in grouping.groups(p)],
        gaps=[
            GapResult(layer=g.layer, role=g.role, rows=_range(g.rows), format=g.format, reason=g.reason) for g in p.gaps
        ],
        routes=[{**r.to_json(), "hash": r.hash} for r in p.routes],
        refused=[_refusal(x) for x in grouping.refusals(p)],
        residency=_residency(p),
        memory=MemoryResult(
            budget=context.memory_budget,
            reserve=context.reserve,
            others=p.kept_others,
            states=p.states,
            sequences=context.sequences,
            kv_dtype=context.kv_dtype,
            kv_page=context.kv_page,
            kv_bytes_per_token=p.kv_bytes_per_token,
        ),
        others=[OtherResult(meaning=o.meaning, bytes=o.bytes, count=o.count, kept=o.kept) for o in p.others],
        kv_tokens=p.kv_tokens,
        kv_tokens_each=p.kv_tokens_each,
        over_budget=p.over_budget,
        pruned=[PrunedResult(tensor=x.tensor.name, bytes=x.tensor.bytes, reason=x.reason) for x in p.load.pruned],
        missing=list(p.missing),
        activation=context.dims.activation,
        activation_limit=context.dims.activation_limit,
        blocks=[BlockResult(layers=list(b.layers), programs=[_program(x) for x in b.lines]) for b in p.blocks],
    )


def _residency(p: ModelPlan) -> ResidencyResult:
    report = p.load.report()
    return ResidencyResult(
        steady=p.load.steady,
        peak=p.load.peak,
        stored=p.stored,
        reads=p.load.reads,
        labels={r.label: r.bytes for r in report.kept},
        kept=_labels(report.kept),
        freed=_labels(report.freed),
        not_built=_labels(report.not_built),
    )


def _labels(rows: Iterable[Row]) -> list[LabelResult]:
    return [LabelResult(label=r.label, bytes=r.bytes, count=r.count) for r in rows]


def _group(g: grouping.Group) -> GroupResult:
    lines = [
        LineResult(
            rows=[_range(r) for r in x.rows],
            arm=x.arm or None,
            together=list(x.together),
            origin=x.origin,
            reads=x.reads,
            bytes=x.bytes,
        )
        for x in g.lines
    ]
    return GroupResult(layers=list(g.layers), roles=list(g.roles), format=g.format, served=lines, resident=g.resident)


def _program(x: BlockLine) -> BlockLineResult:
    launches = [BlockLaunchResult(does=y.does, arm=y.arm or None, kernel=y.kernel) for y in x.launches]
    rows = [_range(r) for r in x.rows]
    return BlockLineResult(rows=rows, gated=x.gated, launches=launches, said=list(x.said), reason=x.reason)


def _refusal(x: grouping.Refusal) -> RefusalResult:
    return RefusalResult(
        layers=list(x.layers),
        roles=list(x.roles),
        arm=x.arm,
        code=x.code,
        sentence=x.sentence,
        found=list(x.found),
        allowed=x.allowed,
    )


def _diff(d: Diff) -> DiffResult:
    changed = [
        ChangedResult(
            layers=list(c.layers),
            roles=list(c.roles),
            rows=[_range(r) for r in c.rows],
            arms=(c.a[0], c.b[0]),
            reads=(c.a[1], c.b[1]),
        )
        for c in d.changed
    ]
    return DiffResult(
        a=d.a.name,
        b=d.b.name,
        same=d.same,
        changed=changed,
        labels={x.label: (x.a, x.b) for x in d.labels},
        more=d.more,
        more_at_peak=d.more_at_peak,
        more_tokens=d.more_tokens,
        blocks=[
            ChangedBlockResult(layers=list(c.layers), rows=[_range(r) for r in c.rows], programs=(c.a, c.b))
            for c in d.blocks
        ],
    )


def _range(r: Rows) -> Range:
    return (r.first, r.last)
