"""What memory a model's weights need, and in what order it is taken and given back: one plan for the forecast and
the loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.formats.dtypes import dtype


@dataclass(frozen=True)
class Check:
    """Check the values of a stored weight on the host, before any device allocation."""

    weight: WeightSource
    label: str


@dataclass(frozen=True)
class Alloc:
    """Take a device buffer of `bytes`, already rounded. `label` groups rows of the ledger, `owner` is the layer's
    projection that first needed it."""

    buffer: str
    bytes: int
    label: str
    owner: str


@dataclass(frozen=True)
class Upload:
    """Copy a stored tensor into its buffer."""

    tensor: Tensor


@dataclass(frozen=True)
class Build:
    """Build a derived weight and copy its tensors into their buffers."""

    derived: Derived
    owner: str


@dataclass(frozen=True)
class Free:
    """Give a buffer back."""

    buffer: str


Step = Check | Alloc | Upload | Build | Free


@dataclass(frozen=True)
class Row:
    """One row of a ledger: bytes and count of the live buffers that share a label."""

    label: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Pruned:
    """A stored tensor that no route binds: never uploaded, or not kept."""

    tensor: Tensor
    reason: str


@dataclass(frozen=True)
class LoadPlan:
    """Steps in order. The forecast folds them, the loader executes them; sizes are rounded to 256 bytes in both."""

    steps: tuple[Step, ...]
    pruned: tuple[Pruned, ...] = ()

    @property
    def steady(self) -> int:
        """Bytes held after the last step."""
        return sum(r.bytes for r in self.ledger())

    @property
    def peak(self) -> int:
        """Most bytes held at any time."""
        held = most = 0
        sizes: dict[str, int] = {}
        for s in self.steps:
            if isinstance(s, Alloc):
                sizes[s.buffer] = s.bytes
                held += s.bytes
                most = max(most, held)
            elif isinstance(s, Free):
                held -= sizes.pop(s.buffer)
        return most

    def ledger(self) -> tuple[Row, ...]:
        """Rows by label of what stays, largest first."""
        live: dict[str, Alloc] = {}
        for s in self.steps:
            if isinstance(s, Alloc):
                live[s.buffer] = s
            elif isinstance(s, Free):
                del live[s.buffer]
        return rows_of((a.label, a.bytes) for a in live.values())

    @property
    def reads(self) -> int:
        """Bytes read from the checkpoint."""
        tensors = {t.name: t for s in self.steps if isinstance(s, Check) for t in s.weight.tensors.values()}
        return sum(t.bytes for t in tensors.values())


def rows_of(entries: Iterable[tuple[str, int]]) -> tuple[Row, ...]:
    """Ledger rows of (label, bytes) pairs, largest first."""
    totals: dict[str, tuple[int, int]] = {}
    for label, size in entries:
        held, count = totals.get(label, (0, 0))
        totals[label] = (held + size, count + 1)
    return tuple(sorted((Row(k, b, c) for k, (b, c) in totals.items()), key=lambda r: (-r.bytes, r.label)))


@dataclass
class _Planner:
    steps: list[Step] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    built: set[object] = field(default_factory=set)

    def alloc(self, t: Tensor, label: str, owner: str) -> bool:
        if t.name in self.known:
            return False
        self.known.add(t.name)
        self.steps.append(Alloc(t.name, round_up(t.bytes), label, owner))
        return True

    def bind(self, d: Bind, owner: str) -> None:
        for t in d.tensors.values():
            if self.alloc(t, f"checkpoint {d.source.format}", owner):
                self.steps.append(Upload(t))

    def derive(self, d: Derived, owner: str) -> None:
        if d.identity in self.built:
            return
        self.built.add(d.identity)
        for t in d.tensors.values():
            self.alloc(t, f"derived {d.label}", owner)
        self.steps.append(Build(d, owner))


def _agree(routes: Sequence[Route]) -> None:
    known: dict[str, tuple[object, Tensor, str]] = {}
    for r in routes:
        for a in r.assignments:
            for d in (d for d in a.declarations if isinstance(d, Derived)):
                for t in d.tensors.values():
                    identity, tensor, arm = known.setdefault(t.name, (d.identity, t, a.arm))
                    if (identity, tensor) != (d.identity, t):
                        raise RouteError(
                            f"{r.site.label}: arms {arm} and {a.arm} declare {t.name!r} differently under one key "
                            f"{d.key!r}, expected equal sources and tensors, or parameters that tell them apart"
                        )


def load_plan(routes: Sequence[Route]) -> LoadPlan:
    """The plan that makes every tensor the routes bind resident, and nothing else.

    All values are checked before the first allocation; then, layer by layer, tensors bound in place are uploaded and
    derived ones built. Derived weights are built on the host from the file, so a stored tensor that no route binds
    never reaches the device: it is listed in `pruned`. Raises RouteError where two arms declare different tensors or
    sources under one name.
    """
    _agree(routes)
    plan = _Planner()
    weights = {p.label: p.weight for r in routes for p in r.site.projections}
    plan.steps += [Check(w, label) for label, w in weights.items()]
    for r in sorted(routes, key=lambda r: r.site.layer):
        for d in r.declarations:
            if isinstance(d, Bind):
                plan.bind(d, r.site.label)
            else:
                plan.derive(d, r.site.label)
    pruned = []
    for r in routes:
        for p in r.site.projections:
            readers = ", ".join(dict.fromkeys(a.arm for a in r.of(p.role)))
            for t in p.weight.tensors.values():
                if t.name not in plan.known:
                    pruned.append(Pruned(t, f"{p.label} is served by {readers}, which reads no {t.name} in place"))
    return LoadPlan(tuple(plan.steps), tuple(pruned))


def kv_tokens(context: Context, plan: LoadPlan) -> int:
    """Tokens of KV cache that fit beside the weights, over all sequences, in whole pages; 0 without a budget."""
    per_token = context.dims.kv_bytes_per_token(dtype(context.kv_dtype).bytes)
    free = context.memory_budget - context.reserve - plan.steady
    if per_token == 0 or free <= 0:
        return 0
    return free // (per_token * context.kv_page) * context.kv_page
