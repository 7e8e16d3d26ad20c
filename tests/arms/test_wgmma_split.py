"""GEMMs on warpgroups whose K the blocks of a cluster split: their sums meet in shared memory, in one order; a launch
has all clusters at once and each block a step; blocks that split share no loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tuning import setting
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.kernels.gemm.wgmma_bf16 import wgmma_bf16
from atlas_lab.kernels.gemm.wgmma_fp8 import wgmma_fp8
from atlas_lab.kernels.gemm.wgmma_split import SPLITS, mail_bytes
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMATS = {"bf16_wgmma": "bf16", "fp8_wgmma_w8a8": "fp8", "nvfp4_wgmma": "nvfp4"}
STEP = {name: 64 if name == "bf16_wgmma" else 128 for name in FORMATS}  # K of a stage
SHIPPED = [(name, bn, split) for name in FORMATS for bn, split in ARMS[name].splits]
EACH = pytest.mark.parametrize(("name", "bn", "split"), SHIPPED)
NARROWEST = {name: min(bn for bn, _ in ARMS[name].splits) for name in FORMATS}


def case_of(name: str, bn: int, split: int, m: int = 33, n: int = 0, steps: int = 7) -> Case:
    """Two tiles, the last one ragged, and steps that no block has as many of as another."""
    return Case(
        name,
        ("ffn.up",),
        m,
        n or 2 * bn - 24,
        STEP[name] * steps,
        FORMATS[name],
        setting=setting(columns=bn, split=split),
    )


@pytest.mark.parametrize(
    ("name", "bn", "split"),
    [pytest.param(*s, marks=() if s[1] == NARROWEST[s[0]] else pytest.mark.full) for s in SHIPPED],
)
def test_sums_are_right_and_met_in_a_cluster(name: str, bn: int, split: int) -> None:
    arm = ARMS[name]
    with open_device("interpreter", HOPPER) as device:
        for m, steps in ((20, 7), (64, split)):
            case = case_of(name, bn, split, m, steps=steps)
            result = run_case(case, arm, device, base_context(HOPPER))
            assert result.ok, result.sentence
        launches = run(case_of(name, bn, split, steps=split), arm, device, base_context(HOPPER)).program.launches
    last = launches[-1]
    assert dict(last.kernel.spec.parameters)["split"] == split
    assert (last.cluster, last.blocks) == ((split, 1, 1), 2 * split)
    assert not any("flags" in launch.label for launch in launches)  # nothing is cleared


@pytest.mark.parametrize("name", ["bf16_wgmma", *(pytest.param(n, marks=pytest.mark.full) for n in list(FORMATS)[1:])])
def test_bits_do_not_depend_on_the_order_of_threads_and_copies(name: str) -> None:
    outputs = []
    for seed in (0, 1):
        options = Options(order="random", late_async="random") if seed else Options()
        with InterpreterDevice(HOPPER, seed=seed, options=options) as device:
            outputs.append(run(case_of(name, 128, 2), ARMS[name], device, base_context(HOPPER)).out)
    assert oracle.same_bits(*outputs)


@pytest.mark.gpu
@EACH
def test_sums_are_right_on_a_card_run_after_run(name: str, bn: int, split: int, device: Device) -> None:
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    case = case_of(name, bn, split, 64, n=bn * (device.target.sms // split // 4 * 3) - 8, steps=41)
    result = run_case(case, ARMS[name], device, base_context(device.target))
    assert result.ok, result.sentence
    first, second = (run(case, ARMS[name], device, base_context(device.target)).out for _ in range(2))
    assert oracle.same_bits(first, second)


@EACH
def test_all_clusters_run_at_once_and_each_block_has_a_step(name: str, bn: int, split: int) -> None:
    arm, form = ARMS[name], setting(columns=bn, split=split)
    tile = next(t for t in arm.tiles()[0] if (t.bm, t.bn, t.split) == (64, bn, split))
    most = tile.at_once(HOPPER.sms) // split
    assert form in arm.settings(bn * most, 5120, HOPPER)
    assert form not in arm.settings(bn * most + 8, 5120, HOPPER)
    assert form not in arm.settings(bn, STEP[name] * (split - 1), HOPPER)
    few = replace(HOPPER, sms=split - 1)
    assert form not in arm.settings(bn, 5120, few)


@EACH
def test_a_tile_is_never_cut_beside(name: str, bn: int, split: int) -> None:
    arm = ARMS[name]
    small, _ = arm.tiles()
    for t in (t for t in small if t.split == split):
        assert not t.cut(64, 5120, 12288, HOPPER, arm.pipe)
        assert t.cluster == split
        assert t.mail == mail_bytes(t.warps, t.sums, split) == (split - 1) * 4 * t.bm * t.bn + 16


@pytest.mark.parametrize("split", [3, 4, 8])
def test_other_splits_are_refused(split: int) -> None:
    with pytest.raises(ValueError, match=f"split: found {split} blocks a tile, expected {', '.join(map(str, SPLITS))}"):
        wgmma_bf16(64, 128, 4, split=split)


@pytest.mark.parametrize("family", [wgmma_bf16, wgmma_fp8])
def test_tiles_whose_warpgroups_may_have_no_row_are_refused(family) -> None:
    with pytest.raises(ValueError, match="split: found tiles of 128 rows of x, expected 64"):
        family(128, 64, 4, split=2)


def test_blocks_that_split_share_no_loads() -> None:
    with pytest.raises(ValueError, match="split: found 2 blocks a tile in clusters of 2 x 1, expected 1 x 1"):
        wgmma_bf16(64, 128, 4, across=2, split=2)
