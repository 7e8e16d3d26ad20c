"""Levers: the typed settings that cross arms, resolved once, with the origin of each value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

# By precedence, the last one wins.
ORIGINS = ("default", "target", "yaml", "environment", "--set", "variant")
PREFIX = "ATLAS_LAB_"
# Other settings of the command that share the prefix and are not levers.
NOT_LEVERS = frozenset({"ATLAS_LAB_CACHE"})


class LeverError(ValueError):
    """An unknown lever, or a value of the wrong kind; one sentence."""


@dataclass(frozen=True)
class Levers:
    """Levers never choose an arm by its name; they tune what several arms share.

    stream_weights: weight loads bypass L1 and are marked for early eviction from L2.
    graph: on a GPU, programs run as captured CUDA graphs.
    row_invariant: keeps decode and every verification width (M up to 16) in one reduction class, where one serves them.
    gated: where a feed-forward block computes activation(gate)·up: in the epilogue of gate and up, in a launch of its
        own, or in down's input.
    pdl: launches whose kernels wait for those before them start before those are over, where the target can (sm_90).
    lora: the addends of LoRA adapters are computed and added; off, an adapter changes nothing.
    """

    stream_weights: bool = False
    graph: bool = True
    row_invariant: bool = True
    gated: str = "epilogue"
    pdl: bool = True
    lora: bool = True
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def origin(self, name: str) -> str:
        return dict(self.origins).get(name, ORIGINS[0])

    def items(self) -> tuple[tuple[str, Any], ...]:
        return tuple((n, getattr(self, n)) for n in NAMES)

    def with_values(self, values: Mapping[str, Any], origin: str) -> Levers:
        """These levers with `values` set; raises LeverError for an unknown name or a bad value."""
        parsed = {name: parse(name, value) for name, value in values.items()}
        known = dict(self.origins) | dict.fromkeys(parsed, origin)
        return replace(self, **parsed, origins=tuple(sorted(known.items())))


_TYPES: dict[str, type] = {f.name: type(f.default) for f in fields(Levers) if f.name != "origins"}
NAMES = tuple(_TYPES)
CHOICES = {"gated": ("epilogue", "launch", "input")}


def nearest(name: str, known: Any) -> str:
    """ ", did you mean 'x'?" for the closest known name, else ""."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def parse(name: str, value: Any) -> Any:
    """The typed value of a lever; text as in YAML, the environment and `--set`."""
    if name not in _TYPES:
        raise LeverError(f"unknown lever {name!r}, expected one of {', '.join(NAMES)}{nearest(name, NAMES)}")
    kind = _TYPES[name]
    if kind is bool:
        text = str(value).strip().lower()
        if text in ("0", "false", "off"):
            return False
        if text in ("1", "true", "on"):
            return True
        raise LeverError(f"lever {name}: found {value!r}, expected 0, false, off, 1, true or on")
    if name in CHOICES:
        text = str(value).strip().lower()
        if text in CHOICES[name]:
            return text
        *most, last = CHOICES[name]
        raise LeverError(f"lever {name}: found {value!r}, expected {', '.join(most)} or {last}")
    raise LeverError(f"lever {name}: kind {kind.__name__} has no spelling")  # pragma: no cover


def others(name: str, value: Any) -> tuple[Any, ...]:
    """Every value that a lever may have besides `value`."""
    return tuple(v for v in CHOICES.get(name, (False, True)) if v != value)


def _variable(variable: str, value: str) -> Any:
    try:
        return parse(variable.removeprefix(PREFIX).lower(), value)
    except LeverError as e:
        raise LeverError(f"{variable}: {e}") from None


def resolve_levers(
    *,
    target: Mapping[str, Any] | None = None,
    yaml: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    sets: Mapping[str, str] | None = None,
    variant: Mapping[str, Any] | None = None,
) -> Levers:
    """Levers by precedence: default < target < YAML < environment < `--set` < variant.

    `environment` is scanned for `ATLAS_LAB_<NAME>`; an unknown name under that prefix is an error.
    """
    found = {
        k.removeprefix(PREFIX).lower(): _variable(k, v)
        for k, v in (environment or {}).items()
        if k.startswith(PREFIX) and k not in NOT_LEVERS
    }
    levers = Levers()
    for origin, values in zip(ORIGINS[1:], (target, yaml, found, sets, variant), strict=True):
        levers = levers.with_values(values or {}, origin)
    return levers
