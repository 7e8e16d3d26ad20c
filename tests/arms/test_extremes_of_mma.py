"""Stored values that are legal and far from what quantizers make: scales that cancel, overflow halfway, or vanish."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import values
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import ParityResult, run_case
from atlas_lab.formats.q4_k import pack_scales
from atlas_lab.runtime.device import open_device

H200 = shipped_targets()[0]
ARMS = {a.name: a for a in atlas_arms()}
NVFP4 = ["nvfp4_mma", "nvfp4_mma_repacked", "nvfp4_wgmma", "nvfp4_wgmma_fp8", "nvfp4_wgmma_w4a8", "nvfp4_wgmma_int8"]
Spoil = Callable[[str, np.ndarray], np.ndarray]


def parity(monkeypatch: pytest.MonkeyPatch, case: Case, spoil: Spoil, x_times: float = 1) -> ParityResult:
    made, drawn = values.Stored.__init__, values.activations

    def stored(self: values.Stored, *args) -> None:
        made(self, *args)
        self.arrays = {name: spoil(name, a) for name, a in self.arrays.items()}

    def activations(case: Case, m: int | None = None) -> np.ndarray:
        return (drawn(case, m).astype(np.float32) * np.float32(x_times)).astype(ml_dtypes.bfloat16)

    monkeypatch.setattr(values.Stored, "__init__", stored)
    monkeypatch.setattr(values, "activations", activations)
    with open_device("interpreter", H200) as device:
        return run_case(case, ARMS[case.arm], device, base_context(H200))


@pytest.mark.parametrize("arm", ["q4k_mma", "q4k_mma_repacked", "q4k_gemv"])
@pytest.mark.parametrize(("d", "dmin", "m", "q"), [(1, 0, 0, 0), (1, 2.0**-14, 1, 0), (1, 15, 63, 15)])
def test_q4_k_weights_that_cancel(arm: str, d: float, dmin: float, m: int, q: int, monkeypatch) -> None:
    def spoil(_: str, a: np.ndarray) -> np.ndarray:
        blocks = np.full((a.size // 144, 144), q | q << 4, np.uint8)
        blocks[:, :4] = np.array([d, dmin], np.float16).view(np.uint8)
        blocks[:, 4:16] = pack_scales(*(np.full((len(blocks), 8), v, np.uint8) for v in (63, m)))
        return blocks.reshape(a.shape)

    found = parity(monkeypatch, Case(arm, ("ffn.up",), 3, 32, 256, "q4_k", values="plain"), spoil)
    assert found.ok, found.sentence


@pytest.mark.parametrize(("arm", "m"), [(a, 3 if "mma" in a.split("_") else 17) for a in NVFP4])
@pytest.mark.parametrize(("form", "scale"), [("nvfp4", 2e36), ("nvfp4_ct", 1e-37)])
def test_tensor_scales_near_the_ends_of_float32(arm: str, m: int, form: str, scale: float, monkeypatch) -> None:
    def spoil(name: str, a: np.ndarray) -> np.ndarray:
        return np.full(a.shape, scale, np.float32) if name.endswith("global_scale") else a

    found = parity(monkeypatch, Case(arm, ("ffn.up",), m, 16, 128, form), spoil, x_times=2.0**-100)
    assert found.ok, found.sentence


@pytest.mark.parametrize("arm", ["nvfp4_gemv", *NVFP4])
def test_every_block_scale_and_the_code_of_minus_zero(arm: str, monkeypatch) -> None:
    def spoil(name: str, a: np.ndarray) -> np.ndarray:
        if name.endswith(".scale"):  # 0, the denormals 1 to 7, and on
            return (np.arange(a.size) % 127).astype(np.uint8).reshape(a.shape).view(a.dtype)
        if name.endswith(".weight"):
            a = a.copy()
            a[:, ::3] = 0x88
        return a

    for m in (3, 13, 17):
        if m in ARMS[arm].rows:
            found = parity(monkeypatch, Case(arm, ("ffn.up",), m, 24, 256, "nvfp4"), spoil)
            assert found.ok, found.sentence
