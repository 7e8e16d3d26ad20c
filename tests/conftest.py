"""Settings of every test: reproducible property tests, and no silent skips in CI."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# For their own tests; `--device` and the marker `gpu` for all; seconds a room.
pytest_plugins = ["pytester", "atlas_lab.testing", "budgets"]

COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("atlas-lab", derandomize=True, **COMMON)  # the same examples in every run
settings.register_profile("thorough", max_examples=1000, **COMMON)  # fresh ones: `make test-full`
settings.load_profile("atlas-lab")

# Numba makes many objects that live on: by default a fifth of a compilation is looking for garbage among them.
gc.set_threshold(50_000, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all there is: kernels, architectures, tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full`, but for `--full` and a GPU: the parity suite covers these arms too."""
    if config.getoption("--full") or config.getoption("--device") == "cuda":
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


# The only tests that may be skipped where CI is set, by marker: no GPU there, and peers are compared by
# `make test-peers`.
MAY_SKIP = ("gpu", "peers")


def _unexpected(report: Any, of: str, reason: object) -> None:
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{of}: skipped where CI is set: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if not hasattr(report, "wasxfail") and not any(item.get_closest_marker(name) for name in MAY_SKIP):
        _unexpected(report, item.nodeid, call.excinfo and call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    _unexpected(report, collector.nodeid, report.longrepr[-1] if isinstance(report.longrepr, tuple) else "")
    return report
