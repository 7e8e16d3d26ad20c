"""What `tune` goes through: arms that have settings, formats they start from, and weights' shapes of models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from atlas_lab.checkpoint import presets
from atlas_lab.checkpoint.qwen35 import MODULES
from atlas_lab.core.arm import Arm, is_group
from atlas_lab.core.levers import nearest
from atlas_lab.core.registry import Registry
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.settings import chosen_arms
from atlas_lab.formats.base import Format

PRESETS = ("qwen3.5-27b", "qwen3.5-9b", "qwen3.5-4b", "llama-3-8b", "llama-3-70b", "gemma-4-31b")

Shape = tuple[int, int]
"""N and K of a weight."""


@dataclass(frozen=True)
class Joint:
    """Weights `[ns[i], k]` of projections that share x; `roles` are theirs in a model, () for those spelled out."""

    ns: tuple[int, ...]
    k: int
    roles: tuple[str, ...] = ()

    def of(self, group: tuple[str, ...]) -> Joint | None:
        """Those of the roles that an arm serves in one call; None where they are not all there."""
        if not self.roles:
            return replace(self, roles=group) if len(group) == len(self.ns) else None
        rows = dict(zip(self.roles, self.ns, strict=True))
        return Joint(tuple(rows[r] for r in group), self.k, group) if set(group) <= set(rows) else None


@dataclass(frozen=True)
class Job:
    """An arm on a weight `[n, k]` stored in `format`, or with several `ns` on those of `roles` in one call, n rows
    together; `skip` says why it cannot be tuned on any."""

    arm: Arm
    format: Format
    ns: tuple[int, ...]
    k: int
    roles: tuple[str, ...] = ()
    skip: str = ""

    @property
    def n(self) -> int:
        return sum(self.ns)

    @property
    def shape(self) -> str:
        """`17408x5120`, `17408+17408x5120`."""
        return f"{'+'.join(map(str, self.ns))}x{self.k}"


def shapes_of(text: str = "") -> list[Shape]:
    """`qwen3.5-9b,17408x5120`: the distinct shapes of single weights of presets and those spelled out, in that order;
    without text those of PRESETS. Raises ConfigError."""
    out: dict[Shape, None] = {}
    for part in _parts(text):
        if isinstance(part, str):
            out.update(dict.fromkeys(_of_model(part)))
        elif len(part.ns) == 1:
            out[part.ns[0], part.k] = None
    return list(out)


def joints_of(text: str = "") -> list[Joint]:
    """`qwen3.5-9b,17408+17408x5120`: of the same text the distinct shapes of projections that share x, as those of
    presets do, the largest first, and those spelled out. Raises ConfigError."""
    out: dict[Joint, None] = {}
    for part in _parts(text):
        if isinstance(part, str):
            family, config = presets.model(part)
            sites = dict.fromkeys(s for layer in family.layout(config).layers for s in layer.sites if len(s) > 1)
            found = {Joint(tuple(w.n for w in s), s[0].k, tuple(w.role for w in s)) for s in sites}
            out.update(dict.fromkeys(sorted(found, key=lambda j: (-sum(j.ns) * j.k, j.roles))))
        elif len(part.ns) > 1:
            out[part] = None
    return list(out)


def _parts(text: str) -> list[str | Joint]:
    """Names of presets, and shapes."""
    out: list[str | Joint] = []
    for part in (p.strip() for p in (text.split(",") if text else PRESETS)):
        match = re.fullmatch(r"([1-9]\d{0,8}(?:\+[1-9]\d{0,8}){0,7})[xX]([1-9]\d{0,8})", part)
        if match:
            out.append(Joint(tuple(map(int, match[1].split("+"))), int(match[2])))
        elif part in presets.NAMES:
            out.append(part)
        else:
            near = nearest(part, presets.NAMES)
            raise ConfigError(f"--shapes {part}: expected NxK, N+NxK or one of {', '.join(presets.NAMES)}{near}")
    return out


def _of_model(name: str) -> list[Shape]:
    """Shapes of a model's projections, the largest first, and last that of its output head."""
    family, config = presets.model(name)
    layout = family.layout(config)
    found = {(w.n, w.k) for layer in layout.layers for w in layer.weights}
    head = [(layout.head.n, layout.head.k)] if layout.head else []
    return [*sorted(found, key=lambda s: (-s[0] * s[1], s)), *head]


def jobs(
    registry: Registry,
    patterns: Sequence[str],
    shapes: Sequence[Shape],
    form: str = "",
    joints: Sequence[Joint] = (),
) -> list[Job]:
    """Every arm that serves single projections on every shape, all arms of one shape before the next, then those that
    serve several in one call on the joint shapes of their roles; without `patterns` the arms that have settings.

    `form` is a format's name instead of the first of the family that an arm starts from; arms of other families are
    left out; a named arm has a job that says why where it serves no such shape. Raises ConfigError for a name that
    nobody has, and where nothing is left.
    """
    if form and form not in registry.formats:
        known = ", ".join(registry.formats)
        raise ConfigError(f"--format {form}: expected one of {known}{nearest(form, registry.formats)}")
    arms = chosen_arms(registry, patterns or ["*"])
    if not patterns:
        arms = [a for a in arms if type(a).settings is not Arm.settings]
    pairs = [(a, f) for a in arms if (f := _format(registry, a, form)) is not None]
    if not pairs:
        found = f"no arm that starts from {form}" if form and arms else "no arm that has settings"
        raise ConfigError(f"tune: found {found}, expected one or more")
    made = []
    for n, k in shapes:
        made += [Job(a, f, (n,), k, (role_of(a),), _skip(a) or _needs(a)) for a, f in pairs if role_of(a) or not joints]
    for a, f in pairs:
        mine = {j: _group(a, j) for j in joints}
        made += [Job(a, f, g.ns, g.k, g.roles, _skip(a)) for g in dict.fromkeys(mine.values()) if g is not None]
        if patterns:
            left = [j for j, g in mine.items() if g is None and not j.roles]
            made += [Job(a, f, j.ns, j.k, skip=f"arm {a.name} serves {' or '.join(a.roles)}") for j in left]
    if not made:
        raise ConfigError("tune: found no arm that serves such projections in one call, expected one or more")
    return made


def _format(registry: Registry, arm: Arm, form: str) -> Format | None:
    family = arm.source or "bf16"
    named = [f for f in registry.formats.values() if f.family == family and form in ("", f.name)]
    return named[0] if named else None


def _skip(arm: Arm) -> str:
    """Why an arm cannot be tuned on any weight; "" where it can."""
    return f"arm {arm.name} has no settings" if type(arm).settings is Arm.settings else ""


def _needs(arm: Arm) -> str:
    """Why an arm cannot be tuned on a single weight."""
    return "" if role_of(arm) else f"arm {arm.name} serves {' or '.join(arm.roles)} in one call: spell shapes N+NxK"


def _group(arm: Arm, joint: Joint) -> Joint | None:
    """The projections among these that the arm serves in one call."""
    groups = (tuple(pattern.split("+")) for pattern in arm.roles if is_group(pattern))
    return next((found for g in groups if (found := joint.of(g)) is not None), None)


def role_of(arm: Arm) -> str:
    """A role that the arm serves alone; "" where it serves groups only."""
    for pattern in arm.roles:
        if not is_group(pattern):
            return next((r for r in ("ffn.gate", *MODULES) if fnmatchcase(r, pattern)), pattern)
    return ""
