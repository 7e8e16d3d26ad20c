"""What `tune` goes through: arms that have settings, formats they start from, and weights' shapes of models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
class Job:
    """An arm on a weight `[n, k]` stored in `format`; `skip` says why it cannot be tuned on any."""

    arm: Arm
    format: Format
    n: int
    k: int
    skip: str = ""


def shapes_of(text: str = "") -> list[Shape]:
    """`qwen3.5-9b,17408x5120`: the distinct shapes of presets and those spelled out, in that order; without text those
    of PRESETS. Raises ConfigError."""
    out: dict[Shape, None] = {}
    for part in text.split(",") if text else PRESETS:
        match = re.fullmatch(r"([1-9]\d{0,8})[xX]([1-9]\d{0,8})", part.strip())
        if match:
            out[int(match[1]), int(match[2])] = None
        elif part.strip() in presets.NAMES:
            out.update(dict.fromkeys(_of_model(part.strip())))
        else:
            near = nearest(part, presets.NAMES)
            raise ConfigError(f"--shapes {part}: expected NxK or one of {', '.join(presets.NAMES)}{near}")
    return list(out)


def _of_model(name: str) -> list[Shape]:
    """Shapes of a model's projections, the largest first, and last that of its output head."""
    family, config = presets.model(name)
    layout = family.layout(config)
    found = {(w.n, w.k) for layer in layout.layers for w in layer.weights}
    head = [(layout.head.n, layout.head.k)] if layout.head else []
    return [*sorted(found, key=lambda s: (-s[0] * s[1], s)), *head]


def jobs(registry: Registry, patterns: Sequence[str], shapes: Sequence[Shape], form: str = "") -> list[Job]:
    """Every arm on every shape, all arms of one shape before the next; without `patterns` the arms that have settings.

    `form` is a format's name instead of the first of the family that an arm starts from; arms of other families are
    left out. Raises ConfigError for a name that nobody has, and where nothing is left.
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
    return [Job(a, f, n, k, _skip(a)) for n, k in shapes for a, f in pairs]


def _format(registry: Registry, arm: Arm, form: str) -> Format | None:
    family = arm.source or "bf16"
    named = [f for f in registry.formats.values() if f.family == family and form in ("", f.name)]
    return named[0] if named else None


def _skip(arm: Arm) -> str:
    if type(arm).settings is Arm.settings:
        return f"arm {arm.name} has no settings"
    return "" if role_of(arm) else f"arm {arm.name} serves only several projections in one call"


def role_of(arm: Arm) -> str:
    """A role that the arm serves alone; "" where it serves groups only."""
    for pattern in arm.roles:
        if not is_group(pattern):
            return next((r for r in ("ffn.gate", *MODULES) if fnmatchcase(r, pattern)), pattern)
    return ""
