"""Everything installed: arms, formats, models, targets, from entry points and from plugins a run names.

A plugin that fails is a row in `faults`, never a crash; it stops a run only if the run names it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pluggy

from atlas_lab.core import hookspecs
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Context
from atlas_lab.core.levers import nearest
from atlas_lab.core.library import LibraryCall
from atlas_lab.core.numbers import Accuracy, Exact, ReductionClass, Rounded
from atlas_lab.core.projection import Site
from atlas_lab.core.resolve import Entry, resolve, resolve_all
from atlas_lab.core.route import Gap, Route
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import Target
from atlas_lab.formats.base import Format
from atlas_lab.kernels.lang import Kernel

GROUP = "atlas_lab"
BUILT_IN = "atlas-lab"
_HOOKS = ("atlas_arms", "atlas_formats", "atlas_models", "atlas_targets")


class PluginError(RuntimeError):
    """A plugin that a run names and that cannot be used; one sentence."""


@dataclass(frozen=True)
class Plugin:
    """Where a plugin comes from: the distribution and its version ("" for a file or a module), and its file."""

    name: str
    distribution: str
    version: str
    where: str


@dataclass(frozen=True)
class Fault:
    """A plugin that was left out, and the sentence that says why."""

    plugin: Plugin
    sentence: str


@dataclass
class Registry:
    """The installed parts by name; `entries` keeps the built-in order."""

    entries: list[Entry] = field(default_factory=list)
    formats: dict[str, Format] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    owners: dict[tuple[str, str], Plugin] = field(default_factory=dict)

    def arm(self, name: str) -> Arm:
        """The arm called `name`; raises PluginError naming the nearest."""
        for e in self.entries:
            if e.arm.name == name:
                return e.arm
        names = [e.arm.name for e in self.entries]
        raise PluginError(f"unknown arm {name!r}, expected one of {', '.join(names)}{nearest(name, names)}")

    def target(self, name: str) -> Target:
        """The target called `name`; raises PluginError naming the nearest."""
        if name not in self.targets:
            known = ", ".join(self.targets)
            raise PluginError(f"unknown target {name!r}, expected one of {known}{nearest(name, self.targets)}")
        return self.targets[name]

    def resolve(self, site: Site, context: Context) -> Route:
        """`resolve` over everything installed."""
        return resolve(site, context, self.entries)

    def resolve_all(
        self, sites: Iterable[Site], context: Context, *, gaps: list[Gap] | None = None
    ) -> tuple[Route, ...]:
        """`resolve_all` over everything installed."""
        return resolve_all(sites, context, self.entries, gaps=gaps)


def load_registry(
    plugins: Iterable[str] = (), *, base: Path | None = None, installed: Iterable[EntryPoint] | None = None
) -> Registry:
    """Everything installed, then the plugins a run names.

    `plugins` are dotted module names, names of installed plugins, `./file.py` relative to `base`, or `-name` to leave
    an installed one out.
    `installed` replaces the entry points of group `atlas_lab` (tests). Raises PluginError for a named plugin that
    fails, or a `-name` that is not installed.
    """
    registry = Registry()
    named = [p for p in plugins if not p.startswith("-")]
    blocked = [p[1:] for p in plugins if p.startswith("-")]
    points = list(entry_points(group=GROUP) if installed is None else installed)
    for name in blocked:
        if name not in {p.name for p in points}:
            known = ", ".join(sorted({p.name for p in points}))
            raise PluginError(f"plugins: -{name} is not installed, expected one of {known}")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for point in sorted(points, key=_position):
        if point.name not in blocked:
            plugin = Plugin(point.name, *_distribution(point), point.value)
            _add(registry, manager, plugin, point.load)
    for name in named:
        named_points = [e for e in points if name in (e.name, e.value, e.module) and e.name not in blocked]
        origins = {(e.name, _distribution(e)[0]) for e in named_points}
        for fault in registry.faults:
            if (fault.plugin.name, fault.plugin.distribution) in origins:
                raise PluginError(f"plugin {name}: {fault.sentence}")
        if named_points:
            continue
        plugin, load = _named(name, base or Path.cwd())
        before = len(registry.faults)
        _add(registry, manager, plugin, load)
        if len(registry.faults) > before:
            raise PluginError(f"plugin {name}: {registry.faults[-1].sentence}")
    return registry


def _position(point: EntryPoint) -> tuple[bool, str, str]:
    distribution = _distribution(point)[0]
    return (distribution != BUILT_IN, distribution, point.name)


def _distribution(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("", "")


def _named(name: str, base: Path) -> tuple[Plugin, Callable[[], ModuleType]]:
    if not name.endswith(".py"):
        return Plugin(name, "", "", name), lambda: importlib.import_module(name)
    path = (base / name).resolve()
    return Plugin(path.stem, "", "", os.fspath(path)), lambda: _import_file(path)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    module_name = f"{path.stem}_{hashlib.sha256(os.fspath(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _add(registry: Registry, manager: pluggy.PluginManager, plugin: Plugin, load: Callable[[], Any]) -> None:
    """Load, check and take in one plugin whole, or leave it out whole; a module taken in before is left as it is."""
    module: Any = None
    try:
        module = load()
        plugin = replace(plugin, where=getattr(module, "__file__", None) or plugin.where)
        if manager.is_registered(module):
            return
        manager.register(module, f"{plugin.distribution}:{plugin.name}:{plugin.where}")
        manager.check_pending()
        _marked(manager, module)
        _take(registry, plugin, {hook: _call(manager, module, hook) for hook in _HOOKS})
    except (Exception, SystemExit) as e:  # foreign code: its failure is a row, not ours
        if module is not None and manager.is_registered(module):
            manager.unregister(module)
        said = " ".join(str(e).split())
        registry.faults.append(Fault(plugin, f"{type(e).__name__}: {said}{_place(e)}"))
    else:
        registry.plugins.append(plugin)


def _place(e: BaseException) -> str:
    """ " (file:line)" of the last frame that is not this module's, pluggy's or Python's own."""
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        foreign = frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<")
        if foreign and Path(frame.filename).parent.name not in ("pluggy", "importlib"):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _marked(manager: pluggy.PluginManager, module: Any) -> None:
    found = {caller.name for caller in manager.get_hookcallers(module) or ()}
    for hook in _HOOKS:
        if hook not in found and callable(getattr(module, hook, None)):
            raise TypeError(f"{hook} is not marked, expected @atlas_lab.hookimpl before it")
    if not found:
        raise TypeError(f"it implements no hook, expected one or more of {', '.join(_HOOKS)}")


