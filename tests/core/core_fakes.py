"""Small arms, sites and contexts for tests of `core`: no numbers, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atlas_lab.core.arm import Arm, projections_of
from atlas_lab.core.context import Context, ModelDims, Order, Pin, Preferences
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.resolve import Entry
from atlas_lab.core.rows import Rows, rows_from
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, yes
from atlas_lab.formats import FORMATS
from atlas_lab.kernels import lang as L

DIMS = ModelDims("test", 64, 128, 4, attention_layers=2, kv_heads=2, head_dim=16)
H200 = next(t for t in shipped_targets() if t.name == "h200")
A100 = next(t for t in shipped_targets() if t.name == "a100")


@L.kernel
def nothing(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32):
    pass


def weight(prefix: str, n: int, k: int, name: str = "bf16") -> WeightSource:
    f = FORMATS[name]
    fields = tuple((field, Tensor(s.dtype, s.shape, f"{prefix}.{field}")) for field, s in f.tensors(n, k).items())
    return WeightSource(f.name, f.family, f.geometry, fields)


def projection(role: str, layer: int = 0, n: int = 32, k: int = 64, fmt: str = "bf16") -> Projection:
    return Projection(layer, role, n, k, weight(f"model.layers.{layer}.{role}", n, k, fmt))


def site(*roles: str, layer: int = 0, n: int = 32, k: int = 64, fmt: str = "bf16") -> Site:
    return Site(tuple(projection(r, layer, n, k, fmt) for r in roles))


def context(
    *served: Rows, pins: Sequence[Pin] = (), orders: Sequence[Order] = (), target: Target = H200, **more: Any
) -> Context:
    chosen = {"rows": served} if served else {}
    return Context(target, DIMS, preferences=Preferences(tuple(pins), tuple(orders)), **chosen, **more)


class Fake(Arm):
    """An arm that binds its weights in place; every attribute can be set, `eligible` answers `verdict`."""

    tolerance = Rounded("f32", "bf16")

    def __init__(
        self,
        name: str,
        roles: Sequence[str] = ("*",),
        rows: Rows = rows_from(1),
        *,
        source: str = "bf16",
        lossy: bool = False,
        verdict: Verdict | Callable[[Any, Context], Any] = yes(),
        finalize: Callable[[Any, Context], Any] | None = None,
        kernels: Sequence[L.Kernel] = (nothing,),
        reduces: str = "",
    ) -> None:
        self.name, self.roles, self.rows, self.source, self.kernels = name, tuple(roles), rows, source, tuple(kernels)
        self.accuracy = Accuracy(30) if lossy else None
        self.reduction_class = ReductionClass("fma.f32", reduces) if reduces else None
        self._verdict, self._finalize = verdict, finalize

    def eligible(self, p: Any, ctx: Context) -> Any:
        return self._verdict(p, ctx) if callable(self._verdict) else self._verdict

    def finalize(self, p: Any, ctx: Context) -> Any:
        if self._finalize is not None:
            return self._finalize(p, ctx)
        return [Bind(q.weight, key=q.role) for q in projections_of(p)]

    def lower(self, call: Any) -> list[Launch]:
        (w,) = call.weights[call.roles[0]].values()
        return [Launch(nothing, grid=1, block=32, args=(w, call.x, call.y, call.n))]


def catalog(*arms: Arm | Entry) -> list[Entry]:
    """Entries in this order; an Arm is a built-in one."""
    return [a if isinstance(a, Entry) else Entry(a, "atlas-lab", "0.1", "atlas_lab.arms", built_in=True) for a in arms]


def third_party(arm: Arm) -> Entry:
    return Entry(arm, "somebody", "2.0", "somebody.arms")
