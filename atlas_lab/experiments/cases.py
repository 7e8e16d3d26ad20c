"""Which shapes and values an arm is tried on: awkward ones, drawn where it says yes, and one where it says no."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from typing import Literal

from atlas_lab.checkpoint.qwen35 import MODULES
from atlas_lab.core.arm import Arm, epilogue_of, is_group, kernels_of, required
from atlas_lab.core.context import Context
from atlas_lab.core.launch import Launch
from atlas_lab.core.levers import NAMES, others
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.core.verdict import Verdict
from atlas_lab.experiments.case import STORED, Case, base_context, context_of, route_of, site_of, verdict_of
from atlas_lab.formats import FORMATS, Format, FormatError
from atlas_lab.kernels.lang import Kernel

Budget = Literal["interpreter", "gpu"]
# Shapes that are asked first, the preferred N first; then N and K in whole, small ones closely.
NS = (7, 96, 128, 256, 1, 64, 192, 384, 512, 1024)
PROBES = (256, 240, 96, 384, 640, 1024, 4096, 5120, 17408, 1, 3)
KS = (*range(1, 520), *range(1025, 1160), *range(1280, 8193, 256), *range(2049, 2310), *range(5097, 5129))
MORE_NS = (*range(1, 33), 48, 64, 96, 127, 128, *range(129, 161), 192, 256, 320, 384, 512, 1024, 5119, 5120)
FULL = ((17408, 5120), (5120, 17408))
TUNED_KS = (2560, 4096, 5120, 6144, 8192)  # which have settings that smaller K lack
FEW = 16  # rows of x with which a long K is tried
LONG = "long K"
LARGEST_M: dict[Budget, int] = {"interpreter": 67, "gpu": 4099}


@dataclass(frozen=True)
class _Drawer:
    """Asks the arm about shapes of one format and one set of roles."""

    arm: Arm
    roles: tuple[str, ...]
    format: str
    base: Context

    def case(self, n: int, k: int, m: int, why: str) -> Case:
        return Case(self.arm.name, self.roles, m, n, k, self.format, why=why)

    def verdict(self, n: int, k: int, stored: str = "") -> Verdict | None:
        """None where the format itself cannot store the shape."""
        try:
            return verdict_of(replace(self.case(n, k, self.arm.rows.first, ""), stored=stored), self.arm, self.base)
        except FormatError:
            return None

    def allows(self, n: int, k: int) -> bool:
        return bool(self.verdict(n, k))


@lru_cache(maxsize=256)
def _legal(d: _Drawer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """N and K that the arm takes, ascending: K beside a fixed N, then N beside the smallest such K."""
    n = next((n for n in NS for k in PROBES if d.allows(n, k)), None)
    if n is None:
        return (), ()
    ks = tuple(k for k in sorted(set(KS)) if d.allows(n, k)) or (next(k for k in PROBES if d.allows(n, k)),)
    return tuple(x for x in MORE_NS if d.allows(x, ks[0])) or (n,), ks


def role_sets(arm: Arm) -> list[tuple[str, ...]]:
    """For each pattern of the arm, roles that it names: known ones where there are any."""
    out = []
    for pattern in arm.roles:
        parts = [next((r for r in MODULES if fnmatchcase(r, part)), _plain(part)) for part in pattern.split("+")]
        taken = dict.fromkeys(parts)
        if is_group(pattern) and len(taken) < len(parts):  # the same pattern twice: its first matches, one each
            taken = dict.fromkeys([r for r in MODULES if fnmatchcase(r, pattern.split("+")[0])][: len(parts)])
        out.append(tuple(taken))
    return list(dict.fromkeys(out))


def _plain(pattern: str) -> str:
    return "".join(c if c not in "*?[]" else "x" for c in pattern)


def cases(
    arm: Arm,
    known: Mapping[str, Format] = FORMATS,
    target: Target = shipped_targets()[0],
    budget: Budget = "interpreter",
    wanted: Set[Kernel] | None = None,
) -> tuple[Case, ...]:
    """Cases of an arm where it says yes, each with why it was drawn; empty if it says yes to nothing that was tried.

    `interpreter` draws shapes small enough for it; `gpu` adds full-size ones. Kernels that no awkward shape launches
    have cases of their own; where some are `wanted`, only those, and of formats but the first one case each is drawn.
    """
    base = base_context(target)
    sets = role_sets(arm)
    out: list[Case] = []
    full: list[Case] = []
    for i, f in enumerate(f for f in known.values() if arm.source in ("", f.family)):
        first = not out
        asked = sets if first else [sets[i % len(sets)]]
        drawn = [_drawn(_Drawer(arm, roles, f.name, base), budget, first=first) for roles in asked]
        out += _rotated(drawn) if first else list(drawn[0][: 3 if wanted is None else 1])
        if budget == "gpu":
            full += _full_size(_Drawer(arm, sets[0], f.name, base), first=first)
    out += _levers(arm, base, out)
    out += _unreached(arm, known, base, out, set(kernels_of(arm)) if wanted is None else wanted)
    return tuple({c.id: c for c in (*out, *full)}.values())


def _rotated(drawn: Sequence[Sequence[Case]]) -> list[Case]:
    """As many cases as one set of roles has, of projections and of groups, each set standing in for the others in
    turn and every one at least once."""
    out: list[Case] = []
    for group in (False, True):
        kind = [d for d in drawn if d and (len(d[0].roles) > 1) == group]
        for i in range(max(len(kind), max(map(len, kind), default=0))):
            d = kind[i % len(kind)]
            out.append(d[i % len(d)])
    return out


def _drawn(d: _Drawer, budget: Budget, *, first: bool) -> list[Case]:
    ns, ks = _legal(d)
    if not ns:
        return []
    group = FORMATS[d.format].geometry.cols if d.format in FORMATS else 0
    odd, odd_n = _awkward(ks, 64, 257), _awkward(ns, 1, 31)
    shapes = [
        (odd_n, odd, "K that no tile divides"),
        (ns[0], ks[0], "smallest N and K"),
        (_first(ns, lambda n: n > 128), _first(ks, lambda k: k >= (group or 16)), "N past 128, one group of K"),
        (_first(ns, lambda n: n >= 96), _awkward(ks, 257, 520), "several stages of K"),
    ]
    if d.arm.rows.first <= FEW:
        shapes.append((_first(ns, lambda n: n >= 2), _awkward(ks, 2048, 2310), LONG))
    shapes = [s for s in shapes if d.allows(*s[:2])]
    out = [d.case(n, k, m, why) for (n, k, why), m in zip(shapes, _row_counts(d.arm, len(shapes), budget), strict=True)]
    out = [replace(c, m=min(c.m, FEW)) if c.why == LONG else c for c in out]
    if first and out:
        n, k, _ = shapes[0]
        m = d.arm.rows.first
        wide = _awkward(ks, 128, 1280)
        out += [
            replace(d.case(n, k, m, "weights and x far from 1"), values="huge"),
            replace(d.case(n, k, m, "weights and x far from 1"), values="tiny"),
            replace(d.case(_first(ns, lambda n: n >= 48), wide, m, "accuracy on normal values"), values="plain"),
        ]
        out = [c for c in out if d.allows(c.n, c.k)]
    for stored in STORED[1:]:
        c = replace(d.case(odd_n, odd, d.arm.rows.first, f"stored with {stored}"), stored=stored)
        if d.allows(odd_n, odd) and site_of(c) != site_of(replace(c, stored="")) and d.verdict(odd_n, odd, stored):
            out.append(c)
    return out


def _row_counts(arm: Arm, count: int, budget: Budget) -> list[int]:
    """`count` row counts, the larger ones for shapes that come first: both ends of the arm's rows, ragged between."""
    first, last = arm.rows.first, min(arm.rows.last, max(LARGEST_M["interpreter"], arm.rows.first + 2))
    inside = [m for m in (3, 17, 37, first + 1) if first < m < last]
    wanted = list(dict.fromkeys([inside[0] if inside else last, last, first, *inside[1:]]))
    return [wanted[i] if i < len(wanted) else first for i in range(count)]


