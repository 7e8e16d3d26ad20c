"""What every verb shares: its global options, its consoles, and how its answer leaves the process."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from atlas_lab.core.levers import PREFIX
from atlas_lab.core.registry import Registry
from atlas_lab.experiments import config, settings
from atlas_lab.experiments.config import Loaded
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import writable, write
from atlas_lab.experiments.settings import Said

WIDTH = 100

DONE, SAYS_NO, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    name="atlas-lab",
    help="A laboratory for the GPU kernels that multiply by quantized LLM weights.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True)
class Common:
    """The global options of one call."""

    json: str | None = None
    device: str = "auto"
    sets: tuple[str, ...] = ()
    config: Path | None = None
    plugins: tuple[str, ...] = ()
    console: Console = field(default_factory=Console)

    @property
    def alone(self) -> bool:
        """Whether stdout is JSON and nothing else."""
        return self.json == "-"

    @functools.cached_property
    def said(self) -> Said:
        environment = {k: v for k, v in os.environ.items() if k.startswith(PREFIX)}
        return Said(settings.parse_sets(self.sets), self.plugins, self.device, environment)

    def load(self) -> Loaded:
        """The settings file, named by the first line printed."""
        loaded = config.load(self.config)
        self.console.print(f"settings: {loaded.source.path} ({loaded.how})", markup=False, highlight=False)
        return loaded

    def registry(self, loaded: Loaded | None = None) -> Registry:
        """Everything installed and named; the file's names are checked against it."""
        made = settings.registry_for(loaded, self.plugins)
        if loaded:
            settings.check_names(loaded, made)
        return made

    def check_json(self) -> None:
        """Raise ConfigError now where the answer could not be written later."""
        if self.json is not None and not self.alone:
            writable(Path(self.json))

    def give(self, text: str) -> None:
        """The answer as JSON, where `--json` asks for it."""
        if self.json is None:
            return
        if self.alone:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            self.keep(text)
            self.console.print(f"written: {self.json}", markup=False, highlight=False)

    def keep(self, text: str) -> None:
        """What there is of the answer so far, into the file that `--json` names."""
        if self.json is not None and not self.alone:
            write(Path(self.json), text)


def check_budget(seconds: float | None) -> None:
    """Raise ConfigError for a budget that is no time."""
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--budget {seconds:g}: expected more than 0 seconds")


def console(json: str | None) -> Console:
    """Stdout for people; nothing at all where stdout is JSON alone."""
    quiet = json == "-"
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(quiet=quiet, width=width, highlight=False)


_JSON = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the answer as JSON; '-': stdout is JSON alone.")
]
_DEVICE = Annotated[str, typer.Option("--device", metavar="auto|cuda|interpreter", help="Where kernels run.")]
_SET = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a lever; may be repeated.")]
_CONFIG = Annotated[
    Path | None, typer.Option("-c", "--config", metavar="FILE", help="Settings, instead of ./registry.yaml.")
]
_PLUGIN = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="MODULE|FILE.py", help="Load a plugin; may be repeated.")
]
_OPTIONS: tuple[tuple[str, Any, Any], ...] = (
    ("json", _JSON, None),
    ("device", _DEVICE, "auto"),
    ("set_", _SET, None),
    ("config_", _CONFIG, None),
    ("plugin", _PLUGIN, None),
)
# Global options that may stand before the verb, each with a value.
LEADING = ("--json", "--device", "--set", "-c", "--config", "--plugin")


def verb(to: typer.Typer, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a verb: its first parameter is a `Common`, its value the exit status."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(**given: Any) -> int:
            json, device, sets, file, plugins = (given.pop(option) for option, _, _ in _OPTIONS)
            common = Common(json, device, tuple(sets or ()), file, tuple(plugins or ()), console(json))
            common.check_json()
            return function(common, **given)

        parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, kind, default in _OPTIONS
        ]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        del call.__wrapped__
        to.command(name, help=(function.__doc__ or "").strip())(call)
        return function

    return register
