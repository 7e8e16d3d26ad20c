"""The lever `row_invariant`: decode and every verification width in one reduction class.

For M up to 16, an arm that only the tuned table or the built-in order offers is passed over in favour of arms of one
reduction class that the lab would run by itself, that serve no more than 16 rows each, and that between them serve
every M up to 16 of the run. Where several classes do, it is the one whose arm comes first for the fewest rows. Arms
that pins or the orders of a file name are left alone; where no class serves them all, nothing is passed over: the
lever never makes a gap.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from atlas_lab.core.candidate import Candidate
from atlas_lab.core.context import Context
from atlas_lab.core.numbers import ReductionClass
from atlas_lab.core.orders import DEFAULTS, Offer
from atlas_lab.core.rows import Rows, covers, merged

LEVER = "row_invariant"
VERIFIED = Rows(1, 16)
"""Decode, and the rows of speculative verification."""


class Invariance:
    """The lever at one site. `passed` are the rows for which each candidate, by its number, was passed over."""

    def __init__(self, context: Context, candidates: Sequence[Candidate]) -> None:
        self.on = context.levers.row_invariant
        self.passed: dict[int, list[Rows]] = {}
        self._candidates = candidates
        self._wanted = merged(r for served in context.rows if (r := served.intersect(VERIFIED)))
        self._classes: dict[str, ReductionClass] = {}

    def kept(self, role: str, piece: Rows, offers: list[Offer], named: Set[int]) -> list[Offer]:
        """The offers to a projection for these rows, best first, without those that the lever passes over; `named` are
        the candidates that an order of a file names for some projection of the site."""
        # a class that serves all of them ends at 16, where pieces end too
        if not self.on or piece.last > VERIFIED.last:
            return offers
        alone = [o for o in offers if self._candidates[o.candidate].serves_alone]
        fit = [o for o in alone if o.origin in DEFAULTS and self._invariant(role, o)]
        if not fit:
            return offers
        chosen = self._classes.setdefault(role, self._class(fit[0]))
        # of the class that is kept a file's order may have taken these rows
        first = next((o for o in fit if self._class(o) == chosen), None)
        if first is None or alone[0].candidate in named:
            return offers
        out = []
        for o in offers:
            if o.candidate not in named and o.rank < first.rank and not self._stays(o, chosen):
                if self._candidates[o.candidate].verdict:
                    self.passed.setdefault(o.candidate, []).append(piece)
            else:
                out.append(o)
        return out

    def note(self, number: int, serves: Sequence[Rows]) -> str:
        """Why the lever passed a candidate over, or why it `serves` these rows all the same; "" where it is neither."""
        c = self._candidates[number]
        if number in self.passed:
            over = ", ".join(map(str, merged(self.passed[number])))
            return f"passed over for M {over}: {LEVER}: {self._why(c)}"
        few = [r for x in serves if (r := x.intersect(VERIFIED))]
        if self.on and few and not self._covers(c):
            return f"{LEVER}: {self._why(c)}; it stays, for no class of arms for at most {VERIFIED.last} rows does"
        return ""

    def _class(self, o: Offer) -> ReductionClass:
        found = self._candidates[o.candidate].arm.reduction_class
        assert found is not None
        return found

    def _invariant(self, role: str, o: Offer) -> bool:
        return _short(self._candidates[o.candidate]) and self._covers(self._candidates[o.candidate], role)

    def _stays(self, o: Offer, chosen: ReductionClass) -> bool:
        """Whether an offer is of the class that is kept, or a group's whose arms serve all the rows themselves."""
        c = self._candidates[o.candidate]
        return c.arm.reduction_class == chosen or (len(c.roles) > 1 and self._covers(c))

    def _covers(self, c: Candidate, role: str = "") -> bool:
        return all(any(covers(r, w) for r in self._served(c, role)) for w in self._wanted)

    def _served(self, c: Candidate, role: str = "") -> tuple[Rows, ...]:
        """The rows that arms of a candidate's class serve: alone for `role`, or in one call for its own roles."""
        if c.arm.reduction_class is None:
            return ()
        roles = (role,) if role else c.roles
        mine = [
            x.arm.rows
            for x in self._candidates
            if x.verdict and x.entry.default and _short(x) and x.roles == roles
            if x.arm.reduction_class == c.arm.reduction_class
        ]
        return merged(mine)

    def _why(self, c: Candidate) -> str:
        expected = ", ".join(map(str, self._wanted))
        if c.arm.reduction_class is None:
            return f"it declares no reduction class, expected one that serves M {expected}"
        served = ", ".join(map(str, self._served(c)))
        if served and self._covers(c):
            return f"another class that serves M {expected} comes first for the fewest rows"
        found = f"M {served} only" if served else f"no M by arms of at most {VERIFIED.last} rows"
        return f"its class serves {found}, expected {expected}"


def _short(c: Candidate) -> bool:
    return c.arm.rows.last <= VERIFIED.last
