"""A registry with the toy arms beside the built-in ones, and a clock that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import timed
from atlas_lab.formats import FORMATS
from atlas_lab.runtime import probe, timing

US = {"ours": 10.0, "read": 7.0, "read ahead": 6.0, "peer": 9.0}
TOYS = Path(__file__).parent / "toy_arms.py"
PLAIN = ("bf16_gemv", "bf16_gemm", "fp8_gemv", "fp8_gemm", "nvfp4_gemv", "nvfp4_gemm")


@pytest.fixture(scope="session")
def registry() -> Registry:
    made = load_registry([str(TOYS)])
    made.targets = {**{t.name: t for t in shipped_targets()}, **made.targets}
    made.formats = {**FORMATS, **made.formats}
    return made


@pytest.fixture(scope="session")
def model_registry() -> Registry:
    """Six built-in arms, whatever else is built in by now, and arms that only plan."""
    made = load_registry([str(Path(__file__).parent / "whole_model_arms.py")])
    made.entries = [e for e in made.entries if e.arm.name in PLAIN or e.arm.name.startswith("fake_")]
    return made


@pytest.fixture
def bench_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A clock that says `US`; what was alternated together."""
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path))
    together: list[list[str]] = []

    def measure(device, timed_, *, rounds, seed):
        together.append([t.name for t in timed_])
        return SimpleNamespace(blocks=lambda name: np.full(rounds, US[name] / 1e6))

    def rotate(name, programs):
        programs[-1].run()
        return SimpleNamespace(name=name, keep=SimpleNamespace(close=lambda: None))

    class Reader:
        def __init__(self, device, nbytes, name, readings=probe.READINGS):
            self.reading = readings[0]
            self.timed, self.ahead = SimpleNamespace(name=name), SimpleNamespace(name=f"{name} ahead")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "rotate", rotate)
    monkeypatch.setattr(timed, "MOST_SETS", 2)
    monkeypatch.setattr(probe, "Reader", Reader)
    return together
