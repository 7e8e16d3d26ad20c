"""What the lever `row_invariant` costs, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from atlas_lab.core.invariance import LEVER
from atlas_lab.core.route import Route
from atlas_lab.core.rows import Rows, merged


def kept_rows(routes: Iterable[Route]) -> list[str]:
    """One line for each pair of arms: the rows that the lever keeps on one, where the other would come first."""
    found: dict[tuple[str, str], list[Rows]] = {}
    for p in (p for route in routes for p in route.passed):
        found.setdefault((p.by, p.arm), []).append(p.rows)
    out = []
    for (by, arm), rows in found.items():
        which = ", ".join(map(str, merged(rows)))
        out.append(f"{LEVER} keeps M {which} on {by}, where {arm} would come first; --set {LEVER}=off")
    return out
