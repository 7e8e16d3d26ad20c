"""Tests of the kernel language compile into a cache of their own; without a compiler those that need it are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.runtime.device import Device, open_device


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    saved = os.environ.get("ATLAS_LAB_CACHE")
    os.environ["ATLAS_LAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if saved is None:
        del os.environ["ATLAS_LAB_CACHE"]
    else:
        os.environ["ATLAS_LAB_CACHE"] = saved


@pytest.fixture(scope="session")
def compiler() -> None:
    """The CUDA compiler; skips with its reason (where CI is set a skip is a failure)."""
    missing = L.compiler_missing()
    if missing:
        pytest.skip(missing)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device to run kernels on: the interpreter, and with `--device=cuda` a card."""
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param) as opened:
        yield opened
