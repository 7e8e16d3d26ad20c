"""Arms by name, and their checks run on whichever device is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from atlas_lab.core.arm import Arm
from atlas_lab.core.levers import nearest
from atlas_lab.core.registry import PluginError, Registry
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.experiments.cases import Budget
from atlas_lab.experiments.checks import Check, checks_of, run_check
from atlas_lab.experiments.parity import ParityResult
from atlas_lab.experiments.parity_child import EACH, run_isolated
from atlas_lab.runtime.device import Device, open_device


def arms_named(registry: Registry, patterns: Iterable[str]) -> list[Arm]:
    """The arms that any of the patterns (`int8_*`) names, in the registry's order; raises PluginError, with the
    nearest name, for a pattern that names none."""
    names = [e.arm.name for e in registry.entries]
    wanted: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise PluginError(f"no arm is called {pattern!r}, found {', '.join(names)}{nearest(pattern, names)}")
        wanted.update(found)
    return [e.arm for e in registry.entries if e.arm.name in wanted]


@dataclass
class Runner:
    """Runs checks on one kind of device: on the interpreter here, on a GPU in child processes.

    `plugins` and `base` are what `registry` was loaded with: children load it again. `device` is `cuda` or
    `interpreter`; `target` the card that shapes are drawn for; `everywhere` as in `checks_of`.
    """

    registry: Registry
    device: str = "interpreter"
    plugins: Sequence[str] = ()
    base: Path | None = None
    target: Target = field(default_factory=lambda: shipped_targets()[0])
    each: float = EACH
    everywhere: bool = True
    _isolated: dict[str, dict[str, ParityResult]] = field(default_factory=dict)

    def checks(self, arm: Arm) -> tuple[Check, ...]:
        budget: Budget = "gpu" if self.device == "cuda" else "interpreter"
        return checks_of(arm, self.target, budget, everywhere=self.everywhere)

    def run(self, check: Check) -> ParityResult:
        """The result of one check; the first of an arm's that need a GPU runs all of those."""
        if self.device == "cuda" and check.on_device:
            if check.arm not in self._isolated:
                wanted = [c for c in self.checks(self.registry.arm(check.arm)) if c.on_device]
                done = run_isolated(check.arm, wanted, self.plugins, self.base, each=self.each)
                self._isolated[check.arm] = {c.id: result for c, result in done}
            return self._isolated[check.arm][check.id]
        return run_check(check, self.registry.arm(check.arm), self._here, self._peers)

    @cached_property
    def _peers(self) -> dict[str, Arm]:
        return {e.arm.name: e.arm for e in self.registry.entries}

    @cached_property
    def _here(self) -> Device:
        return open_device("interpreter", self.target)
