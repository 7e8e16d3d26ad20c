"""GEMMs on warpgroups whose epilogue adds: a LoRA addend and a residual, in FP32, each once and each row its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from epilogues import planned, run_adding

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.nvfp4 import adds
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.call import Epilogue
from atlas_lab.core.program import PlanError, program_of
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.kernels.gemm.wgmma_bf16 import wgmma_bf16
from atlas_lab.kernels.gemm.wgmma_fp8 import wgmma_fp8
from atlas_lab.kernels.gemm.wgmma_nvfp4 import wgmma_nvfp4
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMATS = {"bf16_wgmma": "bf16", "fp8_wgmma_w8a8": "fp8", "nvfp4_wgmma": "nvfp4"}
STEP = {name: 64 if name == "bf16_wgmma" else 128 for name in FORMATS}  # K of a stage
FULL = pytest.mark.full
BOTH = ("lora", "residual")
EACH = pytest.mark.parametrize("name", FORMATS)
OF_THEIRS = {"q2_dequant": "q2_0_g128", "nvfp4_w4a4_emulated": "nvfp4"}  # arms on the same kernels


def case_of(name: str, m: int, n: int, k: int, **form: int) -> Case:
    return Case(name, ("ffn.up",), m, n, k, (FORMATS | OF_THEIRS)[name], setting=tuple(form.items()))


SHAPES = [(17, 77, 128), (33, 96, 256), (67, 44, 128), (129, 264, 384)]


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        pytest.param(name, *s, marks=() if s == SHAPES[0] or (s == SHAPES[2] and name == "bf16_wgmma") else FULL)
        for name in FORMATS
        for s in SHAPES
    ],
)
def test_both_addends_on_awkward_shapes(name: str, m: int, n: int, k: int, device) -> None:
    ran = run_adding(case_of(name, m, n, k), ARMS[name], device, base_context(device.target), BOTH)
    found = ran.compared()
    assert found.ok, str(found)
    parameters = dict(ran.program.launches[-1].kernel.spec.parameters)
    assert parameters["epilogue"] == "addends"


@pytest.mark.parametrize("part", BOTH)
@pytest.mark.parametrize("name", ["bf16_wgmma", *(pytest.param(n, marks=FULL) for n in list(FORMATS)[1:])])
def test_one_addend(name: str, part: str, device) -> None:
    found = run_adding(case_of(name, 18, 40, 128), ARMS[name], device, base_context(device.target), [part]).compared()
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["q2_dequant", pytest.param("nvfp4_w4a4_emulated", marks=FULL)])
def test_arms_that_launch_these_kernels_for_other_operands(name: str, device) -> None:
    """After a launch that makes W, and after one that quantizes x."""
    found = run_adding(case_of(name, 17, 48, 128), ARMS[name], device, base_context(device.target), BOTH).compared()
    assert found.ok, str(found)


def test_an_arm_that_says_that_it_adds_and_does_not_is_refused(monkeypatch) -> None:
    arm = ARMS["fp8_wgmma"]
    monkeypatch.setattr(arm, "epilogues", ("residual",))
    call, _ = planned(Case("fp8_wgmma", ("ffn.up",), 40, 136, 256, "fp8"), arm, base_context(HOPPER), ["residual"])
    with pytest.raises(
        PlanError, match=r"no launch of arm fp8_wgmma reads .*/residual: bf16\[40, 136\], which it says"
    ):
        program_of(arm, call)


@FULL
@pytest.mark.parametrize("m", [61, 131])
@EACH
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(name: str, m: int, monkeypatch) -> None:
    arm = ARMS[name]
    for t in (t for t in arm.tiles()[m > 64] if t.split == 1 and (name != "nvfp4_wgmma" or adds(t))):
        target = replace(HOPPER, sms=t.cluster)
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        case = case_of(name, m, t.bn * t.across + (8 if t.bn % 64 else 3), STEP[name] * 3)
        with open_device("interpreter", target) as device:
            found = run_adding(case, arm, device, base_context(target), BOTH).compared()
        assert found.ok, f"{t}: {found}"


@pytest.mark.parametrize("name", ["bf16_wgmma", *(pytest.param(n, marks=FULL) for n in list(FORMATS)[1:])])
def test_the_block_that_ends_a_cut_tile_adds(name: str, monkeypatch) -> None:
    """Three blocks share two tiles; an addend that each added would be in y three times or twice."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    arm, target = ARMS[name], replace(HOPPER, sms=3)
    made = arm.made(64, 64) if isinstance(arm, Transposed) else arm._tile(64, 64)
    monkeypatch.setattr(arm, "tile", lambda c: made)
    with open_device("interpreter", target) as device:
        found = run_adding(case_of(name, 33, 120, 12 * STEP[name]), arm, device, base_context(target), BOTH)
    assert found.compared().ok, str(found.compared())


