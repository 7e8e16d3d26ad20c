"""The opt-in pytest plugin: options, the marker `gpu`, reasons of skips always printed."""

from __future__ import annotations

import pytest

from atlas_lab.runtime.device import KINDS
from atlas_lab.runtime.driver import missing_gpu

NEEDS_GPU = "needs --device=cuda"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("atlas-lab", "arms of Atlas Lab")
    group.addoption("--device", dest="atlas_device", choices=KINDS, default="interpreter", help="where kernels run")
    group.addoption(
        "--plugin", dest="atlas_plugins", action="append", default=[], metavar="./FILE.py|MODULE",
        help="with atlas_lab.testing.suite: a plugin to load, may be repeated",
    )  # fmt: skip
    group.addoption(
        "--arm", dest="atlas_arms", action="append", default=[], metavar="NAME|PATTERN",
        help="with atlas_lab.testing.suite: arms to test, may be repeated; all of the plugins' by default",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device, runs with --device=cuda")
    if "s" not in config.option.reportchars:
        config.option.reportchars += "s"
    missing = missing_gpu() if config.getoption("atlas_device") == "cuda" else ""
    if missing:
        raise pytest.UsageError(missing)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device_of(config) != "cuda":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


def device_of(config: pytest.Config) -> str:
    """`cuda` or `interpreter`; the latter without the plugin's options."""
    asked = str(config.getoption("atlas_device", "interpreter"))
    if asked == "auto":
        return "interpreter" if missing_gpu() else "cuda"
    return asked
