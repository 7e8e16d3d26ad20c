"""What an experiment would run, decided before anything runs: routes, load plans, programs, bytes, floors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atlas_lab.blocks.ffn import DOWN, FFN, GATE, UP, ffn_program, place_of, served, stages
from atlas_lab.core.call import Call, Fields, Operand
from atlas_lab.core.candidate import raised_in
from atlas_lab.core.context import Context, ModelDims
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.launch import Program
from atlas_lab.core.program import PlanError, program_of, projection_call
from atlas_lab.core.projection import Projection, Site, label_of
from atlas_lab.core.registry import PluginError, Registry
from atlas_lab.core.residency import LoadPlan, load_plan
from atlas_lab.core.route import Assignment, Route, RouteError
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.experiments.config import Loaded, Variant
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.settings import Said, levers_for, preferences_for

Made = TypeVar("Made")


@dataclass(frozen=True)
class Block:
    """What a step that is a whole gated feed-forward block is made of: its routes, where its gated product is computed,
    and a sentence for each thing that the levers ask for and an arm cannot do."""

    gate_up: Route
    down: Route
    gated: str
    said: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One cell's work: what serves some projections of a layer, or with `block` a block of them, for `m` rows, and its
    program. Weights of `call` are named by their keys, those of a block by their roles and keys."""

    layer: int
    roles: tuple[str, ...]
    m: int
    projections: tuple[Projection, ...]
    assignments: tuple[Assignment, ...]
    call: Call
    program: Program
    block: Block | None = None

    @property
    def assignment(self) -> Assignment:
        """What serves the projections of a step that is no block."""
        (only,) = self.assignments
        return only

    @property
    def arm(self) -> str:
        """The arm, or those of a block, in order."""
        return ", ".join(dict.fromkeys(a.arm for a in self.assignments))

    @property
    def origin(self) -> str:
        return ", ".join(dict.fromkeys(a.origin for a in self.assignments))

    @property
    def declarations(self) -> dict[str, tuple[Declaration, ...]]:
        """What the arms read, by what comes before its key among the weights of `call`."""
        return {_before_key(a, self.block is not None): a.declarations for a in self.assignments}

    @property
    def stages(self) -> tuple[Tensor, ...]:
        """What a block stores between its projections, which its parity is judged by too."""
        return stages(self.program) if self.block is not None else ()

    @property
    def role(self) -> str:
        return FFN if self.block is not None else "+".join(self.roles)

    @property
    def label(self) -> str:
        return f"{label_of(self.layer, self.role)} M={self.m}"

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


def _before_key(a: Assignment, block: bool) -> str:
    return "+".join(a.roles) + " " if block else ""


def plan_variant(
    name: str,
    weights: str,
    sites: Sequence[Site],
    context: Context,
    rows: Sequence[int],
    registry: Registry,
    blocks: Collection[str] = (),
) -> VariantPlan:
    """Routes, load plan and programs of a variant over `sites`; with `ffn` among `blocks` a feed-forward block is one
    step, not one for each of its projections. Raises RouteError, PlanError, LaunchError."""
    routes = registry.resolve_all(sites, context)
    pairs = {r.site: (r, down) for r, down in ffn_routes(routes)} if FFN in blocks else {}
    inside = {r.site for pair in pairs.values() for r in pair}
    if FFN in blocks:
        _whole(routes, inside)
    steps = []
    for r in routes:
        if r.site in pairs:
            steps += [block_step(*pairs[r.site], m, context, registry) for m in rows]
        elif r.site not in inside:
            found = [s for m in rows for s in _steps(r, m, context, registry)]
            steps += sorted(found, key=lambda s: r.site.roles.index(s.roles[0]))
    return VariantPlan(name, weights, context, routes, load_plan(routes), tuple(steps))


def ffn_routes(routes: Sequence[Route]) -> list[tuple[Route, Route]]:
    """The routes of gate and up and of down of every layer that has all three."""
    downs = {r.site.layer: r for r in routes if DOWN in r.site.roles}
    firsts = [r for r in routes if {GATE, UP} <= set(r.site.roles)]
    return [(r, downs[r.site.layer]) for r in firsts if r.site.layer in downs]


