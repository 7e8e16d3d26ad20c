"""NVFP4 made BF16 exactly: which arms give `nvfp4_gemm`'s bits (the lossless class), and which its weights alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.nvfp4 import TILES
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle, values
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import run
from atlas_lab.runtime.device import open_device

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def product(name: str, m: int, n: int, k: int) -> np.ndarray:
    with open_device("interpreter", HOPPER) as device:
        return run(Case(name, ("ffn.up",), m, n, k, "nvfp4"), ARMS[name], device, base_context(HOPPER)).out


@pytest.fixture
def cancelling(monkeypatch) -> None:
    """Weights of 1; of x, 2^30 at K 0, its negative at 4, 1 at 8: what comes out tells which of them were added first.
    One product of 16 is exact, its sum is rounded to float32, in which 2^30 + 1 is 2^30."""
    made = values.Stored.__init__

    def ones(self: values.Stored, *args) -> None:
        made(self, *args)
        for name, a in self.arrays.items():
            if name.endswith(".weight"):
                a[...] = 0x22
            elif name.endswith(".scale"):
                a[...] = 1
            else:
                a[...] = np.float32(1)

    def x(case: Case, m: int | None = None) -> np.ndarray:
        out = np.zeros((case.m if m is None else m, case.k), ml_dtypes.bfloat16)
        out[:, [0, 4, 8]] = 2.0**30, -(2.0**30), 1
        return out

    monkeypatch.setattr(values.Stored, "__init__", ones)
    monkeypatch.setattr(values, "activations", x)


def test_every_tile_of_the_gemm_has_the_same_bits(monkeypatch) -> None:
    outputs = []
    for tile in TILES[:3]:
        monkeypatch.setattr("atlas_lab.arms.nvfp4.tile_for", lambda *a, t=tile: t)
        outputs.append(product("nvfp4_gemm", 17, 72, 256))
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


@pytest.mark.parametrize("m", [17, 513])
def test_on_warpgroups_weights_are_as_exact_and_k_is_added_in_another_order(m: int, cancelling, monkeypatch) -> None:
    """The GEMM adds K 8t to 8t + 3 of 32 first, then 8t + 4 to 8t + 7; warpgroups add K 16t + 4j to 16t + 4j + 3 of 64
    by j, and past 512 rows 16 neighbours after 16."""
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    if m == 17:
        assert not product("nvfp4_gemm", m, 8, 128).astype(np.float32).any()
    assert (product("nvfp4_wgmma", m, 8, 128).astype(np.float32) == 1).all()
