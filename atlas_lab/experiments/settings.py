"""From a file's settings and the command's to what `resolve` is handed: levers, pins, orders, target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Order, Pin, Preferences
from atlas_lab.core.levers import PREFIX, LeverError, Levers, nearest, parse, resolve_levers
from atlas_lab.core.registry import PluginError, Registry, load_registry
from atlas_lab.core.rows import PHASES, rows_from
from atlas_lab.core.target import Target
from atlas_lab.experiments.config import Loaded, OrderSpec, PinSpec, Variant
from atlas_lab.experiments.errors import ConfigError

DEFAULT_TARGET = "h200"
LAYER = "layers."


@dataclass(frozen=True)
class Said:
    """What the command line and the environment say, beside the file: `--set`, `--plugin`, `--device`."""

    sets: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    device: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)


def parse_sets(values: Iterable[str]) -> dict[str, str]:
    """`["graph=off"]` as a mapping; raises ConfigError for an entry without `=` or an unknown lever."""
    out: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals:
            raise ConfigError(f"--set {value}: found no =, expected name=value")
        try:
            parse(name, text)
        except LeverError as e:
            raise ConfigError(f"--set {value}: {e}") from None
        out[name] = text
    return out


def registry_for(loaded: Loaded | None, plugins: Sequence[str] = ()) -> Registry:
    """Everything installed and every plugin that the file (relative to it) and `--plugin` (relative to here) name.

    Raises ConfigError, with the file's line, for a named plugin that fails.
    """
    own = list(loaded.config.plugins) if loaded else []
    try:
        return load_registry([*own, *from_here(plugins)], base=loaded.base.resolve() if loaded else None)
    except PluginError as e:
        for i, name in enumerate(own):
            if loaded and str(e).startswith((f"plugin {name}: ", f"plugins: {name} ")):
                raise loaded.source.error(("plugins", i), str(e)) from None
        raise ConfigError(f"--plugin: {e}") from None


def from_here(plugins: Iterable[str]) -> list[str]:
    """Plugins as `--plugin` names them, with files made absolute: others are relative to the settings file."""
    return [os.fspath(Path(p).resolve()) if p.endswith(".py") else p for p in plugins]


def known_arm(registry: Registry, name: str) -> None:
    """Raise ConfigError for an arm that nobody has; plugins left out are named, for it may be theirs."""
    names = [e.arm.name for e in registry.entries]
    if name not in names:
        left_out = "".join(f"; left out: plugin {f.plugin.name}: {f.sentence}" for f in registry.faults)
        said = f"unknown arm {name!r}, expected one of {', '.join(names) or 'none installed'}"
        raise ConfigError(f"{said}{nearest(name, names)}{left_out}")


def chosen_arms(registry: Registry, patterns: Sequence[str]) -> list[Arm]:
    """Arms by name or pattern, in their own order; raises ConfigError for one that matches nothing."""
    held = [e.arm for e in registry.entries]
    for p in patterns:
        if not any(fnmatchcase(a.name, p) for a in held):
            known_arm(registry, p)
    return [a for a in held if any(fnmatchcase(a.name, p) for p in patterns)]


def check_names(loaded: Loaded, registry: Registry) -> None:
    """Raise ConfigError for an arm, format, lever or target that the file names and nobody has."""
    config = loaded.config
    if config.target is not None:
        _known(loaded, ("target",), "target", config.target, registry.targets)
    _check_choices(loaded, (), registry, config.levers, config.pins, config.arms)
    for name, x in config.experiments.items():
        for v, variant in x.variants.items():
            at = ("experiments", name, "variants", v)
            if variant.weights is not None:
                _known(loaded, (*at, "weights"), "format", variant.weights, registry.formats)
            _check_choices(loaded, at, registry, variant.levers, variant.pins, variant.arms)


def _known(loaded: Loaded, at: Sequence[str | int], kind: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        said = f"unknown {kind} {name!r}, expected one of {', '.join(names)}{nearest(name, names)}"
        raise loaded.source.error(at, said)


def _check_choices(
    loaded: Loaded,
    at: tuple[str, ...],
    registry: Registry,
    levers: Mapping[str, Any],
    pins: Mapping[str, PinSpec],
    orders: Mapping[str, OrderSpec],
) -> None:
    for name, value in levers.items():
        try:
            parse(name, value)
        except LeverError as e:
            raise loaded.source.error((*at, "levers", name), str(e)) from None

    def arm(where: Sequence[str | int], name: str) -> None:
        try:
            known_arm(registry, name)
        except ConfigError as e:
            raise loaded.source.error((*at, *where), str(e)) from None

    for pattern, pin in pins.items():
        try:
            split_pattern(pattern)
        except ConfigError as e:
            raise loaded.source.error((*at, "pins", pattern), str(e)) from None
        arm(("pins", pattern), pin.arm)
    for pattern, order in orders.items():
        for phase in ("all", *PHASES):
            for i, name in enumerate(getattr(order, phase)):
                where = (i,) if phase == "all" else (phase, i)
                arm(("arms", pattern, *where), name)


def split_pattern(pattern: str) -> tuple[int | None, str]:
    """`layers.3.ffn.down` as (3, "ffn.down"); any other pattern is for every layer."""
    if not pattern.startswith(LAYER):
        return None, pattern
    layer, _, role = pattern.removeprefix(LAYER).partition(".")
    if not layer.isdecimal() or not role:
        raise ConfigError(f"found {pattern!r}, expected layers.NUMBER.ROLE")
    return int(layer), role


def levers_for(loaded: Loaded | None, said: Said, target: Target, variant: Variant | None = None) -> Levers:
    """Levers by precedence; raises ConfigError for one that the environment names wrongly."""
    environment = {k: v for k, v in said.environment.items() if k.startswith(PREFIX)}
    try:
        return resolve_levers(
            target=dict(target.levers),
            yaml=loaded.config.levers if loaded else None,
            environment=environment,
            sets=said.sets,
            variant=variant.levers if variant else None,
        )
    except LeverError as e:
        raise ConfigError(f"environment: {e}") from None


def preferences_for(loaded: Loaded | None, name: str = "", variant: Variant | None = None) -> Preferences:
    """Pins and orders: the variant's before the file's own; a variant's pin replaces the file's of the same pattern."""
    pins: dict[str, tuple[PinSpec, str]] = {}
    orders: list[Order] = []
    if variant:
        orders += _orders(variant.arms, f"arms of variant {name}")
    if loaded:
        pins |= {p: (pin, "pins") for p, pin in loaded.config.pins.items()}
        orders += _orders(loaded.config.arms, "arms")
    if variant:
        pins |= {p: (pin, f"pins of variant {name}") for p, pin in variant.pins.items()}
    made = []
    for pattern, (pin, origin) in pins.items():
        layer, role = split_pattern(pattern)
        made.append(Pin(role, pin.arm, layer, pin.range, origin))
    return Preferences(tuple(made), tuple(orders))


def _orders(specs: Mapping[str, OrderSpec], origin: str) -> list[Order]:
    """Exact roles before globs, phases before lists for every M."""
    out = []
    for pattern, spec in sorted(specs.items(), key=lambda item: any(c in item[0] for c in "*?[")):
        for phase, rows in PHASES.items():
            if getattr(spec, phase):
                out.append(Order(pattern, rows, tuple(getattr(spec, phase)), origin))
        if spec.all:
            out.append(Order(pattern, rows_from(1), tuple(spec.all), origin))
    return out
