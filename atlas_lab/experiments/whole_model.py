"""A whole model decided from headers: its routes, the rows that no arm serves, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atlas_lab.checkpoint import Checkpoint
from atlas_lab.checkpoint.sliced import base_name
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.levers import nearest
from atlas_lab.core.projection import Site
from atlas_lab.core.registry import Registry
from atlas_lab.core.residency import LoadPlan, kv_tokens, load_plan
from atlas_lab.core.route import Assignment, Considered, Gap, Route
from atlas_lab.core.tensor import round_up
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan_blocks import BlockGroup
from atlas_lab.formats.dtypes import dtype

NO_ARM = "no arm"
LAYERS = "layers."
# Meanings of a checkpoint's tensors: of scales that arms with quantized activations read, and of what nothing does.
SCALES = ("scale of activations", "scale of the KV cache")
UNUSED = ("not used", "not supported", "unknown")


@dataclass(frozen=True)
class Other:
    """Tensors that no projection reads, by what they are for. `kept` ones stay on the device as they are stored."""

    meaning: str
    bytes: int
    count: int
    kept: bool


@dataclass(frozen=True)
class ModelPlan:
    """What `plan` shows. `routes` lack the rows of `gaps`; `load` counts the weights of those as if they were read as
    they are stored. `whole` says that the routes cover a model; of part of one nothing is said of a KV cache. `missing`
    are tensors of the model that its checkpoint lacks, and that are counted nowhere. `blocks` are what its feed-forward
    blocks take as whole programs."""

    name: str
    context: Context
    routes: tuple[Route, ...]
    gaps: tuple[Gap, ...]
    load: LoadPlan
    others: tuple[Other, ...] = ()
    whole: bool = True
    missing: tuple[str, ...] = ()
    blocks: tuple[BlockGroup, ...] = ()

    @property
    def stored(self) -> int:
        """Bytes that the projections would hold if each were read as it is stored."""
        tensors = {t.name: t for r in self.routes for p in r.site.projections for t in p.weight.tensors.values()}
        return sum(round_up(t.bytes) for t in tensors.values())

    @property
    def kept_others(self) -> int:
        return sum(o.bytes for o in self.others if o.kept)

    @property
    def states(self) -> int:
        """Bytes of the states that sequences hold whatever their length."""
        return self.context.sequences * self.context.dims.state_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.context.dims.kv_bytes_per_token(dtype(self.context.kv_dtype).bytes)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of KV cache that fit, over all sequences; None for part of a model and without a budget."""
        if not self.whole or not self.context.memory_budget:
            return None
        beside = self.context.reserve + self.kept_others + self.states
        return kv_tokens(replace(self.context, reserve=beside), self.load)

    @property
    def kv_tokens_each(self) -> int | None:
        """Tokens that each sequence may have if all have as many: whole pages of its own."""
        if self.kv_tokens is None:
            return None
        page = self.context.kv_page
        return self.kv_tokens // page // self.context.sequences * page

    @property
    def over_budget(self) -> int:
        """Bytes by which loading would exceed the memory at its peak; 0 where it fits."""
        if not self.context.memory_budget:
            return 0
        return max(0, self.load.peak + self.kept_others + self.context.reserve - self.context.memory_budget)

    @property
    def runs(self) -> bool:
        """Whether every row has an arm, the weights fit, and each sequence has at least a page of KV cache."""
        no_cache = self.kv_tokens_each == 0 and self.kv_bytes_per_token > 0
        return not (self.gaps or self.over_budget or no_cache)

    def find(self, wanted: str) -> tuple[Route, str]:
        """The route and role of `LAYER.ROLE`; raises ConfigError for a projection that the plan lacks."""
        label = wanted.removeprefix(LAYERS)
        held = {p.label.removeprefix(LAYERS): (r, p.role) for r in self.routes for p in r.site.projections}
        if label not in held:
            few = ", ".join(list(held)[:6])
            said = f"--explain {wanted}: found no such projection, expected one of {few}{nearest(label, held)}"
            raise ConfigError(said)
        return held[label]

    def considered(self, wanted: str) -> tuple[Considered, ...]:
        """What every arm had to say to `LAYER.ROLE`, in the order in which they are asked."""
        route, role = self.find(wanted)
        mine = [c for c in route.considered if role in c.roles]
        return tuple(sorted(mine, key=lambda c: (c.rank < 0, c.rank, not c.verdict)))


def plan_model(
    name: str,
    sites: Sequence[Site],
    context: Context,
    registry: Registry,
    others: Iterable[Other] = (),
    *,
    whole: bool = True,
) -> ModelPlan:
    """The plan of these sites; raises RouteError for anything wrong with them but a gap."""
    gaps: list[Gap] = []
    routes = registry.resolve_all(sites, context, gaps=gaps)
    return plan_routes(name, routes, context, gaps, others, whole=whole)


def plan_routes(
    name: str,
    routes: tuple[Route, ...],
    context: Context,
    gaps: Sequence[Gap] = (),
    others: Iterable[Other] = (),
    *,
    whole: bool = True,
) -> ModelPlan:
    """The plan of routes that were resolved before."""
    return ModelPlan(name, context, routes, tuple(gaps), load_plan(_filled(routes, gaps)), tuple(others), whole)


def _filled(routes: tuple[Route, ...], gaps: Sequence[Gap]) -> list[Route]:
    """The routes with a stand-in for each gap that reads the weight as it is stored: for counting bytes, not to run."""
    missing: dict[int, dict[str, Gap]] = {}
    for g in gaps:
        missing.setdefault(g.layer, {})[g.role] = g
    out = []
    for r in routes:
        mine = missing.get(r.site.layer, {})
        stand_ins = [
            Assignment(mine[p.role].rows, (p.role,), NO_ARM, "", "", (Bind(p.weight),))
            for p in r.site.projections
            if p.role in mine
        ]
        out.append(replace(r, assignments=(*r.assignments, *stand_ins)) if stand_ins else r)
    return out


def others_of(held: Checkpoint) -> tuple[Other, ...]:
    """What a checkpoint holds besides its projections. What the model reads is kept, as wide as kernels read it; what
    is not used, or unknown, is not loaded."""
    read = {base_name(p.tensor.name): p for p in held.parameters}
    bound = {t.name for p in held.projections for t in p.weight.tensors.values()}
    apart = {t.name for t in held.unread}
    # an embedding that is also the output head: a rank reads all of the one, and a part of the other beside it
    shared = [p.tensor for name, p in read.items() if name not in apart and p.tensor.name not in bound]
    found: dict[tuple[str, bool], list[int]] = {}
    for t in (*held.unread, *shared):
        meaning = held.model.meaning(t.name)
        p = read.get(t.name)
        if p is not None:
            size = p.tensor.elements * dtype(p.dtype).bytes
            meaning = p.role if meaning == "unknown" else meaning
        else:
            size = t.bytes
        # a family that does not describe its parameters says what it does not use
        kept = p is not None or meaning in SCALES or (not read and not meaning.endswith(UNUSED))
        found.setdefault((meaning, kept), []).append(round_up(size) if kept else size)
    made = [Other(meaning, sum(sizes), len(sizes), kept) for (meaning, kept), sizes in found.items()]
    return tuple(sorted(made, key=lambda o: (not o.kept, -o.bytes)))
