"""Everything an arm is checked for, as a list of checks that pytest, the command and a child process run alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atlas_lab.core.arm import Arm, epilogue_of, kernels_of
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.library import missing_of
from atlas_lab.core.numbers import snr_db
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route, RouteError
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.experiments import oracle, parity, values
from atlas_lab.experiments.case import (
    Case,
    base_context,
    context_of,
    entry_of,
    route_of,
    site_of,
    target_for,
    verdict_of,
)
from atlas_lab.experiments.cases import Budget, cases, none_drawn, refusal, teeth_case
from atlas_lab.experiments.parity import ParityResult, declared_bytes, guarded
from atlas_lab.experiments.ran_by_models import ran_by_models
from atlas_lab.experiments.teeth import bite
from atlas_lab.formats import FORMATS, Format, get
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.lang.compile import architectures, check_kernel, compiler_missing
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Device

KINDS = ("cases", "parity", "refusal", "bytes", "build", "reduction", "teeth", "compile")
SANE_DB = 6.0  # of a derived weight against its source: half of it may be noise, not more


@dataclass(frozen=True)
class Check:
    """One thing an arm is checked for. `case` is what it is tried on, `arch` what its kernels are compiled for; where
    there is a `home`, a target's name, only those kernels are that `compiled_in` says."""

    kind: str
    arm: str
    case: Case | None = None
    arch: str = ""
    home: str = ""

    @property
    def id(self) -> str:
        """Readable, unique among the checks of an arm."""
        inside = self.arch or (self.case.id if self.case is not None and self.kind == "parity" else "")
        return f"{self.kind}-{inside}" if inside else self.kind

    @property
    def on_device(self) -> bool:
        return self.kind in ("parity", "bytes", "reduction", "teeth")

    def to_json(self) -> dict[str, Any]:
        case = None if self.case is None else self.case.to_json()
        return {"kind": self.kind, "arm": self.arm, "case": case, "arch": self.arch, "home": self.home}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Check:
        case = None if data["case"] is None else Case.of(data["case"])
        return cls(data["kind"], data["arm"], case, data["arch"], data["home"])


def checks_of(
    arm: Arm,
    target: Target,
    budget: Budget = "interpreter",
    known: Mapping[str, Format] = FORMATS,
    *,
    everywhere: bool = True,
) -> tuple[Check, ...]:
    """The checks of an arm: always the same for the same arguments. Unless `everywhere`, of the kernels that no awkward
    shape launches those are tried that models do (`ran_by_models`), and not all are compiled (`compiled_in`)."""
    target = target_for(arm, target)
    drawn = cases(arm, known, target, budget, None if everywhere else ran_by_models(arm, target, known, few=True))
    out = [Check("cases", arm.name), *(Check("parity", arm.name, c) for c in drawn), Check("refusal", arm.name)]
    if drawn:
        plain = next((c for c in drawn if c.values == "plain"), drawn[0])
        out += [Check(kind, arm.name, plain) for kind in ("bytes", "build")]
        out.append(Check("teeth", arm.name, teeth_case(arm, target)))
        if arm.reduction_class is not None:
            out.append(Check("reduction", arm.name, drawn[0]))
    archs = dict.fromkeys(a for kernel in kernels_of(arm) for a in architectures(kernel.needs))
    compiled = [Check("compile", arm.name, arch=a, home="" if everywhere else target.name) for a in archs]
    return (*out, *(c for c in compiled if compiled_in(c, arm)))


def run_check(check: Check, arm: Arm, device: Device, peers: Mapping[str, Arm] | None = None) -> ParityResult:
    """Run one check; whatever the arm does is its result, and one that runs on a GPU is skipped where a library that
    the arm calls is missing. `peers` are all arms by name."""
    missing = missing_of(arm.library_calls) if check.on_device and device.name == "cuda" else ""
    if missing:
        return ParityResult(False, f"{arm.name}: {missing}", skipped=True)
    base = base_context(target_for(arm, device.target))
    others = {arm.name: arm, **{name: p for name, p in (peers or {}).items() if name != arm.name}}
    if check.case is None:
        alone = {"cases": _cases, "refusal": _refusal, "compile": _compile}[check.kind]
        return guarded(lambda: alone(check, arm, base))
    case = check.case
    if check.kind == "parity":
        return parity.run_case(case, arm, device, base, others)
    on_case = {"bytes": _bytes, "build": _build, "reduction": _reduction, "teeth": _teeth}[check.kind]
    return guarded(lambda: on_case(case, arm, device, base, others))


def _cases(check: Check, arm: Arm, base: Context) -> ParityResult:
    missing = none_drawn(arm, cases(arm, target=base.target, wanted=frozenset()), target=base.target)
    return ParityResult(not missing, missing)


def _refusal(check: Check, arm: Arm, base: Context) -> ParityResult:
    found = refusal(arm, target=base.target)
    if found is None:
        return ParityResult(
            False, f"arm {arm.name} takes every shape, format and card that was tried, and refuses none"
        )
    try:
        route_of(found.case, arm, base_context(found.target))
    except RouteError as e:
        return ParityResult(True, str(e))
    return ParityResult(False, f"{found.case} is refused ({found.verdict}), yet a pin to it was resolved")


