"""Where CI is set, a skip that nobody expects is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

def test_passes(): pass
def test_skips(): pytest.skip("no luck")
@pytest.mark.skip(reason="never")
def test_never(): pass
@pytest.mark.parametrize("x", [])
def test_nothing(x): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.peers
def test_peers(): pytest.skip("torch is not installed")
@pytest.mark.xfail
def test_xfails(): assert False
"""


@pytest.fixture
def ours(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(SETTINGS.read_text())
    pytester.makeini("[pytest]\nmarkers = peers: x\n")
    pytester.makepyfile(test_skips=TESTS, test_module="import pytest\npytest.importorskip('no_such_module')\n")
    return pytester


def test_skips_are_skips(ours: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    ours.runpytest().assert_outcomes(passed=1, skipped=6, xfailed=1)


def test_and_failures_in_ci_but_for_gpu_and_peers(ours: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = ours.runpytest("--continue-on-collection-errors")
    result.assert_outcomes(passed=1, failed=1, errors=3, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*test_skips: skipped where CI is set: no luck",
            "*test_never: skipped where CI is set: never",
            "*test_nothing*: skipped where CI is set: got empty parameter set*",
            "test_module.py: skipped where CI is set: *no_such_module*",
        ]
    )