def _whole(routes: Sequence[Route], inside: Collection[Site]) -> None:
    """Refuse projections of blocks that lack others."""
    for r in routes:
        found = [role for role in r.site.roles if role in (GATE, UP, DOWN)]
        if found and r.site not in inside:
            label = label_of(r.site.layer, FFN)
            raise PlanError(f"{label}: found roles {', '.join(found)}, expected {GATE}, {UP} and {DOWN} for a block")


def block_step(gate_up: Route, down: Route, m: int, context: Context, registry: Registry) -> Step:
    """A whole feed-forward block for `m` rows as one step; raises RouteError, PlanError, PluginError."""
    found = served(gate_up, down, m)
    arms = {a.arm: registry.arm(a.arm) for a in found}
    program, said = _lowered(lambda: ffn_program(gate_up, down, m, context, arms), arms, m, registry)
    weights = {_before_key(a, True) + d.key: Fields(d.tensors) for a in found for d in a.declarations}
    (x,), (y,) = program.inputs, program.outputs
    call = Call((GATE, UP, DOWN), weights, Operand(x), Operand(y), m, y.shape[1], x.shape[1], context)
    projections = (gate_up.site[GATE], gate_up.site[UP], down.site[DOWN])
    block = Block(gate_up, down, place_of(program), said)
    return Step(gate_up.site.layer, call.roles, m, projections, found, call, program, block)


def _steps(route: Route, m: int, context: Context, registry: Registry) -> list[Step]:
    out = []
    for a in route.assignments:
        if m in a.rows:
            members = tuple(route.site[role] for role in a.roles)
            call = projection_call(members, a, m, context)
            out.append(Step(route.site.layer, a.roles, m, members, (a,), call, _program(call, a, registry)))
    return out


def _program(call: Call, a: Assignment, registry: Registry) -> Program:
    return _lowered(lambda: program_of(registry.arm(a.arm), call), [a.arm], call.m, registry)


def _lowered(make: Callable[[], Made], arms: Collection[str], m: int, registry: Registry) -> Made:
    """What `make` makes of these arms; what `lower` of a third party's raises becomes a PluginError that names it."""
    try:
        return make()
    except (PlanError, RouteError):
        raise
    except (Exception, SystemExit) as e:
        entry = next((e for e in registry.entries if e.arm.name in arms and not e.built_in), None)
        if entry is None:
            raise
        said = f"arm {entry.arm.name} of {entry.distribution or entry.where}: lower for M={m} raised"
        raise PluginError(f"{said} {type(e).__name__}: {e} ({raised_in(entry.arm, e)})") from e


def same_route(a: Step, b: Step) -> bool:
    """Whether two steps launch the same kernels over the same layout of weights: comparing them would show noise.

    What put the arm there does not matter, nor which values the weights have.
    """

    def reads(s: Step) -> object:
        declared = [d for a in s.assignments for d in a.declarations]
        formats = [d.source.format if isinstance(d, Bind) else d.label for d in declared]
        arms = [(a.arm, a.version, a.roles) for a in s.assignments]
        return (arms, s.roles, formats, s.call.context.levers.graph)

    def runs(s: Step) -> object:
        return [(x.form, [_shape(a) for a in x.args]) for x in s.program.launches]

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


def floor_of(target: Target, nbytes: int, launches: Sequence[Enqueued]) -> tuple[float | None, str]:
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
        found = other.arm if other else "no single arm"
        if other is None or found != s.arm:
            k, small_k = s.projections[0].k, small.routes[0].site.k if other is None else other.projections[0].k
            raise ConfigError(
                f"{where}, variant {full.name}: {s.label}: found {found} at the interpreter's sizes (K={small_k}), "
                f"expected {s.arm} as for the full model (K={k}); choose sizes that it serves"
            )
