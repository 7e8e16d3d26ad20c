"""The command `atlas-lab`: verbs in, exit status out. 0 done, 1 the measurement says no, 2 bad input, 3 a bug of
ours, 130 interrupted."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from atlas_lab.checkpoint import CheckpointError
from atlas_lab.cli.common import BAD_INPUT, INTERRUPTED, LEADING, OUR_BUG, app
from atlas_lab.core.levers import LeverError
from atlas_lab.core.program import PlanError
from atlas_lab.core.registry import PluginError
from atlas_lab.core.route import RouteError
from atlas_lab.core.tuning import TuningError
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.formats import FormatError
from atlas_lab.runtime.errors import DeviceError

# Each is one sentence about something that was handed to us.
REFUSALS = (
    ConfigError,
    CheckpointError,
    PluginError,
    RouteError,
    PlanError,
    LeverError,
    TuningError,
    DeviceError,
    FormatError,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its status."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run a command line; returns its exit status."""
    from atlas_lab.cli import verbs  # noqa: F401  (registers them)

    try:
        status = typer.main.get_command(app).main(_ordered(argv), prog_name="atlas-lab", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except REFUSALS as e:
        return _refuse(str(e))
    except KeyboardInterrupt:
        print("atlas-lab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has gone; without this Python complains again while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        message = getattr(e, "format_message", None)
        if message is not None:  # the command line itself
            return _refuse(f"{message()} Try atlas-lab --help.")
        traceback.print_exc()
        print(f"atlas-lab: this is a bug of ours ({type(e).__name__}); please report the lines above", file=sys.stderr)
        return OUR_BUG


def _refuse(sentence: str) -> int:
    print(f"atlas-lab: {sentence}", file=sys.stderr)
    return BAD_INPUT


def _ordered(argv: list[str]) -> list[str]:
    """Global options that stand before the verb, moved behind it."""
    at = 0
    while at < len(argv) and (argv[at] in LEADING or argv[at].startswith(tuple(f"{x}=" for x in LEADING))):
        at += 1 if "=" in argv[at] and argv[at] not in LEADING else 2
    return argv[at:] + argv[:at]


__all__ = ["main", "run"]
