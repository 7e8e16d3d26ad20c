"""Kernels in a child process: one that writes out of bounds or never ends costs its cell, not the run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas_lab.experiments import config, settings
from atlas_lab.experiments.errors import sentence
from atlas_lab.experiments.numbers import Key, outputs
from atlas_lab.experiments.session import Session, open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime import child
from atlas_lab.runtime.device import open_device

START = 120.0  # seconds a child may take before its first step: imports, weights
EACH = 60.0  # seconds a step, compilation included
FOUND = "found"


def run(
    session: Session, variant: str, keys: Sequence[Key], seed: int, device: str = "cuda"
) -> Iterator[tuple[Key, np.ndarray | str]]:
    """The steps' outputs in order, or what went wrong, from as many children as it takes: one that dies is followed by
    another, which goes on after the step that killed it."""
    left = list(keys)
    while left:
        with tempfile.TemporaryDirectory(prefix="atlas-lab-") as folder:
            crash = _ask(session, variant, left, seed, device, folder)
            count = 0
            for count, found in enumerate(_read(Path(folder)), 1):
                yield left[count - 1], found
        left = left[count:]
        if crash is not None and left:
            yield left[0], crash
            left = left[1:]


def _ask(session: Session, variant: str, keys: Sequence[Key], seed: int, device: str, folder: str) -> str | None:
    """Have a child write outputs into `folder`; what ended it before its last."""
    arguments = {
        "folder": folder,
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
    return answer.sentence if isinstance(answer, child.Crash) else None


def _read(folder: Path) -> Iterator[np.ndarray | str]:
    """What a child found of each step, in order."""
    file = folder / FOUND
    for i, line in enumerate(file.read_text().splitlines() if file.exists() else ()):
        found = json.loads(line)
        if "sentence" in found:
            yield found["sentence"]
        else:
            yield np.load(folder / f"{i}.npy").view(dtype(found["dtype"]).numpy)


def answer(
    folder: str,
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
    """The child's side: the same session, opened anew; an output and a line a step, before the next begins."""
    loaded = config.load(Path(file))
    said = Said(sets, tuple(plugins), device, environment)
    registry = settings.registry_for(loaded, said.plugins)
    wanted = registry.target(loaded.config.target) if loaded.config.target else None
    with open_device(device, wanted, guards=True) as opened, Path(folder, FOUND).open("w") as lines:
        session = open_session(loaded, said, registry, name, opened.target, small=opened.name == "interpreter")
        held = session.file(variant)
        plan = session.numbers_plan(variant, held)
        asked: list[Key] = [(layer, role, m) for layer, role, m in keys]
        for i, (step, found) in enumerate(outputs(plan, held, opened, asked, seed)):
            line = {"sentence": sentence(found)} if isinstance(found, Exception) else {"dtype": step.call.y.data.dtype}
            if not isinstance(found, Exception):
                np.save(Path(folder, f"{i}.npy"), found.view(f"u{found.dtype.itemsize}"))
            print(json.dumps(line), file=lines, flush=True)
