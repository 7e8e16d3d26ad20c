"""Tuned tables: which of an arm's compile-time parameters run for a weight of N x K on one card.

An arm lists what is legal (`Arm.settings`), best by the chip model first; a table holds what was measured to be best;
`chosen` is what `lower` asks. Nothing is searched when a model runs: without an entry it is the model's first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas_lab.core.arm import Arm
    from atlas_lab.core.context import Context
    from atlas_lab.core.target import Target

Setting = tuple[tuple[str, int], ...]
"""Compile-time parameters by name, in the order of their names: `dict(setting)` are a kernel factory's arguments."""


class TuningError(ValueError):
    """A tuned table that cannot be used, or an entry that its arm does not know; one sentence."""


def setting(**parameters: int) -> Setting:
    """`setting(warps=8, splits=2)`."""
    return tuple(sorted(parameters.items()))


def spelled(s: Setting) -> str:
    """`splits=2 warps=8`."""
    return " ".join(f"{name}={value}" for name, value in s)


@dataclass(frozen=True, order=True)
class Choice:
    """An arm's setting for a weight `[n, k]`."""

    arm: str
    n: int
    k: int
    setting: Setting

    def __post_init__(self) -> None:
        if self.setting != tuple(sorted(dict(self.setting).items())):
            raise TuningError(f"{self}, expected each parameter once, in the order of their names")

    def __str__(self) -> str:
        return f"tuned {self.arm} {self.n}x{self.k}: found {spelled(self.setting)}"


@dataclass(frozen=True)
class Table:
    """The choices of one card, ordered, each arm and shape once; `Table.of` makes it of any."""

    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        if tuple(sorted(self.choices)) != self.choices:
            raise TuningError("tuned table: found choices out of order, expected them sorted")
        for a, b in zip(self.choices, self.choices[1:], strict=False):
            if (a.arm, a.n, a.k) == (b.arm, b.n, b.k):
                raise TuningError(f"tuned table: found {a.arm} {a.n}x{a.k} twice, expected it once")

    @classmethod
    def of(cls, choices: Iterable[Choice]) -> Table:
        return cls(tuple(sorted(choices)))

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], Setting]:
        return {(c.arm, c.n, c.k): c.setting for c in self.choices}

    def find(self, arm: str, n: int, k: int) -> Setting | None:
        """The setting of an arm for a weight `[n, k]`, or None where nobody measured it."""
        return self._known.get((arm, n, k))

    @cached_property
    def digest(self) -> str:
        """Names the choices, whatever measured them; "" for none."""
        if not self.choices:
            return ""
        text = ";".join(f"{c.arm},{c.n},{c.k},{spelled(c.setting)}" for c in self.choices)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def merged(self, newer: Table) -> Table:
        """These choices, with those of `newer` in place of older ones for the same arm and shape."""
        known = {(c.arm, c.n, c.k): c for c in (*self.choices, *newer.choices)}
        return Table.of(known.values())


def chosen(arm: Arm, n: int, k: int, context: Context) -> Setting:
    """What the arm runs with on a weight `[n, k]`: the table's entry, else the chip model's first.

    Raises TuningError for an entry that is not among the arm's settings, and for an arm that has none for the shape.
    """
    legal = arm.settings(n, k, context.target)
    found = context.table.find(arm.name, n, k)
    if not legal:
        raise TuningError(f"tuned {arm.name} {n}x{k}: found no settings on {context.target.name}, expected one or more")
    if found is None:
        return legal[0]
    if found not in legal:
        raise TuningError(stale(Choice(arm.name, n, k, found), arm, context.target.name, len(legal)))
    return found


def stale(c: Choice, arm: Arm, target: str, legal: int) -> str:
    """The sentence for a choice that its arm does not know (any more)."""
    known = f"one of the arm's {legal} settings on {target}" if legal else f"none: the arm tunes nothing on {target}"
    joint = all("+" in pattern for pattern in arm.roles)
    shape = f"N+Nx{c.k} (each projection's N, {c.n} together)" if joint else f"{c.n}x{c.k}"
    return f"{c}, expected {known}; measure again: atlas-lab tune {c.arm} --shapes {shape}"


def faults(table: Table, arms: Iterable[Arm], target: Target) -> list[str]:
    """A sentence for every choice of a table that no arm can run with."""
    known = {a.name: a for a in arms}
    out = []
    for c in table.choices:
        if c.arm not in known:
            out.append(f"{c} for an arm that is not installed")
            continue
        try:
            legal = known[c.arm].settings(c.n, c.k, target)
        except (Exception, SystemExit) as e:  # foreign code: its failure is a sentence
            out.append(f"tuned {c.arm} {c.n}x{c.k}: its settings raised {type(e).__name__}: {' '.join(str(e).split())}")
            continue
        if c.setting not in legal:
            out.append(stale(c, known[c.arm], target.name, len(legal)))
    return out
