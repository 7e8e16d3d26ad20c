"""What an experiment would run, decided before anything runs: routes, load plans, programs, bytes, floors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atlas_lab.core.call import Call
from atlas_lab.core.candidate import raised_in
from atlas_lab.core.context import Context, ModelDims
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.program import PlanError, program_of, projection_call
from atlas_lab.core.projection import Projection, Site, label_of
from atlas_lab.core.registry import PluginError, Registry
from atlas_lab.core.residency import LoadPlan, load_plan
from atlas_lab.core.route import Assignment, Route
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments.config import Loaded, Variant
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.settings import Said, levers_for, preferences_for


@dataclass(frozen=True)
class Step:
    """One cell's work: what serves some projections of a layer for `m` rows, and its program."""

    layer: int
    roles: tuple[str, ...]
    m: int
    projections: tuple[Projection, ...]
    assignment: Assignment
    call: Call
    program: Program

    @property
    def role(self) -> str:
        return "+".join(self.roles)

    @property
    def label(self) -> str:
        return f"{label_of(self.layer, *self.roles)} M={self.m}"

    @property
    def key(self) -> tuple[int, str, int]:
        return (self.layer, self.role, self.m)


@dataclass(frozen=True)
class VariantPlan:
    """A variant's routes over the experiment's sites, its load plan, and a step for every role and M."""

    name: str
    weights: str
    context: Context
    routes: tuple[Route, ...]
    load: LoadPlan
    steps: tuple[Step, ...]

    def step(self, key: tuple[int, str, int]) -> Step | None:
        return next((s for s in self.steps if s.key == key), None)


def context_for(
    loaded: Loaded | None,
    said: Said,
    target: Target,
    dims: ModelDims,
    rows: Sequence[int],
    name: str = "",
    variant: Variant | None = None,
) -> Context:
    """What a variant's routes are decided from: levers, pins and orders by precedence, exactly these row counts."""
    return Context(
        target=target,
        dims=dims,
        levers=levers_for(loaded, said, target, variant),
        preferences=preferences_for(loaded, name, variant),
        rows=tuple(Rows(m, m) for m in sorted(rows)),
        memory_budget=int(target.memory.value),
        table=shipped_table(target.name),
    )


def plan_variant(
    name: str, weights: str, sites: Sequence[Site], context: Context, rows: Sequence[int], registry: Registry
) -> VariantPlan:
    """Routes, load plan and programs of a variant over `sites`; raises RouteError, PlanError, LaunchError."""
    routes = registry.resolve_all(sites, context)
    steps = []
    for r in routes:
        found = [s for m in rows for s in _steps(r, m, context, registry)]
        steps += sorted(found, key=lambda s: r.site.roles.index(s.roles[0]))
    return VariantPlan(name, weights, context, routes, load_plan(routes), tuple(steps))


def _steps(route: Route, m: int, context: Context, registry: Registry) -> list[Step]:
    out = []
    for a in route.assignments:
        if m in a.rows:
            members = tuple(route.site[role] for role in a.roles)
            call = projection_call(members, a, m, context)
            out.append(Step(route.site.layer, a.roles, m, members, a, call, _program(call, a, registry)))
    return out


def _program(call: Call, a: Assignment, registry: Registry) -> Program:
    """The arm's program; what a third party's `lower` raises becomes a PluginError that names it."""
    entry = next(e for e in registry.entries if e.arm.name == a.arm)
    try:
        return program_of(entry.arm, call)
    except PlanError:
        raise
    except (Exception, SystemExit) as e:
        if entry.built_in:
            raise
        said = (
            f"arm {a.arm} of {entry.distribution or entry.where}: lower for M={call.m} raised {type(e).__name__}: {e}"
        )
        raise PluginError(f"{said} ({raised_in(entry.arm, e)})") from e


def same_route(a: Step, b: Step) -> bool:
    """Whether two steps launch the same kernels over the same layout of weights: comparing them would show noise.

    What put the arm there does not matter, nor which values the weights have.
    """

    def reads(s: Step) -> object:
        formats = [d.source.format if isinstance(d, Bind) else d.label for d in s.assignment.declarations]
        return (s.assignment.arm, s.assignment.version, s.roles, formats, s.call.context.levers.graph)

    def runs(s: Step) -> object:
        return [
            (x.kernel, x.grid, x.block, x.cluster, x.shared, [_shape(a) for a in x.args]) for x in s.program.launches
        ]

    return reads(a) == reads(b) and runs(a) == runs(b)


def _shape(a: object) -> object:
    """A launch argument without the name of its buffer."""
    if isinstance(a, TensorMap):
        return _shape(a.view), a.box, a.swizzle, a.promotion
    return (a.dtype, a.shape, a.strides, a.offset) if isinstance(a, Tensor) else a


def program_floor(target: Target, program: Program) -> tuple[float | None, str]:
    """Seconds that no such program runs faster than, and what bounds it (`read` or a math pipe): the larger of its
    bytes over the read rate and its operations over their pipes' rates. None, with a sentence, for a pipe without a
    figure."""
    return floor_of(target, program.traffic, program.launches)


def floor_of(target: Target, nbytes: int, launches: Sequence[Launch]) -> tuple[float | None, str]:
    """As `program_floor`, of launches that move `nbytes` in all."""
    read = target.floor(nbytes, 0, "")
    math = 0.0
    for x in launches:
        if x.flops and x.pipe not in target.math:
            return None, f"target {target.name} has no rate of pipe {x.pipe}"
        math += x.flops / target.math[x.pipe].value if x.flops else 0.0
    heaviest = max(launches, key=lambda x: x.flops, default=None)
    return (math, heaviest.pipe) if heaviest is not None and math > read else (read, "read")


def agree(full: VariantPlan, small: VariantPlan, where: str) -> None:
    """Raise ConfigError where the numbers' sizes would be served by another arm than the full model's."""
    for s in full.steps:
        other = small.step(s.key)
        found = other.assignment.arm if other else "no single arm"
        if other is None or found != s.assignment.arm:
            k, small_k = s.projections[0].k, small.routes[0].site.k if other is None else other.projections[0].k
            raise ConfigError(
                f"{where}, variant {full.name}: {s.label}: found {found} at the interpreter's sizes (K={small_k}), "
                f"expected {s.assignment.arm} as for the full model (K={k}); choose sizes that it serves"
            )
