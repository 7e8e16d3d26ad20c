"""What memory a model's weights need, and in what order it is taken and given back: one plan for the forecast and
the loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration, Derived
from atlas_lab.core.loadplan import (
    Alloc,
    Build,
    Check,
    Free,
    LoadPlan,
    Pruned,
    Report,
    Row,
    Step,
    Upload,
    rows_of,
)
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.formats.dtypes import dtype


def held_bytes(declarations: Iterable[Declaration]) -> dict[str, int]:
    """Bytes of every buffer that these declarations keep, unrounded: parts count as their whole, views as far as
    they reach."""
    out: dict[str, int] = {}
    for d in declarations:
        for t in (d if isinstance(d, Bind) else d.whole).tensors.values():
            out[t.name] = max(out.get(t.name, 0), t.offset + t.bytes)
    return out


@dataclass
class _Planner:
    """`sizes` are the bytes of stored tensors' buffers, `bound` the names of those that stay, `resident` what is
    there already."""

    sizes: dict[str, int]
    bound: set[str]
    resident: set[str] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    uploaded: set[Tensor] = field(default_factory=set)
    built: set[object] = field(default_factory=set)
    staged: dict[str, str] = field(default_factory=dict)

    def alloc(self, name: str, size: int, label: str, owner: str) -> None:
        if name not in self.resident:
            self.resident.add(name)
            self.steps.append(Alloc(name, round_up(size), label, owner))

    def upload(self, t: Tensor, label: str, owner: str) -> None:
        if t.name in self.resident and t.name not in self.sizes:
            return  # loaded before this plan
        self.alloc(t.name, self.sizes[t.name], label, owner)
        if t not in self.uploaded:
            self.uploaded.add(t)
            self.steps.append(Upload(t))

    def bind(self, d: Bind, owner: str) -> None:
        for t in d.tensors.values():
            self.upload(t, f"checkpoint {d.source.format}", owner)

    def derive(self, declared: Sequence[tuple[Derived, str]]) -> None:
        """Build each of these once. What is on the device for them alone is freed after the last of them."""
        todo: dict[object, tuple[Derived, str]] = {}
        for d, owner in declared:
            if d.identity not in self.built:
                todo.setdefault(d.identity, (d, owner))
        uses = Counter(name for d, _ in todo.values() for name in set(_staged(d)))
        for identity, (d, owner) in todo.items():
            self.built.add(identity)
            for w in d.weights if d.device is not None else ():
                for t in w.tensors.values():
                    kind = "checkpoint" if t.name in self.bound else "staged"
                    self.upload(t, f"{kind} {w.format}", owner)
            for t in d.tensors.values():
                self.alloc(t.name, t.bytes, f"derived {d.label}", owner)
            self.steps.append(Build(d, owner))
            for name in dict.fromkeys(n for n in _staged(d) if n not in self.bound):
                uses[name] -= 1
                if not uses[name]:
                    self.free(name, f"{d.label} of {owner}")

    def free(self, name: str, after: str) -> None:
        self.resident.remove(name)
        self.uploaded = {t for t in self.uploaded if t.name != name}
        self.staged[name] = after
        self.steps.append(Free(name))


def _staged(d: Derived) -> Iterator[str]:
    """Names of the stored tensors that a device build reads."""
    if d.device is not None:
        yield from (t.name for w in d.weights for t in w.tensors.values())


def _stored_bytes(declarations: Iterable[Declaration]) -> dict[str, int]:
    """Bytes of the buffers of the stored tensors that are ever on the device for these."""
    binds = [Bind(w) for d in declarations if isinstance(d, Derived) and d.device is not None for w in d.weights]
    return held_bytes([*(d for d in declarations if isinstance(d, Bind)), *binds])


def _agree(routes: Sequence[Route]) -> None:
    known: dict[str, tuple[object, Tensor, str]] = {}
    for r in routes:
        for a in r.assignments:
            for d in (d.whole for d in a.declarations if isinstance(d, Derived)):
                for t in d.tensors.values():
                    identity, tensor, arm = known.setdefault(t.name, (d.identity, t, a.arm))
                    if (identity, tensor) != (d.identity, t):
                        raise RouteError(
                            f"{r.site.label}: arms {arm} and {a.arm} declare {t.name!r} differently under one key "
                            f"{d.key!r}, expected equal sources and tensors, or parameters that tell them apart"
                        )


def load_plan(routes: Sequence[Route]) -> LoadPlan:
    """The plan that makes every tensor the routes bind resident, and nothing else.

    All values are checked before the first allocation; then, layer by layer, derived tensors are built and tensors
    bound in place uploaded. A stored tensor that no route binds is on the device at most for the builds of its layer
    that need it there, and freed after the last of them; it is listed in `pruned`. Raises RouteError where two arms
    declare different tensors or sources under one name.
    """
    _agree(routes)
    declared = [d for r in routes for d in r.declarations]
    bound = {t.name for d in declared if isinstance(d, Bind) for t in d.tensors.values()}
    plan = _Planner(_stored_bytes(declared), bound)
    weights = {p.label: p.weight for r in routes for p in r.site.projections}
    plan.steps += [Check(w, label) for label, w in weights.items()]
    for _, group in groupby(sorted(routes, key=lambda r: r.site.layer), key=lambda r: r.site.layer):
        layer = [(d, r.site.label) for r in group for d in r.declarations]
        # builds come first: what they need for a moment is gone when the rest is taken
        plan.derive([(d.whole, owner) for d, owner in layer if isinstance(d, Derived)])
        for d, owner in layer:
            if isinstance(d, Bind):
                plan.bind(d, owner)
    return LoadPlan(tuple(plan.steps), tuple(_pruned(routes, plan)), _not_built(routes, plan))


def derive_steps(d: Derived, resident: Collection[str]) -> tuple[Step, ...]:
    """Steps that build one derived weight beside what is `resident` already (buffers by name), which stays."""
    plan = _Planner({k: v for k, v in _stored_bytes([d]).items() if k not in resident}, set(resident), set(resident))
    plan.derive([(d.whole, d.owner)])
    return tuple(plan.steps)


def _pruned(routes: Sequence[Route], plan: _Planner) -> Iterator[Pruned]:
    for r in routes:
        for p in r.site.projections:
            readers = ", ".join(dict.fromkeys(a.arm for a in r.of(p.role)))
            for t in p.weight.tensors.values():
                if t.name not in plan.resident:
                    after = f"; freed after the build of {plan.staged[t.name]}" if t.name in plan.staged else ""
                    reason = f"{p.label} is served by {readers}, which reads no {t.name} in place{after}"
                    yield Pruned(t, reason)


def _not_built(routes: Sequence[Route], plan: _Planner) -> tuple[Row, ...]:
    """Derived weights that eligible arms of the orders would read, and that no route does."""
    spare = {
        d.identity: d.whole
        for r in routes
        for c in r.considered
        if c.verdict and c.rank >= 0
        for d in c.declarations
        if isinstance(d, Derived) and d.identity not in plan.built
    }
    return rows_of((f"derived {d.label}", round_up(t.bytes)) for d in spare.values() for t in d.tensors.values())


def kv_tokens(context: Context, plan: LoadPlan) -> int:
    """Tokens of KV cache that fit beside the weights, over all sequences, in whole pages; 0 without a budget."""
    per_token = context.dims.kv_bytes_per_token(dtype(context.kv_dtype).bytes)
    free = context.memory_budget - context.reserve - plan.steady
    if per_token == 0 or free <= 0:
        return 0
    return free // (per_token * context.kv_page) * context.kv_page


__all__ = [
    "Alloc",
    "Build",
    "Check",
    "Free",
    "LoadPlan",
    "Pruned",
    "Report",
    "Row",
    "Step",
    "Upload",
    "derive_steps",
    "held_bytes",
    "kv_tokens",
    "load_plan",
    "rows_of",
]
