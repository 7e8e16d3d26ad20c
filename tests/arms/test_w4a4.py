"""NVFP4 times NVFP4 on FP4 tensor cores: every tile, ragged edges, a checkpoint's scale, the same numbers on Hopper."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms import w4a4 as arms
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import case as cases
from atlas_lab.experiments import parity, values
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run_case
from atlas_lab.kernels.gemm import nvfp4_w4a4 as kernels
from atlas_lab.runtime.device import open_device

ARMS = {a.name: a for a in atlas_arms()}
ARM, EMULATED = ARMS["nvfp4_w4a4"], ARMS["nvfp4_w4a4_emulated"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
BLACKWELL = next(t for t in shipped_targets() if t.arch == "sm_120a")
SHAPES = [(17, 8, 64), (67, 130, 192), (129, 33, 320), (64, 1, 448)]


def case_of(m: int, n: int, k: int, form: str = "nvfp4", **more) -> Case:
    return Case(ARM.name, ("ffn.up",), m, n, k, form, **more)


@pytest.mark.parametrize(
    ("m", "n", "k", "form"),
    [
        *((*shape, "nvfp4") for shape in SHAPES),
        (*SHAPES[0], "nvfp4_ct"),
        *(pytest.param(*shape, "nvfp4_ct", marks=pytest.mark.full) for shape in SHAPES[1:]),
    ],
)
def test_awkward_shapes(m: int, n: int, k: int, form: str) -> None:
    with open_device("interpreter", BLACKWELL) as device:
        result = run_case(case_of(m, n, k, form), ARM, device, base_context(BLACKWELL))
    assert result.ok, result.sentence


@pytest.mark.full
def test_the_large_tile_where_it_gives_every_multiprocessor_one() -> None:
    target = replace(BLACKWELL, sms=4)
    base, found = base_context(target), {}
    for m, n in ((200, 200), (200, 99), (64, 400), (129, 130)):
        case = case_of(m, n, 320)
        parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
        found[m, n] = parameters["bm"], parameters["pairs"]
        with open_device("interpreter", target) as device:
            result = run_case(case, ARM, device, base)
        assert result.ok, result.sentence
    assert found == {(200, 200): (128, True), (200, 99): (64, False), (64, 400): (64, True), (129, 130): (128, True)}


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.full), 0.0123])
def test_the_same_numbers_as_on_hopper(scale: float, monkeypatch) -> None:
    """Within what either may lose in its sums, with and without a tensor scale of activations."""
    if scale:
        of_weight, of_read, held = cases.weight_source, values.Stored.read, np.float32([scale])
        named = "input_scale"

        def weight_source(prefix: str, case: Case):
            t = cases.Tensor("f32", (1,), f"{prefix}.{named}")
            return replace(of_weight(prefix, case), activation=((named, t),))

        monkeypatch.setattr(cases, "weight_source", weight_source)
        monkeypatch.setattr(values.Stored, "read", lambda s, t: held if t.name.endswith(named) else of_read(s, t))
    ran = []
    for arm, target in ((ARM, BLACKWELL), (EMULATED, HOPPER)):
        case = replace(case_of(21, 40, 256), arm=arm.name)
        with open_device("interpreter", target) as device:
            result = run_case(case, arm, device, base_context(target))
            assert result.ok, result.sentence
            ran.append(parity.run(case, arm, device, base_context(target)).out.astype(np.float64))
    native, emulated = ran
    assert np.abs(native - emulated).max() <= 2.0**-7 * np.abs(emulated).max()
    assert np.mean(native == emulated) > 0.99


def test_hopper_is_told_what_to_use_there() -> None:
    verdict = verdict_of(case_of(17, 8, 64), ARM, base_context(HOPPER))
    assert not verdict
    assert "needs sm_120a; elsewhere use nvfp4_w4a4_emulated" in str(verdict)


def test_weights_whose_scales_do_not_come_in_words_are_refused() -> None:
    assert "K must be a multiple of 64" in str(verdict_of(case_of(17, 8, 96), ARM, base_context(BLACKWELL)))


def test_a_stage_that_is_overwritten_while_it_is_read_is_reported(monkeypatch) -> None:
    """With no barrier between stages a fast warp's copies land under a slow one's loads."""
    monkeypatch.setattr(kernels, "cuda", SimpleNamespace(syncthreads=lambda: None))
    faulty = kernels.gemm_nvfp4_w4a4.__wrapped__(64, 128, 2, 4, 4)
    lower = ARM.lower
    monkeypatch.setattr(ARM, "kernels", (*ARM.kernels, faulty))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=faulty)])
    with open_device("interpreter", BLACKWELL) as device, pytest.raises(simt.SimtError, match="nvfp4_w4a4"):
        parity.run(case_of(64, 128, 1024), ARM, device, base_context(BLACKWELL))


def test_tiles_fit_a_block() -> None:
    for t in (arms.LARGE, arms.SMALL):
        assert t.stages * kernels.stage_bytes(t.bm, t.bn) <= BLACKWELL.shared_per_block
