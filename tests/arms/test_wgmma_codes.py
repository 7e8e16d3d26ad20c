"""The GEMM on warpgroups that quantizes y for the next one: the bits of the quantizer's launch; x that comes so."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from epilogues import planned, run_outputs, run_quantizing

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.grouped_x import GROUPED, grouped
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.call import Operand
from atlas_lab.core.program import PlanError, program_of
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, values
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.formats import fp8_groups
from atlas_lab.kernels.gemm.wgmma_codes import code_storer
from atlas_lab.kernels.gemm.wgmma_fp8 import wgmma_fp8
from atlas_lab.runtime.device import Device, open_device

NAME = "fp8_wgmma_w8a8"
ARM = next(a for a in atlas_arms() if a.name == NAME)
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FULL = pytest.mark.full
BOTH = ("lora", "residual")


def case_of(m: int, n: int, k: int, **form: int) -> Case:
    return Case(NAME, ("ffn.up",), m, n, k, "fp8", setting=tuple(form.items()))


def compare(case: Case, device: Device, parts: tuple[str, ...] = ()) -> np.ndarray:
    """Checks codes and scales against those of what the same tile stores in BF16; returns the scales."""
    base = base_context(device.target)
    (y,) = run_quantizing(case, ARM, device, base, parts, fused=False)
    codes, scales = run_quantizing(case, ARM, device, base, parts, fused=True)
    of_codes, of_scales = fp8_groups.quantize(y.astype(np.float32))
    assert oracle.same_bits(codes, of_codes)
    assert oracle.same_bits(np.ascontiguousarray(scales[:, : case.m]), of_scales)
    return of_scales


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [
        (17, 144, 144, BOTH),
        pytest.param(33, 256, 272, (), marks=FULL),
        pytest.param(64, 16, 128, ("residual",), marks=FULL),
        pytest.param(131, 272, 144, BOTH, marks=FULL),
        pytest.param(67, 128, 144, (), marks=FULL),
    ],
)
def test_codes_and_scales_are_those_of_a_launch_of_its_own(m: int, n: int, k: int, parts: tuple[str, ...], device):
    scales = compare(case_of(m, n, k, columns=128), device, parts)
    assert scales.shape == (-(-n // 128), m)
    assert len(np.unique(scales)) > m // 2


@pytest.mark.parametrize("parts", [(), pytest.param(BOTH, marks=FULL)])
def test_the_block_of_a_cluster_that_has_all_sums_quantizes(parts: tuple[str, ...]) -> None:
    with open_device("interpreter", HOPPER) as device:
        compare(case_of(20, 112, 2 * 128, columns=128, split=2), device, parts)


@FULL
def test_the_block_that_ends_a_cut_tile_quantizes(monkeypatch) -> None:
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    with open_device("interpreter", replace(HOPPER, sms=3)) as device:
        compare(case_of(33, 208, 12 * 128, columns=128), device, ("residual",))


def test_rows_of_zeros_have_a_scale_of_one(device) -> None:
    case, base = case_of(17, 32, 128), base_context(device.target)
    call, _ = planned(case, ARM, base, (), quantize=GROUPED)
    call = replace(call, y=grouped(call.y.data.name, case.m, case.n))
    x = values.activations(case).copy()
    x[5] = 0
    codes, scales = run_outputs(case, ARM, program_of(ARM, call), device, base, {call.x.data.name: x})
    assert scales[0, 5] == 1
    assert not codes[5].view(np.uint8).any()
    assert (scales[0, [4, 6]] != 1).all()


@pytest.mark.parametrize("m", [19, pytest.param(67, marks=FULL)])
def test_x_that_comes_quantized_is_multiplied_as_it_is(m: int, device) -> None:
    """Without the launch that would quantize it, and with the same bits."""
    case, base = case_of(m, 40, 272), base_context(device.target)
    call, _ = planned(case, ARM, base, ())
    x = values.activations(case)
    (y,) = run_outputs(case, ARM, program_of(ARM, call), device, base, {call.x.data.name: x})
    given = grouped(call.x.data.name, m, case.k)
    codes, scales = fp8_groups.quantize(x.astype(np.float32))
    whole = np.full(given.scales[0][1].shape, np.nan, np.float32)
    whole[:, :m] = scales
    program = program_of(ARM, replace(call, x=given))
    assert [launch.quantizes for launch in program.launches] == [False]
    assert not any(t.name.endswith(("x.codes", "x.scales")) for t in program.temporaries)
    inputs = {given.data.name: codes, given.scales[0][1].name: whole}
    assert oracle.same_bits(run_outputs(case, ARM, program, device, base, inputs)[0], y)


def test_a_setting_without_whole_groups_leaves_codes_to_another_tile() -> None:
    base = base_context(HOPPER)
    for form, bn in (({"columns": 192}, 128), ({"columns": 64}, 128), ({"columns": 128, "split": 2}, 128)):
        call, _ = planned(case_of(40, 256, 256, **form), ARM, base, (), quantize=GROUPED)
        (*_, last) = program_of(ARM, replace(call, y=grouped(call.y.data.name, 40, 256))).launches
        parameters = dict(last.kernel.spec.parameters)
        assert (parameters["bn"], parameters["split"]) == (bn, form.get("split", 1))
        assert parameters["epilogue"] == "fp8_groups"


def test_what_is_no_such_operand_is_refused() -> None:
    base = base_context(HOPPER)
    call, _ = planned(case_of(40, 256, 256), ARM, base, (), quantize=GROUPED)
    name = call.y.data.name
    with pytest.raises(PlanError, match="found y in bf16, expected fp8_groups"):
        program_of(ARM, call)
    with pytest.raises(PlanError, match=r"arm fp8_wgmma_w8a8 quantizes y to \['fp8_groups'\], found nvfp4"):
        program_of(ARM, replace(call, epilogue=replace(call.epilogue, quantize="nvfp4")))
    plain = replace(call, epilogue=replace(call.epilogue, quantize=""))
    with pytest.raises(PlanError, match="found y in fp8_groups, expected bf16"):
        program_of(ARM, replace(plain, y=grouped(name, 40, 256)))
    lacking = Operand(Tensor("e4m3", (40, 256), name), GROUPED)
    for given, said in (
        (lacking, r"found .*: e4m3\[40, 256\], expected .*: e4m3\[40, 256\], .*scales: f32\[2, 40\], contiguous"),
        (grouped(name, 40, 128), r"found .*: e4m3\[40, 128\], .*: f32\[1, 40\], expected .*: e4m3\[40, 256\]"),
    ):
        with pytest.raises(PlanError, match=f"in fp8_groups: {said}"):
            program_of(ARM, replace(call, y=given))
        with pytest.raises(PlanError, match=f"in fp8_groups: {said}"):
            program_of(ARM, replace(plain, x=given))
    ragged, _ = planned(case_of(40, 250, 256), ARM, base, (), quantize=GROUPED)
    with pytest.raises(PlanError, match="the columns a multiple of 16"):
        program_of(ARM, replace(ragged, y=grouped(name, 40, 250)))
    gated = replace(plain, x=grouped(plain.x.data.name, 40, 256), prologue="silu")
    with pytest.raises(PlanError, match="found silu of x in fp8_groups, expected bf16"):
        program_of(ARM, gated)
    other = next(a for a in atlas_arms() if a.name == "bf16_wgmma")
    of_bf16, _ = planned(Case("bf16_wgmma", ("ffn.up",), 40, 256, 256, "bf16"), other, base, ())
    with pytest.raises(PlanError, match="arm bf16_wgmma reads bf16, found fp8_groups"):
        program_of(other, replace(of_bf16, x=grouped("x", 40, 256)))


def test_tiles_without_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="code_storer: found 136 columns, expected a multiple of 128"):
        wgmma_fp8(64, 136, 4, epilogue=GROUPED)
    with pytest.raises(ValueError, match="code_storer: found 64 columns, expected a multiple of 128"):
        code_storer(64, 0)


def test_the_host_format_is_the_one_that_is_named() -> None:
    x = grouped("x", 3, 272)
    codes, scales = fp8_groups.quantize(np.ones((3, 272), np.float32))
    assert (x.data.shape, x.scales[0][1].shape) == (codes.shape, (scales.shape[0], 4))
    assert codes.dtype == ml_dtypes.float8_e4m3fn