@pytest.mark.parametrize("name", ["bf16_wgmma", *(pytest.param(n, marks=FULL) for n in list(FORMATS)[1:])])
def test_the_block_of_a_cluster_that_has_all_sums_adds(name: str) -> None:
    arm = ARMS[name]
    bn, split = arm.splits[-1]
    case = case_of(name, 20, 2 * bn - 24, 3 * STEP[name], columns=bn, split=split)
    device = InterpreterDevice(HOPPER, seed=1, options=Options(order="random", late_async="random"))
    found = run_adding(case, arm, device, base_context(HOPPER), BOTH)
    assert found.compared().ok, str(found.compared())
    assert dict(found.program.launches[-1].kernel.spec.parameters)["split"] == split


@pytest.mark.parametrize("name", ["bf16_wgmma", *(pytest.param(n, marks=FULL) for n in list(FORMATS)[1:])])
def test_what_is_added_wrongly_is_seen(name: str, device) -> None:
    """A row of another token, one that is missing, one added twice, two addends exchanged for one another's rows."""
    ran = run_adding(case_of(name, 17, 40, 128), ARMS[name], device, base_context(device.target), BOTH)
    assert ran.compared().ok
    for part in BOTH:
        given = ran.addends[part]
        row = given.copy()
        row[3] = given[4]
        for wrong in (row, np.roll(given, 1, axis=0), np.roll(given, 1, axis=1), np.zeros_like(given), 2 * given):
            assert not ran.compared(**{part: wrong}).ok


def test_tiles_that_would_spill_leave_addends_to_others() -> None:
    for name in ("nvfp4_wgmma", "nvfp4_w4a4_emulated"):
        arm, base = ARMS[name], base_context(HOPPER)
        for m in (65, 96, 128, 200, 500):
            case = Case(name, ("ffn.up",), m, 17408, 5120, "nvfp4")
            (*_, last) = program_of(arm, planned(case, arm, base, ["residual"])[0]).launches
            parameters = dict(last.kernel.spec.parameters)
            assert (parameters["epilogue"], parameters["bn"]) == ("addends", 128)


@EACH
def test_no_addend_launches_what_it_always_did(name: str) -> None:
    arm, base = ARMS[name], base_context(HOPPER)
    call, _ = planned(case_of(name, 40, 136, 256), arm, base, ())
    kernels = [x.kernel for x in program_of(arm, call).launches]
    assert set(kernels) <= set(arm.kernels)
    assert all("epilogue" not in dict(k.spec.parameters) for k in kernels)


SHAPE = (40, 136)
BAD = {
    "columns": (Tensor("bf16", (40, 128), "r"), r"bf16\[40, 128\], expected bf16\[40, 136\]"),
    "rows": (Tensor("bf16", (1, 136), "r"), r"bf16\[1, 136\], expected bf16\[40, 136\]"),
    "dtype": (Tensor("f32", SHAPE, "r"), r"f32\[40, 136\], expected bf16\[40, 136\]"),
    "rows apart": (
        Tensor("bf16", SHAPE, "r", strides=(272, 1)),
        r"begins at byte 0, its strides are \(272, 1\), expected rows that follow each other from a multiple of 16 on",
    ),
    "odd begin": (Tensor("bf16", SHAPE, "r", offset=2), r"begins at byte 2, its strides are \(136, 1\), expected rows"),
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("part", BOTH)
def test_an_addend_that_does_not_fit_is_refused(part: str, how: str) -> None:
    arm = ARMS["bf16_wgmma"]
    call, _ = planned(case_of("bf16_wgmma", 40, 136, 256), arm, base_context(HOPPER), ())
    given, said = BAD[how]
    with pytest.raises(PlanError, match=f"layers.0.ffn.up/y: {part} (is )?{said}"):
        program_of(arm, replace(call, epilogue=Epilogue(**{part: given})))


def test_arms_that_do_not_add_refuse_to() -> None:
    base = base_context(HOPPER)
    for name, form in (("fp8_wgmma", "fp8"), ("nvfp4_wgmma_fp8", "nvfp4")):
        case = Case(name, ("ffn.up",), 40, 136, 256, form)
        call, _ = planned(case, ARMS[name], base, ["residual"])
        with pytest.raises(PlanError, match=f"arm {name} does not fuse residual, expected "):
            program_of(ARMS[name], call)
    assert ARMS["bf16_wgmma_joined"].epilogues == ARMS["nvfp4_wgmma_joined"].epilogues == ()


@pytest.mark.parametrize("family", [wgmma_bf16, wgmma_fp8, wgmma_nvfp4])
def test_other_epilogues_are_refused(family) -> None:
    with pytest.raises(ValueError, match="found epilogue 'gelu', expected None or, of one, addends"):
        family(64, 128, 4, epilogue="gelu")
    if family is not wgmma_fp8:
        with pytest.raises(ValueError, match="found epilogue 'addends' of several projections, expected None or"):
            family(64, 128, 4, joined=True, epilogue="addends")
