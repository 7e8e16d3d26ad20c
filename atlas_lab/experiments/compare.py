"""From cells to comparisons with the baseline, and to the bounds that an experiment requires."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_lab.experiments.plan import same_route
from atlas_lab.experiments.results import Bound, Cell, Comparison, ExperimentResult
from atlas_lab.experiments.session import Session
from atlas_lab.experiments.stats import ratio_of_sums

NO_GPU = "no speed was measured: no GPU"


def comparisons(session: Session, x: ExperimentResult, seed: int) -> list[Comparison]:
    """Each variant over the baseline: for every role and M, and for the sum over roles and layers."""
    base = session.experiment.baseline
    cells = {(c.variant, c.layer, c.role, c.m): c for c in x.cells}
    out = []
    for name in session.plans:
        if name == base:
            continue
        for m in session.experiment.m:
            mine = [c for c in x.cells if c.variant == name and c.m == m]
            singles = []
            for c in mine:
                theirs = cells.get((base, c.layer, c.role, m))
                singles.append(_single(session, base, c, theirs, seed))
            out += singles
            out.append(_total(base, name, m, x, singles, seed))
    return out


def _single(session: Session, base: str, c: Cell, theirs: Cell | None, seed: int) -> Comparison:
    made = Comparison(a=base, b=c.variant, m=c.m, layer=c.layer, role=c.role)
    key = (c.layer, c.role, c.m)
    a, b = session.plans[base].step(key), session.plans[c.variant].step(key)
    if theirs is None or a is None or b is None:
        made.reason = f"{base} has no cell of these roles: another arm groups them"
    elif same_route(a, b):
        made.reason = f"same route: {c.arm} over the same layout"
    else:
        _fill(made, [theirs], [c], seed)
    return made


def _total(base: str, name: str, m: int, x: ExperimentResult, singles: Sequence[Comparison], seed: int) -> Comparison:
    made = Comparison(a=base, b=name, m=m)
    a = [c for c in x.cells if c.variant == base and c.m == m]
    b = [c for c in x.cells if c.variant == name and c.m == m]
    if singles and all(s.reason.startswith("same route") for s in singles):
        made.reason = "same route for every role"
    else:
        _fill(made, a, b, seed)
    return made


def _fill(made: Comparison, a: Sequence[Cell], b: Sequence[Cell], seed: int) -> None:
    """The ratio of `b` over `a`, or why there is none."""
    for c in (*a, *b):
        if c.status in ("failed", "crashed"):
            made.reason = f"{c.variant} {c.status} parity for {c.label}"
            return
    untimed = next((c for c in (*a, *b) if c.time is None), None)
    if untimed is not None:
        made.reason = untimed.reason or NO_GPU
        return
    blocks_a = [c.time.blocks for c in a if c.time]
    blocks_b = [c.time.blocks for c in b if c.time]
    found = ratio_of_sums(blocks_a, blocks_b, seed)
    made.ratio, made.ci95, made.verdict = found.value, (found.low, found.high), found.verdict


def bounds(session: Session, x: ExperimentResult) -> list[Bound]:
    """What the experiment requires, and whether it was met; not measured is not failed."""
    out: list[Bound] = []
    for name, r in session.experiment.require.items():
        cells = [c for c in x.cells if c.variant == name]
        if r.max_time_ratio is not None:
            out.append(_time(session, name, r.max_time_ratio, x))
        if r.min_snr_db is not None:
            out.append(_snr(name, r.min_snr_db, cells))
        if r.max_bytes_ratio is not None:
            base = x.variants[session.experiment.baseline].residency.steady
            found = x.variants[name].residency.steady / base
            passed = found <= r.max_bytes_ratio
            out.append(Bound(variant=name, name="max_bytes_ratio", limit=r.max_bytes_ratio, found=found, passed=passed))
    return out


def _time(session: Session, name: str, limit: float, x: ExperimentResult) -> Bound:
    """The worst M; the ratio itself is held against the limit, its interval is in the comparisons."""
    made = Bound(variant=name, name="max_time_ratio", limit=limit)
    totals = [c for c in x.comparisons if c.b == name and c.role is None]
    known = [c for c in totals if c.ratio is not None]
    if not known or len(known) < len(totals):
        reasons = [c.reason for c in totals if c.ratio is None]
        made.reason = reasons[0] if reasons else f"{name} is the baseline"
        # A variant that fails parity has no time, and no excuse.
        made.passed = False if any("parity" in r for r in reasons) else None
        return made
    worst = max(known, key=lambda c: c.ratio or 0.0)
    assert worst.ratio is not None
    made.found, made.where, made.passed = worst.ratio, f"M={worst.m}", worst.ratio <= limit
    return made


def _snr(name: str, limit: float, cells: Sequence[Cell]) -> Bound:
    made = Bound(variant=name, name="min_snr_db", limit=limit)
    known = [(c.accuracy.snr_db, c) for c in cells if c.accuracy is not None and c.accuracy.snr_db is not None]
    if not known or len(known) < len(cells):
        bad = next(c for c in cells if c.accuracy is None or c.accuracy.snr_db is None)
        made.reason = f"{bad.status} for {bad.label}"
        made.passed = None if bad.status == "not run" else False
        return made
    worst, c = min(known, key=lambda k: k[0])
    made.found, made.where, made.passed = worst, c.label, worst >= limit
    return made


def says_no(x: ExperimentResult) -> bool:
    """Whether the measurement says no: a cell without parity, or a bound not met."""
    return any(c.status in ("failed", "crashed") for c in x.cells) or any(b.passed is False for b in x.require)
