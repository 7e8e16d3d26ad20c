"""Settings of every test: reproducible property tests, and no silent skips in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "atlas-lab", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("atlas-lab")

# The only reasons for which a test may be skipped when CI is set, by their first words.
ALLOWED_SKIPS = (
    "needs --device=cuda",  # no GPU in CI
    "needs the extra `peers`",  # compared live by `make test-peers`
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") and call.excinfo is not None:
        reason = str(call.excinfo.value)
        if not reason.startswith(ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: skipped where CI is set, and the reason is not allowed: {reason}"
    return report


