"""What the arms of class T share: tensor cores (mma.sync), weights as the operand of 16 rows, 1 to 16 rows of x."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from atlas_lab.arms.mma.forms import NARROW, Form, Launched
from atlas_lab.core.arm import Arm, projections_of
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.chip import QUARTERS, Work, ranked
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Declaration, Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows
from atlas_lab.core.target import Target
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.tuning import Setting, chosen
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.gemv.abreast import BLOCK, CHUNK, CHUNKS, ROW, abreast_bytes
from atlas_lab.kernels.gemv.cluster import cluster_bytes
from atlas_lab.kernels.gemv.columns import TILE, finish_bytes
from atlas_lab.kernels.gemv.kept import kept_bytes
from atlas_lab.kernels.lang import Kernel

REGISTERS = 65536  # of an SM
MOST_REGISTERS = 248  # of a thread, in units of 8
PAIRS, GATES = ("pair", "pair clamp"), ("gate", "gate clamp")
JOINED = ("ffn.gate+ffn.up", "attn.q+attn.k+attn.v", "gdn.qkv+gdn.z")
MOST_BLOCKS = 32  # of an SM at once
UNKEPT_DEPTH = 2  # units in flight where a form keeps x and a kernel of it does not


class Mma(Arm):
    """Each weight byte is read once; sums in FP32, warp by warp over units of K, then the warps in order. A row's bits
    depend on N, K and the setting, never on M.

    An instance serves single projections, or with `joined` those of a site that share x, in one launch over their own
    weights.
    """

    rows = rows(1, 16)
    family: Callable[..., Kernel]
    unit: int
    """Bytes of a warp's ring for 16 rows of one unit."""
    span: int
    """K of a unit."""
    weight_bytes: float
    """A weight, scales included."""
    issue: float
    """Warp instructions a byte of weights, about: what the chip model orders settings by."""
    forms: Sequence[Form]
    caps: Mapping[tuple[int, int], int]
    """Registers a thread by columns of 8 rows of x and row tiles, which say how many blocks share an SM."""
    apart: int = 8
    """Registers a thread that a joined kernel needs beside `caps`."""
    pair_apart: int = 0
    """The same of one whose tiles are gate and up."""
    gate_caps: Mapping[int, int] = MappingProxyType({})
    """The same of kernels that make their own gated product, by columns; empty: there are none."""
    tiles: int = 1
    """Row tiles of a block where x has at most 8 rows."""
    ragged: bool = False
    """Whether the kernels take blocks of one tile after those of several."""
    variants: Sequence[Mapping[str, Any]] = (MappingProxyType({}),)
    """Other compile-time parameters, one mapping a way that weights are stored; `variant` picks one."""

    def __init__(self, name: str, *, joined: bool = False) -> None:
        self.name, self.joined = name, joined
        self.roles = JOINED if joined else ("*",)
        self.first_on = () if joined else self.first_on
        self.epilogues = ("activation", "limit") if joined else ()
        self.prologues = (*KINDS, "limit") if self.gate_caps and not joined else ()
        plain = tuple(dict.fromkeys(self._made([""])))
        apart = [k for k in plain if _apart(dict(k.spec.parameters))]
        self.kernels = tuple(k for k in plain if k not in apart)
        more = [*(PAIRS if joined else ()), *(GATES if self.prologues else ())]
        self.optional_kernels = tuple(dict.fromkeys([*apart, *self._made(more)]))

    def _made(self, ways: Sequence[str]) -> Iterator[Kernel]:
        for variant in self.variants:
            for form in self._served(whole=variant.get("whole", True)):
                for m in (1, NARROW + 1):
                    for way in ways:
                        for turns in (True, False) if form.abreast and not way else (True,):
                            yield self._kernel(form, m, variant, way, turns)

    def _served(self, *, whole: bool) -> Sequence[Form]:
        """Those that serve; where K is not in whole units, the first. Where projections border on each other it is two
        of one block and at most two row tiles, which end where projections do."""
        ending = [f for f in self.forms if f.wide_tiles <= 2 and not f.alone][:2]
        served = ending if self.joined else self.forms
        return served if whole else served[:1]

    def _kernel(self, form: Form, m: int, variant: Mapping[str, Any], way: str, turns: bool = True) -> Kernel:
        """`way` is empty, or one of PAIRS or GATES; `turns` as in `Launched`."""
        pair, gate = "pair" in way, "gate" in way
        one = self._launched(form, m, way)
        apart = self.pair_apart if pair else self.apart if self.joined else 0
        cap = self.gate_caps[one.columns] if gate else self.cap(one.columns, one.tiles, variant) + apart
        cap = cap_of_one(one.own) if one.fills else cap
        more = {"joined": self.joined and not pair, "pair": pair, "gate": gate, "clamp": "clamp" in way}
        return type(self).family(
            warps=one.warps,
            depth=one.depth,
            tiles=one.tiles,
            columns=one.columns,
            blocks=_resident(cap, one.own),
            cluster=one.cluster,
            **{name: n for name, n in (("kept", one.kept), ("abreast", one.abreast)) if n},
            **({"turns": False} if one.abreast and not turns else {}),
            **{name: True for name, value in more.items() if value},
            **variant,
        )

    def settings(self, n: int, k: int, target: Target) -> Sequence[Setting]:
        """In the model's order; those of which an SM has one block, whose cost it does not know, come last: only a
        tuned table chooses them."""
        served = [f for f in self._served(whole=k % self.span == 0) if self._runs(f, k, target)]
        served = [f for f in served if f.units in (0, k / self.span)]
        known = [f for f in served if not f.alone]
        return [
            s
            for forms in (known, [f for f in served if f.alone])
            for s in ranked(((form.setting, self._work(form, n, k, target.sms)) for form in forms), target)
        ]

    def _runs(self, form: Form, k: int, target: Target) -> bool:
        """Whether a card has what the form's kernels need, and the shared memory for either number of columns."""
        return (not form.abreast or k <= CHUNK * CHUNKS) and all(
            target.meets(self._kernel(form, m, self.variants[0], "").needs)
            and self._shared(self._launched(form, m), k) <= target.shared_per_block
            for m in (1, NARROW + 1)
        )

    def _work(self, form: Form, n: int, k: int, sms: int) -> Work:
        one = self._launched(form, 1)
        registers = self.cap(one.columns, one.tiles, self.variants[0]) + (self.apart if self.joined else 0)
        return Work(
            bytes=max(1, int(n * k * self.weight_bytes)),
            blocks=self._blocks(n, one, sms)[0] * one.cluster,
            threads=32 * one.own,
            registers=cap_of_one(one.own) if one.fills else registers,
            in_flight=one.depth * TILE * self.span * self.weight_bytes / 32,
            issue=self.issue,
            shared=self._shared(one, k),
        )

    def _shared(self, one: Launched, k: int) -> int:
        """Dynamic shared memory of a block, bytes: the warps' rings, then their sums in its place."""
        if one.abreast:
            return abreast_bytes(one.warps, one.abreast, one.columns, k, one.turns)
        ring = one.depth * one.tiles * self.unit
        if one.kept:
            return kept_bytes(one.warps, one.depth, one.columns, self.unit, one.cluster)
        if one.cluster > 1:
            return cluster_bytes(one.cluster, one.warps, one.columns, one.tiles, ring)
        return max(one.warps * ring, finish_bytes(one.warps, one.columns, one.tiles))

    def _launched(self, form: Form, m: int, way: str = "") -> Launched:
        """What serves m rows of x: a pair is two tiles, a gated product is made for one; whatever is not plain runs in
        one block and loads x, and has the same bits there."""
        if way:
            form = self._plain(form)
        pair, gate = "pair" in way, "gate" in way
        if m <= NARROW:
            tiles = 2 if pair else 1 if form.kept or form.abreast else self.tiles
            return Launched(form.warps, form.depth, tiles, 1, form.cluster, form.kept, form.abreast)
        tiles = 2 if pair else 1 if gate or form.wide_kept else form.wide_tiles
        return Launched(form.warps, form.wide_depth, tiles, 2, form.wide_cluster, form.wide_kept, form.abreast)

    def _plain(self, form: Form) -> Form:
        """One of one block that loads x, and of the same bits."""
        if not form.units and not form.abreast:
            return form._replace(cluster=1, wide_cluster=1)
        through = [f for f in self.forms if f.warps == form.warps and not f.units and not f.abreast]
        alike = [f._replace(cluster=1, wide_cluster=1) for f in through]
        return next(iter(alike), Form(form.warps, UNKEPT_DEPTH, UNKEPT_DEPTH, 1))

    # what a format says

    def cap(self, columns: int, tiles: int, variant: Mapping[str, Any]) -> int:
        """Registers a thread of a kernel."""
        return self.caps[columns, tiles]

    def fits(self, p: Projection) -> Verdict:
        """Whether one projection's weight can be read."""
        raise NotImplementedError

    def declare(self, p: Projection, key: str) -> Declaration:
        """Its weight under a key that ends in `key`."""
        raise NotImplementedError

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        """Which of `variants` reads this weight, bound under `key`."""
        return self.variants[0]

    def operands(self, w: Fields) -> tuple[Any, ...]:
        """Kernel arguments of one projection's weight."""
        raise NotImplementedError

    def scalars(self, key: str, c: Call) -> tuple[int, ...]:
        """Kernel arguments after the activation."""
        return ()

    # what follows from it

    def eligible(self, p: Any, ctx: Context) -> Verdict:
        members = projections_of(p)
        for member in members:
            verdict = self.fits(member)
            if not verdict:
                return verdict
        return _joinable(members) if self.joined else yes()

    def finalize(self, p: Any, ctx: Context) -> list[Declaration]:
        return [self.declare(m, f" {m.role}" if self.joined else "") for m in projections_of(p)]

    def lower(self, c: Call) -> list[Launch]:
        form = Form(**dict(chosen(self, c.n, c.k, c.context)))
        (key, w), *_ = c.weights.items()
        key = key.partition(" ")[0]
        pair, gate = c.epilogue.activation, c.prologue
        limit = c.epilogue.limit if pair else c.prologue_limit
        way = "pair" if pair else "gate" if gate else ""
        way += " clamp" if limit else ""
        one = self._launched(form, c.m, way)
        one = one._replace(turns=-(-c.n // TILE) > one.abreast * c.context.target.sms)
        kernel = self._kernel(form, c.m, self.variant(w, key, c), way, one.turns)
        # of a pair c.n counts both, and y has as many columns as either
        n = c.n // 2 if pair else c.n
        weights = [self.operands(f) for f in c.weights.values()]
        weights += [weights[-1]] * (3 - len(weights))
        kind = kind_of(pair or gate, limit) if pair or gate else 0
        borders = (n, n) if pair else self._borders(c)
        grid, full = (-(-n // TILE), 0) if pair else self._blocks(n, one, c.context.target.sms)
        x = map_of_x(c, one) if one.abreast else c.x
        args = (*(a for of in weights for a in of), x, c.y, c.m, n, c.k, *borders, kind, full, *self.scalars(key, c))
        return [
            Launch(
                kernel,
                grid=grid * one.cluster,
                block=32 * one.own,
                cluster=one.cluster,
                shared=self._shared(one, c.k),
                args=args,
                flops=2 * c.m * c.n * c.k,
                pipe="mma_bf16",
                label=self.name,
            )
        ]

    def _blocks(self, n: int, one: Launched, sms: int) -> tuple[int, int]:
        """Blocks, or clusters, for n rows of weights, and how many of them take the form's row tiles: where the last
        round of those would keep few SMs busy, its tiles go to blocks of their own. Where an SM has one block, blocks
        take tiles in turn."""
        count, tiles = -(-n // TILE), one.tiles
        if one.fills:
            return min(count, max(1, sms // one.cluster)), 0
        rounds, left = divmod(count, tiles * sms)
        if not self.ragged or tiles == 1 or left > sms or rounds == 0:
            return -(-count // tiles), -(-count // tiles)
        return rounds * sms + left, rounds * sms

    def _borders(self, c: Call) -> tuple[int, int]:
        """The columns of y where the second and the third projection begin."""
        if len(c.weights) == 1:
            return c.n, c.n
        counts = [self.count(f) for f in c.weights.values()]
        return counts[0], c.n if len(counts) == 2 else counts[0] + counts[1]

    def count(self, w: Fields) -> int:
        """Rows of a weight whose projection ends where its tiles do."""
        rows: int = self.operands(w)[0].shape[0]
        return rows


def map_of_x(c: Call, one: Launched) -> TensorMap:
    """What a kernel of row tiles abreast reads x `[m, k]` by: CHUNK of K of as many rows as products have columns."""
    blocks = c.x.data.view(0, (c.k // BLOCK, c.m, BLOCK), (BLOCK, c.k, 1))
    return TensorMap(blocks, (CHUNK // BLOCK, 8 * one.columns, BLOCK), swizzle=ROW)


def _apart(parameters: Mapping[str, Any]) -> bool:
    """Whether a kernel of these is of blocks that no other shares an SM with."""
    return parameters["cluster"] > 1 or any(parameters.get(name) for name in ("kept", "abreast"))


def cap_of_one(warps: int) -> int:
    """Registers a thread where an SM has one block, of so many warps."""
    return min(MOST_REGISTERS, REGISTERS // QUARTERS // -(-warps // QUARTERS) // 32 // 8 * 8)


def _resident(cap: int, warps: int) -> int:
    """Blocks of so many warps that an SM holds at `cap` registers a thread; a quarter of it has its own registers."""
    held = QUARTERS * (REGISTERS // QUARTERS // (32 * cap))
    return min(MOST_BLOCKS, max(1, held // warps))


def one_kind(members: Iterable[Projection]) -> Verdict:
    """Whether these weights are stored alike."""
    first, *rest = members
    for p in (first, *rest):
        kinds = [
            (q.weight.format, str(q.weight.geometry), tuple(t.dtype for _, t in q.weight.fields)) for q in (first, p)
        ]
        if kinds[0] != kinds[1]:
            return no("mixed", "its weights differ in kind", found=kinds[1], allowed=kinds[0])
    return yes()


def _joinable(members: Sequence[Projection]) -> Verdict:
    """Whether these weights are of one kind, and end where tiles do."""
    verdict = one_kind(members)
    if not verdict:
        return verdict
    for p in members:
        if p.n % (2 * TILE):
            code, allowed = "n-multiple", f"{2 * TILE}, {4 * TILE}, ..."
            return no(code, f"{p.role}: N must be a multiple of two tiles", found=p.n, allowed=allowed)
    return yes()


def under(copy: Derived, key: str) -> Derived:
    """A copy under its own key and `key`, so that those of several projections are told apart."""
    return copy.part(copy.key + key, copy.dequantize, **copy.tensors) if key else copy


def ascending(k_units: int, per_unit: int, least_warps: int, most_warps: int) -> Callable[[int], int]:
    """The longest chain of additions of a sum: `per_unit` in each unit of `k_units` K that a warp takes, then warps."""
    return lambda k: per_unit * -(-k // (k_units * least_warps)) + most_warps


def rounded(depth: Callable[[int], int], extra_roundings: int) -> Rounded:
    return Rounded(accumulate="mma_bf16", out="bf16", depth=depth, extra_roundings=extra_roundings)


def class_t(order: str, promotion: int = 0) -> ReductionClass:
    """A reduction class of m16n8k16 products whose warps are chosen by N, K and target."""
    return ReductionClass("mma.m16n8k16.bf16", f"{order}, over warps by N, K and target", promotion=promotion)
