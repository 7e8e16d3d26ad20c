"""One trial of an arm: which shape, row count, stored format and values, as handles that `resolve` decides on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from atlas_lab.core.arm import Arm, required
from atlas_lab.core.context import Context, ModelDims, Pin, Preferences
from atlas_lab.core.declare import Declaration
from atlas_lab.core.levers import Levers
from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.resolve import Entry, resolve
from atlas_lab.core.route import Route
from atlas_lab.core.rows import Rows, rows_from
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.core.tuning import Choice, Setting, Table
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats import Spec, get

VALUES = ("heavy", "plain", "huge", "tiny")
# Companions as checkpoints also store them: scales in bf16, a row scale `[N]`, a tensor scale `[1]` (or `[]`).
STORED = ("", "bf16 scales", "other scale shape")


@dataclass(frozen=True)
class Case:
    """`n` is of each role, `m` the rows of x. `values` are one of VALUES, `stored` one of STORED, `levers` differ from
    the defaults, `setting` is one of the arm's where it is not to choose. Plain data:
    `Case.of(case.to_json())` is the same case."""

    arm: str
    roles: tuple[str, ...]
    m: int
    n: int
    k: int
    format: str
    seed: int = 0
    why: str = ""
    values: str = "heavy"
    stored: str = ""
    levers: tuple[tuple[str, Any], ...] = ()
    setting: Setting = ()

    @property
    def id(self) -> str:
        """Readable, and unique among the cases of an arm."""
        levers = [f"{name}={str(value).lower()}" for name, value in self.levers]
        kind = [self.values] if self.values != "heavy" else []
        parts = (self.format, "+".join(self.roles), f"m{self.m}", f"n{self.n}", f"k{self.k}")
        tuned = [f"{name}={value}" for name, value in self.setting]
        return "-".join((*parts, *kind, *self.stored.split(), *levers, *tuned)).replace(".", "_")

    def __str__(self) -> str:
        shape = f"M={self.m}, N={self.n}, K={self.k}"
        return f"{self.arm} on {self.format} {'+'.join(self.roles)}, {shape} ({self.why})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Case:
        levers = tuple((name, value) for name, value in data["levers"])
        tuned = tuple((name, value) for name, value in data.get("setting", ()))
        return cls(**{**data, "roles": tuple(data["roles"]), "levers": levers, "setting": tuned})


class _Anything(Arm):
    """Serves every site, so that `resolve` answers whatever the arm under test says."""

    name = "anything else"
    roles = ("*",)
    rows = rows_from(1)

    def finalize(self, p: Any, ctx: Context) -> list[Declaration]:
        return []


_ANYTHING = Entry(_Anything(), "", "", "", built_in=True)


def weight_source(prefix: str, case: Case) -> WeightSource:
    """The stored tensors of one projection; raises FormatError where the format cannot hold `[n, k]`."""
    f = get(case.format)
    specs = f.tensors(case.n, case.k)
    for field in ("scale", "global_scale"):
        if field in specs:
            specs[field] = _companion(specs[field], case.stored)
    fields = tuple((field, Tensor(s.dtype, s.shape, f"{prefix}.{field}")) for field, s in specs.items())
    return WeightSource(f.name, f.family, f.geometry, fields)


def _companion(spec: Spec, stored: str) -> Spec:
    if stored == "bf16 scales" and spec.dtype == "f32" and len(spec.shape) == 2:
        return Spec("bf16", spec.shape)
    if stored == "other scale shape" and spec.dtype == "f32":
        return Spec(
            "f32", {(): (1,), (1,): ()}.get(spec.shape, spec.shape[:1] if spec.shape[1:] == (1,) else spec.shape)
        )
    return spec


def site_of(case: Case) -> Site:
    """The case's projections; raises FormatError where the format cannot hold `[n, k]`."""
    label = "model.layers.0"
    return Site(
        tuple(Projection(0, role, case.n, case.k, weight_source(f"{label}.{role}", case)) for role in case.roles)
    )


def base_context(target: Target) -> Context:
    """What a parity run decides from besides its case."""
    dims = ModelDims("parity", hidden=1, intermediate=1, layers=1)
    return Context(target, dims, table=shipped_table(target.name))


def target_for(arm: Arm, target: Target) -> Target:
    """`target`, or where the arm needs other hardware the first shipped one that has it."""
    for t in (target, *shipped_targets()):
        if all(t.meets(x.needs) for x in required(arm)):
            return t
    return target


def context_of(case: Case, base: Context, *, pinned: bool = True) -> Context:
    """`base` for this case alone: its rows, its levers, its arm pinned, its setting the tuned one."""
    pins = tuple(Pin(role, case.arm, origin="parity") for role in case.roles) if pinned else ()
    levers: Levers = base.levers.with_values(dict(case.levers), "parity") if case.levers else base.levers
    table = base.table
    if case.setting:
        table = Table.of([Choice(case.arm, case.n * len(case.roles), case.k, case.setting)])
    rows = (Rows(case.m, case.m),)
    return replace(base, rows=rows, levers=levers, preferences=Preferences(pins), table=table)


def verdict_of(case: Case, arm: Arm, base: Context) -> Verdict:
    """What the one predicate says of the arm for this case; raises FormatError as `site_of`."""
    route = resolve(site_of(case), context_of(case, base, pinned=False), [entry_of(arm), _ANYTHING])
    mine = [c for c in route.considered if c.arm == arm.name]
    together = no("role", f"serves {', '.join(arm.roles)}", found="+".join(case.roles), allowed=", ".join(arm.roles))
    return next((c.verdict for c in mine if c.roles == case.roles), together)


def route_of(case: Case, arm: Arm, base: Context) -> Route:
    """The route of the case with its arm pinned; raises RouteError where the arm says no."""
    return resolve(site_of(case), context_of(case, base), [entry_of(arm)])


def entry_of(arm: Arm) -> Entry:
    return Entry(arm, "", "", "", built_in=True)
