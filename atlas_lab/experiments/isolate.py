"""Parity in a child process: a kernel that writes out of bounds or never ends costs its cell, not the run."""

from __future__ import annotations

import os
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

START = 120.0  # seconds a child may take before its first step: imports, weights, compilation
EACH = 60.0  # seconds a step


def run(
    session: Session, variant: str, keys: Sequence[Key], seed: int, device: str = "cuda"
) -> Iterator[tuple[Key, Numbers | str]]:
    """The steps' numbers from children: all in one, and after a crash each in one of its own, to find whose it is."""
    left = list(keys)
    while left:
        answer = _ask(session, variant, left, seed, device)
        if isinstance(answer, child.Crash):
            if len(left) == 1:
                yield left[0], answer.sentence
                return
            for key in left:
                yield from run(session, variant, [key], seed, device)
            return
        for key, found in answer:
            yield key, found
        left = left[len(answer) :]


def _ask(
    session: Session, variant: str, keys: Sequence[Key], seed: int, device: str
) -> list[tuple[Key, Numbers | str]] | child.Crash:
    arguments = {
        "file": os.fspath(session.loaded.source.path.resolve()),
        "said": {
            "sets": dict(session.said.sets),
            "plugins": list(session.said.plugins),
            "device": device,
            "environment": dict(session.said.environment),
        },
        "name": session.name,
        "variant": variant,
        "keys": [list(k) for k in keys],
        "seed": seed,
    }
    answer = child.call(f"{__name__}:answer", arguments, timeout=START + EACH * len(keys))
    if isinstance(answer, child.Crash):
        return answer
    return [((layer, role, m), _numbers(found)) for (layer, role, m), found in answer]


def answer(
    file: str, said: dict[str, Any], name: str, variant: str, keys: list[list[Any]], seed: int
) -> list[tuple[list[Any], Any]]:
    """The child's side: the same session, opened anew; steps until one fails, which ends the context."""
    loaded = config.load(Path(file))
    told = Said(said["sets"], tuple(said["plugins"]), said["device"], said["environment"])
    registry = settings.registry_for(loaded, told.plugins)
    wanted = registry.target(loaded.config.target) if loaded.config.target else None
    with open_device(told.device, wanted, guards=True) as device:
        session = open_session(loaded, told, registry, name, device.target, small=device.name == "interpreter")
        held = session.file(variant)
        plan = session.numbers_plan(variant, held)
        judge = Judge(registry, plan, held, session.reference_file())
        out: list[tuple[list[Any], Any]] = []
        asked: list[Key] = [(layer, role, m) for layer, role, m in keys]
        for step, found in run_steps(plan, held, judge, device, asked, seed):
            out.append((list(step.key), _plain(found)))
        return out


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
