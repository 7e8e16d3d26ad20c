"""Running a function in a process of its own: what crashes or never ends there is a result here.

An out-of-bounds write poisons a GPU context for good, and an endless kernel cannot be stopped from inside its
process; so what may do either runs in a child, named by `module:function`, with JSON in and out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from atlas_lab.runtime.errors import DeviceError

REAP = 30.0  # seconds a killed child may take to die: a driver gives its GPU work up first
TAIL = 300  # characters of the child's stderr that a sentence quotes


@dataclass(frozen=True)
class Crash:
    """No result: the child ran out of time (`timeout`), died (`exit`), or its function raised (`error`)."""

    kind: Literal["timeout", "exit", "error"]
    sentence: str


def call(function: str, arguments: Mapping[str, Any] | Sequence[Any] = (), *, timeout: float) -> Any:
    """The result of `function` (`module:function`) called in a child with keyword or positional `arguments`, or a
    Crash.

    Arguments and result are what JSON holds. `timeout` is in seconds and covers the child's start, which imports
    the module anew. When it is over, or the caller is interrupted, the child and its own children are killed. What it
    prints goes to stderr. Raises TypeError or ValueError for arguments that JSON cannot hold.
    """
    request = json.dumps({"function": function, "arguments": arguments})
    environment = dict(os.environ)
    # The child imports what this process can import, from the same places.
    environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    with tempfile.TemporaryDirectory(prefix="atlas-lab-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, str(answer)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        late = ""
        try:
            child.communicate(request.encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            late = f"{function} had not ended after {timeout:g} seconds"
        finally:
            stuck = _kill(child)
        said = log.read_text(errors="replace")
        sys.stderr.write(said)
        if late:
            return Crash("timeout", late + stuck)
        if not answer.exists():
            return Crash("exit", f"{function} died {_death(child.returncode)}{_tail(said)}")
        reply = json.loads(answer.read_text())
        return reply["result"] if reply["ok"] else Crash("error", reply["sentence"])


def _kill(child: subprocess.Popen[bytes]) -> str:
    """Kill the child, if it still runs, with its process group; says so if it does not die."""
    if child.poll() is not None:
        return ""  # its number may be another's by now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(REAP)
    except subprocess.TimeoutExpired:
        return f", and process {child.pid} did not die within {REAP:g} seconds of being killed"
    finally:
        if child.stdin:
            with suppress(OSError):
                child.stdin.close()
    return ""


def _death(status: int) -> str:
    if status >= 0:
        return f"with exit status {status} and no result"
    with suppress(ValueError):
        return f"of {signal.Signals(-status).name}"
    return f"of signal {-status}"


def _tail(said: str) -> str:
    text = " ".join(said.split())
    return f", saying: {text[-TAIL:]}" if text else ""


def _main(answer: Path) -> None:
    """The child: the request from stdin, the reply to `answer`, renamed into place when whole."""
    request = json.loads(sys.stdin.read())
    reply: dict[str, Any]
    try:
        module, _, name = request["function"].partition(":")
        target = getattr(import_module(module), name)
        arguments = request["arguments"]
        result = target(**arguments) if isinstance(arguments, dict) else target(*arguments)
        reply = {"ok": True, "result": result}
        text = json.dumps(reply)
    except Exception as e:
        sentence = f"{request['function']} raised {type(e).__name__}: {e}"
        if not isinstance(e, DeviceError):
            *_, last = traceback.extract_tb(e.__traceback__)
            sentence += f" ({Path(last.filename).name}:{last.lineno})"
        text = json.dumps({"ok": False, "sentence": sentence})
    part = answer.with_suffix(".part")
    part.write_text(text)
    part.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # A context that failed may hang or crash while the interpreter takes it down; the answer is already there.
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