def _full_size(d: _Drawer, *, first: bool) -> list[Case]:
    """Shapes of a 27B model and ragged ones near them. The largest M goes with a small N: its reference is costly."""
    rows = d.arm.rows
    last = min(rows.last, LARGEST_M["gpu"])
    inside = [m for m in (16, 61, 333) if rows.first < m < last]
    (n, k), (n_down, k_down) = FULL
    out = [replace(d.case(n, k, rows.first, "full size"), values="plain")]
    ns, ks = _legal(d)
    if first and ns:
        out.append(replace(d.case(n_down, k_down, (inside or [last])[0], "full size"), values="plain"))
        odd, odd_n = _awkward(ks, 4096, 5130), _awkward(ns, 4096, 5120)
        out += [d.case(odd_n, odd, m, "full size, ragged") for m in (rows.first, *inside[1:])]
        whole = d.case(_first(ns, lambda n: n >= 1024), k, last, "largest M")
        ragged = [replace(whole, n=n, k=k) for k in (1096, 1104, 1088) for n in (1026, 1032) if d.allows(n, k)]
        wanted = launched(whole, d.arm, d.base)
        out.append(next((c for c in ragged if launched(c, d.arm, d.base) == wanted), whole))
    return [c for c in out if d.allows(c.n, c.k)]


