"""Arms that only declare: what a plan keeps follows from them; none of them can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from copy_cases import projection

from atlas_lab.arms import copies
from atlas_lab.core.arm import Arm, projections_of
from atlas_lab.core.context import Context, ModelDims, Order, Pin, Preferences
from atlas_lab.core.declare import Bind
from atlas_lab.core.numbers import Accuracy, Rounded
from atlas_lab.core.projection import Site
from atlas_lab.core.resolve import Entry
from atlas_lab.core.rows import Rows, rows, rows_from
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.verdict import Verdict, yes

H200 = next(t for t in shipped_targets() if t.name == "h200")
DIMS = ModelDims("test", 64, 128, 4, attention_layers=2, kv_heads=2, head_dim=16)
FFN, QKV = ("ffn.gate", "ffn.up"), ("attn.q", "attn.k", "attn.v")


class CopyArm(Arm):
    """Declares what `declare(p, context)` says, where `can(p)` says yes."""

    tolerance = Rounded("f32", "bf16")

    def __init__(
        self,
        name: str,
        declare: Callable[[Any, Context], Sequence[Any]],
        can: Callable[[Any], Verdict] = lambda p: yes(),
        *,
        roles: Sequence[str] = ("*",),
        served: Rows = rows_from(1),
        source: str = "",
        lossy: bool = False,
    ) -> None:
        self.name, self.roles, self.rows, self.source = name, tuple(roles), served, source
        self.accuracy = Accuracy(10) if lossy else None
        self._declare, self._can = declare, can

    def eligible(self, p: Any, ctx: Context) -> Verdict:
        return self._can(p)

    def finalize(self, p: Any, ctx: Context) -> Any:
        return self._declare(p, ctx)


def members(s: Any) -> tuple[Any, ...]:
    return projections_of(s)


def bind(p: Any, ctx: Context) -> list[Bind]:
    return [Bind(q.weight, key=q.role) for q in members(p)]


def bind_and_flip(p: Any, ctx: Context) -> list[Any]:
    return [Bind(p.weight), copies.transposed_nvfp4(p)]


def by_lever(p: Any, ctx: Context) -> list[Any]:
    return [copies.int8_32(p) if ctx.levers.graph else copies.transposed_nvfp4(p)]


def whole(s: Any, ctx: Context) -> list[Any]:
    return [copies.fused(members(s))]


def parts(s: Any, ctx: Context) -> list[Any]:
    return [copies.part(members(s), p, key=p.role) for p in members(s)]


def fusable(s: Any) -> Verdict:
    return copies.can_fuse(members(s))


INPLACE = CopyArm("inplace", bind)
GROUPS = ["+".join(FFN), "+".join(QKV)]
BATCH = rows_from(17)
ARMS: list[CopyArm] = [
    CopyArm("flip", lambda p, c: [copies.transposed_nvfp4(p)], copies.can_transpose_nvfp4, served=rows_from(2)),
    CopyArm("lanes", lambda p, c: [copies.repacked_nvfp4(p)], copies.can_repack, served=rows(1, 16)),
    CopyArm("mmq", lambda p, c: [copies.block_nvfp4(p)], copies.can_block_nvfp4, served=BATCH),
    CopyArm("flip8", lambda p, c: [copies.transposed_fp8(p)], copies.can_transpose_fp8, served=BATCH),
    CopyArm("int8", lambda p, c: [copies.int8_32(p)], copies.can_int8, served=BATCH, lossy=True),
    CopyArm("q4k", lambda p, c: [copies.q4_k(p)], copies.can_q4_k, served=BATCH, lossy=True),
    CopyArm("both", bind_and_flip, copies.can_transpose_nvfp4, served=rows_from(3)),
    CopyArm("lever", by_lever, copies.can_transpose_nvfp4, served=rows(2, 64), lossy=True),
    CopyArm("fused", whole, fusable, roles=GROUPS),
    CopyArm("parts", parts, fusable, roles=GROUPS, served=BATCH),
    INPLACE,
]
NAMES = [a.name for a in ARMS]


def catalog(*arms: CopyArm) -> list[Entry]:
    return [Entry(a, "atlas-lab", "0.1", "tests", built_in=True) for a in arms or ARMS]


def context(
    *served: Rows, orders: Sequence[tuple[Rows, Sequence[str]]] = (), pins: Sequence[Pin] = (), **more: Any
) -> Context:
    given = tuple(Order("*", r, tuple(names), f"order {i}") for i, (r, names) in enumerate(orders))
    return Context(H200, DIMS, preferences=Preferences(tuple(pins), given), rows=served or (rows(1, 64),), **more)


def site(layer: int, roles: Sequence[str], n: int, k: int, *formats: str) -> Site:
    """A site whose projections are of `formats`, the last one for the rest."""
    chosen = [formats[min(i, len(formats) - 1)] for i in range(len(roles))]
    return Site(tuple(projection(r, n, k, f, layer) for r, f in zip(roles, chosen, strict=True)))
