"""The place of every arm that may run, by what named it."""

from __future__ import annotations

from typing import NamedTuple

from atlas_lab.core.candidate import Catalog
from atlas_lab.core.context import Context
from atlas_lab.core.rows import Rows

BUILT_IN = "built-in order"
TUNED = "tuned table"
DEFAULTS = (TUNED, BUILT_IN)
"""Origins of an arm's place that nobody chose: what the lab itself would run."""

Places = dict[str, tuple[int, str]]


class Offer(NamedTuple):
    """A candidate, by its number, for a projection: its place in the order (-1 for a pin), and what put it there."""

    rank: int
    origin: str
    candidate: int


class Orders:
    """The place of every arm that may run, by role and rows; each worked out once."""

    def __init__(self, context: Context, catalog: Catalog) -> None:
        self._orders = context.preferences.orders
        arch = context.target.arch
        default = sorted((e.arm for e in catalog if e.default), key=lambda arm: arch not in arm.first_on)
        self._defaults = [arm.name for arm in default]
        self._known: dict[tuple[str, Rows], Places] = {}

    def places(self, role: str, rows: Rows) -> Places:
        """Place and origin by arm."""
        found = self._known.get((role, rows))
        if found is None:
            origins: dict[str, str] = {}
            for order in self._orders:
                if order.matches(role, rows):
                    for name in order.arms:
                        origins.setdefault(name, order.origin)
            for name in self._defaults:
                origins.setdefault(name, BUILT_IN)
            found = {name: (rank, origin) for rank, (name, origin) in enumerate(origins.items())}
            self._known[role, rows] = found
        return found