def _awkward(values: Iterable[int], low: int, high: int) -> int:
    """Of the values above `low` up to `high`, the largest of those that 2 divides the fewest times; the first
    larger one where there is none between."""
    among = [v for v in values if low < v <= high]
    if among:
        return max(among, key=lambda v: (-(v & -v), v))
    return next((v for v in values if v > high), list(values)[-1])


def _first(values: Sequence[int], wanted: Callable[[int], bool]) -> int:
    return next((v for v in values if wanted(v)), values[-1])


def _levers(arm: Arm, base: Context, drawn: Sequence[Case]) -> Iterator[Case]:
    """One case for each lever that changes what the arm launches."""
    for c in drawn[:1]:
        for name in NAMES:
            for value in others(name, getattr(base.levers, name)):
                flipped = replace(c, levers=((name, value),), why=f"lever {name}")
                if launched(flipped, arm, base) != launched(c, arm, base):
                    yield flipped


def _unreached(
    arm: Arm, known: Mapping[str, Format], base: Context, drawn: Sequence[Case], wanted: Set[Kernel]
) -> Iterator[Case]:
    """A case for each wanted kernel that no case so far launches, where a small shape does; for optional ones, where a
    setting does that was tried for the others. Awkward shapes alone would try nothing but an arm's slowest loads:
    kernels are chosen by what divides N and K, by M, by how a weight is stored and by settings."""
    seen = {k for c in drawn for k in launched(c, arm, base)}
    left = set(arm.kernels) & wanted - seen
    flips = [(), *dict.fromkeys(c.levers for c in drawn if c.levers)]
    for c in _even(arm, known, base) if left else ():
        settings = arm.settings(c.n * len(c.roles), c.k, base.target)
        for levers, s in product(flips, settings or [()]):
            flipped = replace(c, levers=levers, setting=s)
            found = set(launched(flipped, arm, base)) & wanted - seen
            if found:
                seen |= found
                left -= found
                yield flipped
        if not left:
            break
    plain = {k for k in arm.optional_kernels if epilogue_of(k) is None}
    yield from _of_some_k(arm, known, base, plain & wanted - seen)


def _of_some_k(arm: Arm, known: Mapping[str, Format], base: Context, left: set[Kernel]) -> Iterator[Case]:
    """A case for each kernel that a setting of some K alone launches, over few rows of weights."""
    forms = [f for f in known.values() if arm.source in ("", f.family)]
    ms = dict.fromkeys(m for m in (arm.rows.first + 2, min(arm.rows.last, FEW)) if m in arm.rows)
    for f, k in product(forms, TUNED_KS if left else ()):
        d = _Drawer(arm, role_sets(arm)[0], f.name, base)
        n = next((n for n in (24, 96, 256) if d.allows(n, k)), 0)
        for s, m in product(arm.settings(n * len(d.roles), k, base.target) if n else (), ms):
            c = replace(d.case(n, k, m, "a setting of this K"), setting=s)
            found = left & set(launched(c, arm, base))
            if found:
                left -= found
                yield c


