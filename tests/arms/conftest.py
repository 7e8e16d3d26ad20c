"""What tests of the GEMMs on warpgroups run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atlas_lab.core.target import shipped_targets
from atlas_lab.runtime.device import Device, open_device

HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A Hopper card on the interpreter, and the GPU with `--device=cuda`."""
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    with open_device(request.param, *([HOPPER] if request.param == "interpreter" else [])) as opened:
        yield opened
