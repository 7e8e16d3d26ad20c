"""A budget of seconds for each room's tests, summed over workers; a room over it fails the run where CI is set.

Before every test a loop is timed: where it takes longer than on an idle machine, budgets are as many times as large.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import PurePosixPath

import pytest

# Seconds on two cores with a cold compile cache, with room for a slow machine.
BUDGETS = {
    "arms": 1500,
    "blocks": 180,
    "checkpoint": 120,
    "cli": 90,
    "copies": 120,
    "core": 90,
    "experiments": 240,
    "formats": 60,
    "lang": 120,
    "peers": 300,
    "plugins": 120,
    "runtime": 90,
    "simt": 60,
    "testing": 200,
}

TURNS, IDLE = 20_000, 5e-4  # of the loop, and its seconds on an idle machine

_spent: Counter[str] = Counter()
_loops: list[float] = []


def room_of(nodeid: str) -> str:
    """The folder below `tests/` that a test lies in; "" for a file of `tests/` itself."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else ""


def pace(loops: list[float]) -> float:
    """How many times as long as on an idle machine the loops took; at least 1."""
    return max(1.0, sum(loops) / len(loops) / IDLE) if loops else 1.0


def over(spent: Counter[str], times: float = 1.0) -> list[str]:
    """A sentence for each room over its budget, so many times as large, or without one."""
    out = []
    for room, seconds in sorted(spent.items()):
        if room and room not in BUDGETS:
            out.append(f"tests/{room} has no budget: give it one in tests/budgets.py")
        elif room and seconds > times * BUDGETS[room]:
            out.append(f"tests/{room} took {seconds:.0f} s, its budget is {times * BUDGETS[room]:.0f} s")
    return out


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begin = time.perf_counter()
    for _ in range(TURNS):
        pass
    item.user_properties.append(("loop", time.perf_counter() - begin))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[room_of(report.nodeid)] += report.duration
    if report.when == "setup":
        _loops.extend(float(seconds) for name, seconds in report.user_properties if name == "loop")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    worker = hasattr(session.config, "workerinput")
    if not worker and exitstatus == 0 and os.environ.get("CI") and over(_spent, pace(_loops)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rooms = ", ".join(f"{room} {seconds:.0f}" for room, seconds in _spent.most_common() if room and seconds >= 1)
    if rooms:
        terminalreporter.write_line(f"seconds a room, at {pace(_loops):.1f} times those of an idle machine: {rooms}")
    for sentence in over(_spent, pace(_loops)):
        terminalreporter.write_line(sentence, red=True)