def _even(arm: Arm, known: Mapping[str, Format], base: Context) -> Iterator[Case]:
    """Small cases whose K is an odd multiple of 8, 16, 64 and 256, and whose N is even but fills no tile; more than
    one tile in each direction, more K than is in flight."""
    first = arm.rows.first
    ms = [m for m in dict.fromkeys((67, 37, 17, 3, *range(first, first + 16), arm.rows.last)) if m in arm.rows]
    ms = [m for m in ms if m <= max(LARGEST_M["interpreter"], first)]
    roles = role_sets(arm)[0]
    for f in (f for f in known.values() if arm.source in ("", f.family)):
        d = _Drawer(arm, roles, f.name, base)
        legal = [k for k in _legal(d)[1] if 256 < k <= 520] or _legal(d)[1][:1]
        even = [[k for k in legal if k % p == 0] for p in (8, 16, 64, 256)]
        for k in dict.fromkeys(_awkward(ks, 256, 520) for ks in even if ks):
            allowed = [n for n in (66, 72, 80, 96, 128, 256) if d.allows(n, k)]
            for n, stored in product(dict.fromkeys((*allowed[:1], *allowed[-1:])), STORED):
                c = replace(d.case(n, k, first, "a kernel that no other case launches"), stored=stored)
                if stored and (site_of(c) == site_of(replace(c, stored="")) or not d.verdict(n, k, stored)):
                    continue
                yield from (replace(c, m=m) for m in ms)


def none_drawn(
    arm: Arm, drawn: Sequence[Case], known: Mapping[str, Format] = FORMATS, target: Target = shipped_targets()[0]
) -> str:
    """Which of the arm's roles have no case, and what it says of a harmless shape; "" where all have one."""
    family = [f for f in known.values() if arm.source in ("", f.family)]
    if not family:
        return f"arm {arm.name} starts from {arm.source!r} weights, expected a family of {', '.join(known)}"
    for roles in role_sets(arm):
        if roles not in [c.roles for c in drawn]:
            case = Case(arm.name, roles, arm.rows.first, 256, 256, family[0].name)
            told = f"of N=256, K=256 in {family[0].name} it says: {verdict_of(case, arm, base_context(target))}"
            return f"arm {arm.name} says yes to none of the shapes tried for {'+'.join(roles)}; {told}"
    return ""


def launched(case: Case, arm: Arm, base: Context) -> tuple[Kernel, ...]:
    """The kernels of a case's program, in order; empty where it cannot be planned."""
    try:
        (a,) = route_of(case, arm, base).assignments
        call = projection_call(site_of(case).projections, a, case.m, context_of(case, base))
        call = replace(call, x=replace(call.x, format=arm.activation))
        return tuple(x.kernel for x in program_of(arm, call).launches if isinstance(x, Launch))
    except (Exception, SystemExit):  # parity of the case itself says what is wrong
        return ()


def teeth_case(arm: Arm, target: Target = shipped_targets()[0]) -> Case | None:
    """Normal values, and a K small enough for one weight to be seen: where an arm must notice what is made wrong."""
    for f in (f for f in FORMATS.values() if arm.source in ("", f.family)):
        for roles in role_sets(arm):
            d = _Drawer(arm, roles, f.name, base_context(target))
            ns, ks = _legal(d)
            if ns:
                n, k = _awkward(ns, 1, 31), _first(ks, lambda k: k >= 32)
                n = n if d.allows(n, k) else ns[0]
                return replace(d.case(n, k, arm.rows.first, "normal values, small K"), values="plain")
    return None


@dataclass(frozen=True)
class Refusal:
    """A case that an arm refuses on a card, and what it says."""

    case: Case
    verdict: Verdict
    target: Target


def refusal(arm: Arm, known: Mapping[str, Format] = FORMATS, target: Target = shipped_targets()[0]) -> Refusal | None:
    """A case that the arm's predicate, or the checks of source and hardware before it, refuses; shapes are looked at
    first, then other geometries of its family, other formats, other hardware. None if it takes everything."""
    base = base_context(target)
    roles = role_sets(arm)[0]
    family = [f for f in known.values() if arm.source in ("", f.family)]
    shapes = [(NS[0], k) for k in range(1, 258)] + [(n, 256) for n in range(1, 258)]
    tried = [(f, n, k) for f in family[:1] for n, k in shapes]
    tried += [(f, n, 256) for f in (*family, *(f for f in known.values() if f not in family)) for n in (256, 7)]
    for f, n, k in tried:
        d = _Drawer(arm, roles, f.name, base)
        verdict = d.verdict(n, k)
        if verdict is not None and not verdict and verdict.code != "error":
            return Refusal(d.case(n, k, arm.rows.first, "refused"), verdict, target)
    for t in shipped_targets():
        if not all(t.meets(x.needs) for x in required(arm)):
            d = _Drawer(arm, roles, family[0].name, base_context(t))
            verdict = d.verdict(256, 256)
            if verdict is not None and not verdict:
                return Refusal(d.case(256, 256, arm.rows.first, "refused"), verdict, t)
    return None
