"""Checks of an arm in a child process: an out-of-bounds write, an endless loop or a crash is that check's result, and
the rest goes on in the next child."""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from atlas_lab.core.registry import load_registry
from atlas_lab.experiments.checks import Check, run_check
from atlas_lab.experiments.parity import ParityResult
from atlas_lab.runtime import child
from atlas_lab.runtime.device import Device, open_device

START = 120.0  # seconds a child may take before its first check: imports, plugins, the device
EACH = 60.0  # seconds a check, compilation included


def run_isolated(
    arm: str,
    checks: Sequence[Check],
    plugins: Sequence[str] = (),
    base: Path | None = None,
    *,
    device: str = "cuda",
    each: float = EACH,
) -> Iterator[tuple[Check, ParityResult]]:
    """The checks' results, in order, from as many children as it takes.

    The child loads `arm` from what is installed and from `plugins`, as `load_registry` names them. A check that has not
    ended after `each` seconds is a failure.
    """
    left = list(checks)
    while left:
        done, crash = _ask(arm, left, plugins, base or Path.cwd(), device, each)
        yield from zip(left, done, strict=False)
        left = left[len(done) :]
        if crash is not None:
            # a child that did not come to its first check will not do so for the others
            failed = left if crash.startswith(NOT_STARTED) else left[:1]
            yield from ((check, ParityResult(False, crash.removeprefix(NOT_STARTED))) for check in failed)
            left = left[len(failed) :]


NOT_STARTED = "\0"


def _ask(
    arm: str, checks: Sequence[Check], plugins: Sequence[str], base: Path, device: str, each: float
) -> tuple[list[ParityResult], str | None]:
    """Results of the first checks, and the sentence of what ended the child before the rest."""
    with tempfile.TemporaryDirectory(prefix="atlas-lab-") as folder:
        arguments = {
            "folder": folder,
            "arm": arm,
            "checks": [c.to_json() for c in checks],
            "plugins": list(plugins),
            "base": os.fspath(base),
            "device": device,
            "each": each,
        }
        answer = child.call(f"{__name__}:answer", arguments, timeout=START + (each + 5) * len(checks))
        lines = _read(Path(folder, "results"))
        done = [ParityResult.of(json.loads(line)) for line in lines[1:]]
        if not isinstance(answer, child.Crash):
            return done, None
        if not lines:
            return done, f"{NOT_STARTED}{answer.sentence}"
        late = "".join(_read(Path(folder, "late")))
        return done, f"it had not ended after {each:g} seconds" if late else answer.sentence


def _read(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def answer(
    folder: str, arm: str, checks: list[dict[str, Any]], plugins: list[str], base: str, device: str, each: float
) -> None:
    """The child's side: a line for having started, then a line a result, written before the next check begins. After a
    check that lost the device it ends, for its parent to start another."""
    registry = load_registry(plugins, base=Path(base))
    mine, peers = registry.arm(arm), {e.arm.name: e.arm for e in registry.entries}
    with open_device(device) as opened, Path(folder, "results").open("w") as results:
        print("started", file=results, flush=True)
        for data in checks:
            found = _watched(lambda d=data: run_check(Check.of(d), mine, opened, peers), Path(folder, "late"), each)  # type: ignore[misc]
            print(json.dumps(found.to_json()), file=results, flush=True)
            if not found.ok and not _healthy(opened):
                return


def _watched(check: Callable[[], ParityResult], late: Path, each: float) -> ParityResult:
    """End the process, with a note in `late`, where the check does not; from C, so that no loop can prevent it."""
    with late.open("w") as note:
        faulthandler.dump_traceback_later(each, exit=True, file=note)
        try:
            return check()
        finally:
            faulthandler.cancel_dump_traceback_later()


def _healthy(device: Device) -> bool:
    try:
        device.free(device.allocate(256, "probe"))
        device.synchronize()
    except Exception:
        return False
    return True
