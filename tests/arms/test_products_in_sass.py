"""No product on warpgroups is lost between PTX and machine code: ptxas was seen to drop one, without a warning, whose
sums were read too late, and to leave `HGMMA ... RZ, gdesc[URZ]` in its place. With `--full` all kernels, else the
first of each family, which has the fewest registers left and is compiled for the arm's checks too."""

from __future__ import annotations

import re

import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.core.arm import kernels_of
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.compile import compiler_missing

KERNELS = {
    f"{k.spec.family} {dict(k.spec.parameters)}": k
    for arm in atlas_arms()
    for k in kernels_of(arm)
    if k.spec.family.startswith("wgmma_")
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted({k.spec.family for k in KERNELS.values()}))


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the CUDA compiler")
def test_products_of_ptx_are_in_machine_code(family: str, request: pytest.FixtureRequest) -> None:
    alike = [(n, k) for n, k in KERNELS.items() if k.spec.family == family]
    for name, kernel in alike if request.config.getoption("--full") else alike[:1]:
        asked = re.findall(r"wgmma\.mma_async\.", L.ptx(kernel, "sm_90a"))
        made = re.findall(r"[HQI]GMMA\.\S+ (\w+),", L.sass(kernel, "sm_90a"))
        assert len(made) == len(asked) > 0, name
        assert "RZ" not in made, name
