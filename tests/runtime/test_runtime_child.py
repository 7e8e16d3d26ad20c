"""Child processes: results, and every way of not having one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from atlas_lab.runtime.child import Crash, call


def test_a_result_comes_back_from_another_process():
    result = call("runtime_children:add", {"a": 2, "b": 3}, timeout=60)
    assert result["sum"] == 5
    assert result["pid"] != os.getpid()


def test_positional_arguments_and_what_is_printed(capfd):
    assert call("runtime_children:add", [2], timeout=60)["sum"] == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "added 2 0" in err


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (
            "runtime_children:refuse",
            ["no, never"],
            "runtime_children:refuse raised ValueError: no, never (runtime_children.py:",
        ),
        ("runtime_children:nothing", [], "runtime_children:nothing raised AttributeError: module 'runtime_children'"),
        ("no_such_module:f", [], "no_such_module:f raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("runtime_children:unspeakable", [], "raised TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_an_exception_is_its_sentence(function, arguments, sentence):
    crash = call(function, arguments, timeout=60)
    assert isinstance(crash, Crash)
    assert crash.kind == "error"
    assert sentence in crash.sentence


def test_an_exit_is_its_status_and_last_words():
    crash = call("runtime_children:leave", [139], timeout=60)
    assert crash == Crash("exit", "runtime_children:leave died with exit status 139 and no result, saying: about to go")


def test_an_exit_with_status_0_is_a_crash_too():
    assert "with exit status 0 and no result" in call("runtime_children:leave", [0], timeout=60).sentence


def test_a_signal_is_named():
    crash = call("runtime_children:die", timeout=60)
    assert crash.kind == "exit"
    assert crash.sentence.startswith("runtime_children:die died of SIGSEGV")


def test_what_takes_too_long_is_killed_with_its_children(tmp_path):
    # Waiting for a pid file, and not for the clock, keeps a slow machine from failing this.
    pid_file = tmp_path / "pid"
    begin = time.monotonic()
    crash = call("runtime_children:sleep_in_a_grandchild", [300, str(pid_file)], timeout=4)
    assert time.monotonic() - begin < 60
    assert crash.kind == "timeout"
    assert crash.sentence == "runtime_children:sleep_in_a_grandchild had not ended after 4 seconds"
    assert _gone(int(pid_file.read_text()))


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            # A killed orphan may stay a zombie where nothing reaps it.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_arguments_that_json_cannot_hold_are_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        call("runtime_children:add", [object()], timeout=1)