def compiled_in(check: Check, arm: Arm) -> tuple[Kernel, ...]:
    """The kernels that a check compiles: all that can be for its architecture. Where there is a `home`, the first of
    each family and epilogue, for an arm names those first that have the fewest registers left; for that target those
    too that models run there (`ran_by_models`), for other architectures those too that it cannot run."""
    able = [k for k in kernels_of(arm) if check.arch in architectures(k.needs)]
    if not check.home:
        return tuple(able)
    home = next(t for t in shipped_targets() if t.name == check.home)
    ran = ran_by_models(arm, home)
    firsts = set({(k.spec.family, epilogue_of(k)): k for k in reversed(able)}.values())

    def wanted(k: Kernel) -> bool:
        return k in firsts or (k in ran if check.arch == home.arch else home.arch not in architectures(k.needs))

    return tuple(k for k in able if wanted(k))


def _compile(check: Check, arm: Arm, base: Context) -> ParityResult:
    missing = compiler_missing()
    if missing is not None:
        return ParityResult(False, missing, skipped=True)
    problems = [p for kernel in compiled_in(check, arm) for p in check_kernel(kernel, check.arch)]
    return ParityResult(not problems, "; ".join(problems))


def _loaded(case: Case, arm: Arm, base: Context) -> tuple[values.Stored, Route]:
    """A case's weights, and its route for all the rows that the arm serves."""
    site = site_of(case)
    return values.Stored(case, site), resolve(site, replace(context_of(case, base), rows=(arm.rows,)), [entry_of(arm)])


def _bytes(case: Case, arm: Arm, device: Device, base: Context, peers: Mapping[str, Arm]) -> ParityResult:
    """What is declared is what the ledger holds, and the peak is what was forecast."""
    stored, route = _loaded(case, arm, base)
    declared, plan = declared_bytes(route.declarations), load_plan([route])
    with load.execute(plan, stored.read, stored.check, device) as loaded:
        found, peak = loaded.ledger.held, loaded.ledger.peak
    ok = (found, peak) == (declared, plan.peak)
    said = (
        f"found {found} bytes held and {peak} at the peak, expected {declared} as declared and {plan.peak} as planned"
    )
    return ParityResult(ok, "" if ok else said, declared_bytes=declared, ledger_bytes=found)


def _build(case: Case, arm: Arm, device: Device, base: Context, peers: Mapping[str, Arm]) -> ParityResult:
    """Declarations and builds are functions of their arguments, and stand for the weights they are made of."""
    stored, route = _loaded(case, arm, base)
    again = _loaded(case, arm, base)[1]
    if [(d, d.tensors) for d in route.declarations] != [(d, d.tensors) for d in again.declarations]:
        return ParityResult(False, "finalize declared something else when it was asked again")
    sources = {p.weight: get(p.weight.format).dequantize(stored.of(p.weight)) for p in route.site.projections}
    wrong = []
    for d in {d.identity: d.whole for d in route.declarations if isinstance(d, Derived)}.values():
        first, second = (oracle.declared((d,), stored.read)[d.key] for _ in range(2))
        wrong += [f"{d.key}.{f}: built twice, it differs" for f in first if not oracle.same_bits(first[f], second[f])]
        whole = np.concatenate([sources[w] for w in d.weights])
        wrong += _stands_for(d, oracle.dequantized((d,), {d.key: first}, *whole.shape), whole, arm)
    return ParityResult(not wrong, "; ".join(wrong))


def _stands_for(d: Derived, made: np.ndarray, source: np.ndarray, arm: Arm) -> list[str]:
    """An arm that declares no accuracy changes no number; one that does keeps most of them."""
    if arm.accuracy is None:
        differ = int((made != source).sum())
        said = f"{d.key}: {differ} of {source.size} weights differ from their source, expected none without `accuracy`"
        return [said] if differ else []
    found = snr_db(made, source)
    return [f"{d.key}: found {found:.1f} dB against its source, expected {SANE_DB:g}"] if found < SANE_DB else []


def _reduction(case: Case, arm: Arm, device: Device, base: Context, peers: Mapping[str, Arm]) -> ParityResult:
    """Equal bits for the same row of x, whatever M, in every arm of the class that reads the same weights."""
    mine = arm.reduction_class
    assert mine is not None
    ran: list[parity.Ran] = []
    for other in peers.values():
        if other.reduction_class is not None and other.reduction_class.id == mine.id:
            for m in (other.rows.first, *(m for m in (1, 3, 17, 66) if other.rows.first < m <= other.rows.last)):
                c = replace(case, arm=other.name, m=m)
                if other is arm or verdict_of(c, other, base):
                    ran.append(parity.run(c, other, device, base))
    one, *rest = ran
    for r in (r for r in rest if _same_weights(one, r)):
        shared = min(len(one.out), len(r.out))
        if not oracle.same_bits(one.out[:shared], r.out[:shared]):
            differ = np.argwhere(one.out[:shared].view(np.uint16) != r.out[:shared].view(np.uint16))[0]
            first, second = (f"{x.arm.name} at M={x.call.m}" for x in (one, r))
            at = ", ".join(map(str, differ))
            return ParityResult(
                False, f"reduction class {mine.id}: {first} and {second} differ in their bits at y[{at}]"
            )
    return ParityResult(True)


def _same_weights(a: parity.Ran, b: parity.Ran) -> bool:
    """Whether two arms promise equal bits here: their weights stand for the same numbers."""
    if a.arm is b.arm:
        return True
    if a.arm.reference is not None or b.arm.reference is not None:
        return False
    x, y = (oracle.dequantized(r.declarations, r.arrays, r.call.n, r.call.k) for r in (a, b))
    return oracle.same_bits(x, y)


def _teeth(case: Case, arm: Arm, device: Device, base: Context, peers: Mapping[str, Arm]) -> ParityResult:
    ran = parity.run(case, arm, device, base)
    return bite(ran, parity.reference_of(ran, device, base, peers))