def _call(manager: pluggy.PluginManager, module: Any, hook: str) -> list[Any]:
    for impl in getattr(manager.hook, hook).get_hookimpls():
        if impl.plugin is module:
            made = impl.function()
            if made is None or isinstance(made, str) or not isinstance(made, Iterable):
                raise TypeError(f"{hook} returned {made!r}, expected an iterable")
            return list(made)
    return []


def _take(registry: Registry, plugin: Plugin, made: dict[str, list[Any]]) -> None:
    keys: list[tuple[str, str]] = []
    for hook, kind, attribute in (
        ("atlas_arms", Arm, "name"),
        ("atlas_formats", Format, "name"),
        ("atlas_models", object, "family"),
        ("atlas_targets", Target, "name"),
    ):
        for item in made[hook]:
            if not isinstance(item, kind):
                raise TypeError(f"{hook} returned {item!r}, expected instances of {kind.__name__}")
            name = getattr(item, attribute, None)
            if not isinstance(name, str) or not name:
                raise TypeError(f"{hook}: {item!r} has {attribute} {name!r}, expected a name")
            if hook == "atlas_arms":
                validate(cast(Arm, item))
            key = (hook, name)
            if key in registry.owners or key in keys:
                owner = registry.owners.get(key, plugin)
                raise ValueError(f"{hook}: the name {name!r} is taken by {owner.distribution or owner.where}")
            keys.append(key)
    built_in = plugin.distribution == BUILT_IN
    registry.owners.update(dict.fromkeys(keys, plugin))
    registry.entries += [
        Entry(a, plugin.distribution, plugin.version, plugin.where, built_in) for a in made["atlas_arms"]
    ]
    registry.formats.update({f.name: f for f in made["atlas_formats"]})
    registry.models.update({m.family: m for m in made["atlas_models"]})
    registry.targets.update({t.name: t for t in made["atlas_targets"]})


def validate(arm: Arm) -> None:
    """Raise TypeError for an arm whose declared attributes are missing or of the wrong type."""

    def expect(name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise TypeError(f"arm {arm.name}: {name} is {getattr(arm, name, None)!r}, expected {wanted}")

    def all_are(name: str, kind: type) -> bool:
        value = getattr(arm, name, None)
        return isinstance(value, list | tuple) and all(isinstance(v, kind) for v in value)

    expect("roles", bool(arm.roles) and all_are("roles", str), "a tuple of role patterns")
    expect("rows", isinstance(getattr(arm, "rows", None), Rows), "rows(first, last)")
    expect("source", isinstance(arm.source, str), "the name of a format's family")
    expect("activation", isinstance(arm.activation, str) and bool(arm.activation), "the name of a format")
    expect("version", isinstance(arm.version, str), "text")
    expect("library_calls", all_are("library_calls", LibraryCall), "a tuple of library calls")
    some = bool(arm.kernels) or bool(arm.library_calls)
    expect("kernels", some and all_are("kernels", Kernel), "a tuple of kernels")
    expect("tolerance", isinstance(getattr(arm, "tolerance", None), Rounded | Exact), "Rounded(...) or Exact(...)")
    expect("accuracy", arm.accuracy is None or isinstance(arm.accuracy, Accuracy), "Accuracy(...) or None")
    declared = arm.reduction_class
    expect("reduction_class", declared is None or isinstance(declared, ReductionClass), "ReductionClass(...) or None")
    for name in ("epilogues", "quantizes", "reads", "prologues"):
        expect(name, all_are(name, str), "a tuple of names")
    expect("optional_kernels", all_are("optional_kernels", Kernel), "a tuple of kernels")
    says = arm.quantized is None or (callable(arm.quantized) and arm.reference is None)
    expect("quantized", says, "a method of an arm without `reference`")
    for method in ("eligible", "finalize", "lower", "scratch", "settings"):
        expect(method, callable(getattr(arm, method, None)), "a method")
