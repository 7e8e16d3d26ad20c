"""What every arm says of a site: its verdict, and what it would read and build."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from atlas_lab.core.arm import Arm, is_group, projections_of, required
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind, Declaration, Derived
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.target import Target
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.kernels.lang import Kernel


@dataclass(frozen=True)
class Entry:
    """An arm and where it comes from. `default` says that it may run unnamed: built in, changes no numbers and calls no
    library."""

    arm: Arm
    distribution: str
    version: str
    where: str
    built_in: bool = False

    @property
    def default(self) -> bool:
        return self.built_in and self.arm.accuracy is None and not self.arm.library_calls


Catalog = Sequence[Entry]


@dataclass(eq=False)
class Candidate:
    """One arm against one subject: a projection, or the part of the site its group pattern names."""

    entry: Entry
    subject: Projection | Site
    roles: tuple[str, ...]
    verdict: Verdict
    declarations: tuple[Declaration, ...] = field(default=())

    @property
    def arm(self) -> Arm:
        return self.entry.arm

    @property
    def serves_alone(self) -> bool:
        return self.verdict.ok and len(self.roles) == 1


def consider(
    entry: Entry, subjects: Sequence[tuple[int, ...]], unmet: Verdict | None, site: Site, context: Context
) -> list[Candidate]:
    """What the arm says of each of its `subjects`; `unmet` is its refusal of the target, if the target lacks what its
    kernels need."""
    found = []
    for members in subjects:
        mine = tuple(site.projections[i] for i in members)
        subject = Site(mine) if len(mine) > 1 else mine[0]
        verdict = _verdict(entry.arm, subject, context) if unmet is None else unmet
        c = Candidate(entry, subject, tuple(p.role for p in mine), verdict)
        if c.verdict:
            c.verdict, c.declarations = _finalize(entry.arm, subject, context)
        found.append(c)
    if not found:
        allowed = ", ".join(entry.arm.roles)
        refusal = no("role", f"serves {allowed}", found=", ".join(site.roles), allowed=allowed)
        found.append(Candidate(entry, site, site.roles, refusal))
    return found


def subjects_of(arm: Arm, roles: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Where among a site's roles the arm's patterns find something to serve: groups first, then single ones."""
    found = []
    for pattern in arm.roles:
        if is_group(pattern):
            matches = [[i for i, r in enumerate(roles) if fnmatchcase(r, part)] for part in pattern.split("+")]
            members = tuple(m[0] for m in matches if len(m) == 1)
            if len(set(members)) == len(matches):
                found.append(members)
    for i, role in enumerate(roles):
        if any(not is_group(pattern) and fnmatchcase(role, pattern) for pattern in arm.roles):
            found.append((i,))
    return tuple(found)


def unmet_needs(arm: Arm, target: Target) -> Verdict | None:
    """The refusal of an arm whose kernels or libraries need what the target has not."""
    for x in required(arm):
        what = f"kernel {x.spec.family}" if isinstance(x, Kernel) else f"{x.library} call {x.name}"
        try:
            needs = x.needs
        except (Exception, SystemExit) as e:
            return _error(arm, what, e)
        if not target.meets(needs):
            return no(
                "needs",
                f"{what} needs {needs}" + (f"; elsewhere use {arm.instead}" if arm.instead else ""),
                found=f"{target.name} (compute capability {target.capability[0]}.{target.capability[1]})",
                allowed=str(needs),
            )
    return None


def _error(arm: Arm, what: str, e: BaseException) -> Verdict:
    said = " ".join(str(e).split())
    return no("error", f"{what} of arm {arm.name} raised {type(e).__name__}: {said} ({raised_in(arm, e)})")


def raised_in(arm: Arm, e: BaseException) -> str:
    """`file:line` of the arm's own code that an exception came through last: what it called is not what to mend."""
    frames = traceback.extract_tb(e.__traceback__)
    classes = type(arm).__mro__[: type(arm).__mro__.index(Arm)]
    own = {getattr(sys.modules.get(c.__module__), "__file__", None) for c in classes}
    frame = next((f for f in reversed(frames) if f.filename in own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def _nonsense(arm: Arm, what: str, made: Any, allowed: str) -> Verdict:
    found = f"{type(made).__name__} {made!r}"
    return no("error", f"{what} of arm {arm.name} returned the wrong kind of value", found=found, allowed=allowed)


def _verdict(arm: Arm, subject: Projection | Site, context: Context) -> Verdict:
    for p in projections_of(subject):
        if arm.source and p.weight.family != arm.source:
            return no("source", f"starts from {arm.source} weights", found=p.weight.format, allowed=arm.source)
    try:
        verdict = arm.eligible(subject, context)
    except (Exception, SystemExit) as e:  # an arm's predicate is foreign code: its failure is a verdict
        return _error(arm, "eligible", e)
    return verdict if isinstance(verdict, Verdict) else _nonsense(arm, "eligible", verdict, "yes() or no(...)")


def _finalize(arm: Arm, subject: Projection | Site, context: Context) -> tuple[Verdict, tuple[Declaration, ...]]:
    try:
        made = arm.finalize(subject, context)
        declarations = tuple(made) if isinstance(made, Iterable) else None
    except (Exception, SystemExit) as e:
        return _error(arm, "finalize", e), ()
    if declarations is None:
        return _nonsense(arm, "finalize", made, "a list of Bind and Derived"), ()
    keys = [d.key for d in declarations if isinstance(d, Bind | Derived)]
    if len(keys) < len(declarations):
        wrong = next(d for d in declarations if not isinstance(d, Bind | Derived))
        return _nonsense(arm, "finalize", wrong, "Bind or Derived"), ()
    if len(set(keys)) < len(keys):
        return no("error", f"finalize of arm {arm.name} declares a key twice", found=keys, allowed="unique keys"), ()
    return Verdict(True), declarations
