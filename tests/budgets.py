"""A budget of seconds for each room's tests, summed over workers; a room over it fails the run where CI is set."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import PurePosixPath

import pytest

# Seconds on two cores with a cold compile cache: about three times what they take there alone.
BUDGETS = {
    "arms": 1300,
    "blocks": 150,
    "checkpoint": 120,
    "cli": 90,
    "copies": 120,
    "core": 90,
    "experiments": 240,
    "formats": 60,
    "lang": 150,
    "peers": 300,
    "plugins": 120,
    "runtime": 90,
    "simt": 60,
    "testing": 180,
}

_spent: Counter[str] = Counter()


def room_of(nodeid: str) -> str:
    """The folder below `tests/` that a test lies in; "" for a file of `tests/` itself."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else ""


def over(spent: Counter[str]) -> list[str]:
    """A sentence for each room over its budget, or without one."""
    out = []
    for room, seconds in sorted(spent.items()):
        if room and room not in BUDGETS:
            out.append(f"tests/{room} has no budget: give it one in tests/budgets.py")
        elif room and seconds > BUDGETS[room]:
            out.append(f"tests/{room} took {seconds:.0f} s, its budget is {BUDGETS[room]} s")
    return out


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[room_of(report.nodeid)] += report.duration


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    worker = hasattr(session.config, "workerinput")
    if not worker and exitstatus == 0 and os.environ.get("CI") and over(_spent):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rooms = ", ".join(f"{room} {seconds:.0f}" for room, seconds in _spent.most_common() if room and seconds >= 1)
    if rooms:
        terminalreporter.write_line(f"seconds a room: {rooms}")
    for sentence in over(_spent):
        terminalreporter.write_line(sentence, red=True)
