"""Parity in a child process: a kernel that writes out of bounds or never ends costs its cell, not the run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atlas_lab.experiments import config, settings
from atlas_lab.experiments.numbers import Judge, Key, Numbers, run_steps
from atlas_lab.experiments.results import AccuracyResult, ParityResult
from atlas_lab.experiments.session import Session, open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.runtime import child
from atlas_lab.runtime.device import open_device

START = 120.0  # seconds a child may take before its first step: imports, weights
EACH = 60.0  # seconds a step, compilation included


def run(
    session: Session, variant: str, keys: Sequence[Key], seed: int, device: str = "cuda"
) -> Iterator[tuple[Key, Numbers | str]]:
    """The steps' numbers in order, from as many children as it takes: one that dies is followed by another, which goes
    on after the step that killed it."""
    left = list(keys)
    while left:
        done, crash = _ask(session, variant, left, seed, device)
        yield from zip(left, done, strict=False)
        left = left[len(done) :]
        if crash is not None and left:
            yield left[0], crash
            left = left[1:]


def _ask(
    session: Session, variant: str, keys: Sequence[Key], seed: int, device: str
) -> tuple[list[Numbers | str], str | None]:
    """What a child had to say of the first steps, and what ended it before the rest."""
    with tempfile.TemporaryDirectory(prefix="atlas-lab-") as folder:
        file = Path(folder, "found")
        arguments = {
            "found": os.fspath(file),
            "file": os.fspath(session.loaded.source.path.resolve()),
            "sets": dict(session.said.sets),
            "plugins": list(session.said.plugins),
            "device": device,
            "environment": dict(session.said.environment),
            "name": session.name,
            "variant": variant,
            "keys": [list(k) for k in keys],
            "seed": seed,
        }
        answer = child.call(f"{__name__}:answer", arguments, timeout=START + EACH * len(keys))
        lines = file.read_text().splitlines() if file.exists() else []
        crash = answer.sentence if isinstance(answer, child.Crash) else None
        return [_numbers(json.loads(line)) for line in lines], crash


def answer(
    found: str,
    file: str,
    sets: dict[str, str],
    plugins: list[str],
    device: str,
    environment: dict[str, str],
    name: str,
    variant: str,
    keys: list[list[Any]],
    seed: int,
) -> None:
    """The child's side: the same session, opened anew; a line a step, written before the next begins."""
    loaded = config.load(Path(file))
    said = Said(sets, tuple(plugins), device, environment)
    registry = settings.registry_for(loaded, said.plugins)
    wanted = registry.target(loaded.config.target) if loaded.config.target else None
    with open_device(device, wanted, guards=True) as opened, Path(found).open("w") as lines:
        session = open_session(loaded, said, registry, name, opened.target, small=opened.name == "interpreter")
        held = session.file(variant)
        plan = session.numbers_plan(variant, held)
        judge = Judge(registry, plan, held, session.reference_file())
        asked: list[Key] = [(layer, role, m) for layer, role, m in keys]
        for _, one in run_steps(plan, held, judge, opened, asked, seed):
            print(json.dumps(_plain(one)), file=lines, flush=True)


def _plain(found: Numbers | Exception) -> Any:
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    return {
        "parity": found.parity.model_dump(),
        "accuracy": found.accuracy.model_dump(),
        "digest": found.digest,
    }


def _numbers(found: Any) -> Numbers | str:
    if isinstance(found, str):
        return found
    return Numbers(
        ParityResult.model_validate(found["parity"]),
        AccuracyResult.model_validate(found["accuracy"]),
        found["digest"],
    )
