"""A registry with the toy arms beside the built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.target import shipped_targets
from atlas_lab.formats import FORMATS

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
