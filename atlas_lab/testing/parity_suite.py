"""A pytest class of everything an arm is checked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from atlas_lab.core.registry import PluginError, load_registry
from atlas_lab.experiments.checks import Check
from atlas_lab.experiments.parity import ParityResult
from atlas_lab.experiments.parity_run import Runner, arms_named
from atlas_lab.testing.options import device_of


@dataclass(frozen=True)
class Wanted:
    """Which arms: patterns (none: those of the plugins, or without any the built-in ones), plugins, and the folder that
    `./file.py` is relative to. `everywhere` as in `checks_of`."""

    patterns: tuple[str, ...]
    plugins: tuple[str, ...]
    base: Path
    everywhere: bool = True


@dataclass(frozen=True)
class Trial:
    """One test: a check and what runs it, or the sentence of why there is none."""

    id: str
    check: Check | None = None
    runner: Runner | None = None
    sentence: str = ""

    def result(self) -> ParityResult:
        if self.check is None or self.runner is None:
            return ParityResult(False, self.sentence)
        return self.runner.run(self.check)


class ParitySuite:
    """One test a check: parity on awkward cases, a refusal, bytes, builds, reduction class, teeth, compilation.

    Made by `parity_suite`. An arm that is not found, or says yes to no shape, is a failing test.
    """

    wanted: Callable[[pytest.Config], Wanted]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        trials = _trials(type(self).wanted(metafunc.config), device_of(metafunc.config))
        # an arm's checks share child processes on a GPU: `--dist loadgroup` keeps them in one worker
        grouped = metafunc.config.pluginmanager.hasplugin("xdist")
        metafunc.parametrize("trial", [pytest.param(t, id=t.id, marks=_group(t) if grouped else ()) for t in trials])

    def test_arm(self, trial: Trial, record_property: Callable[[str, object], None]) -> None:
        found = trial.result()
        for name, value in found.to_json().items():
            if value not in (None, "", False):
                record_property(name, value)
        if found.skipped and not os.environ.get("CI"):
            pytest.skip(found.sentence)
        if not found.ok:
            pytest.fail(f"{trial.check.case or trial.id}: {found.sentence}" if trial.check else found.sentence, False)


def parity_suite(name_or_pattern: str, plugin: str | None = None) -> type:
    """A test class for the arms that `name_or_pattern` (`int8_*`) names among what is installed and `plugin`, a module
    or a `./file.py` beside the calling file: `TestMine = parity_suite("mine", plugin="./mine.py")`."""
    base = Path(sys._getframe(1).f_code.co_filename).resolve().parent
    wanted = Wanted((name_or_pattern,), (plugin,) if plugin else (), base)
    return suite_of(lambda config: wanted)


def suite_of(wanted: Callable[[pytest.Config], Wanted]) -> type:
    """A test class for what the options of a run say."""
    return type("ParitySuite", (ParitySuite,), {"wanted": staticmethod(wanted), "__doc__": ParitySuite.__doc__})


def _group(trial: Trial) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(trial.check.arm if trial.check else trial.id)


@cache
def _trials(wanted: Wanted, device: str) -> Sequence[Trial]:
    try:
        registry = load_registry(wanted.plugins, base=wanted.base)
        own = [e.arm.name for e in registry.entries if e.built_in != bool(wanted.plugins)]
        arms = arms_named(registry, wanted.patterns or own)
    except PluginError as e:
        return [Trial("arms", sentence=str(e))]
    if not arms:
        return [Trial("arms", sentence=f"plugins {', '.join(wanted.plugins) or 'of this project'} add no arm")]
    runner = Runner(registry, device, wanted.plugins, wanted.base, everywhere=wanted.everywhere)
    return [Trial(f"{arm.name}-{check.id}", check, runner) for arm in arms for check in runner.checks(arm)]
