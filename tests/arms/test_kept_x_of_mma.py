"""Warps may keep x in registers while their block, or a cluster that cuts K, takes row tiles in turn: bits stay, each
setting is of one K, and what no kernel of that kind can do is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from test_rows_of_mma import ARMS, form_of
from unwaited import twice

from atlas_lab.arms.mma.forms import NARROW, Form
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.core.tuning import setting
from atlas_lab.experiments import trial
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.parity import Ran, run
from atlas_lab.kernels.gemv.columns import TILE
from atlas_lab.kernels.gemv.kept import TURNS
from atlas_lab.kernels.gemv.mma_lanes import mma_nvfp4_lanes
from atlas_lab.kernels.gemv.mma_nvfp4 import mma_nvfp4
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

TARGETS = {t.name: t for t in shipped_targets()}
KEPT = {name: forms for name, a in ARMS.items() if (forms := [f for f in a.forms if f.units])}
MAIN = ("bf16_mma", "nvfp4_mma_repacked")
SHIPPED = [(name, form) for name, forms in KEPT.items() for form in forms]
# Five row tiles, the last one ragged: on three SMs one or two a block, on fewer more than there are places for sums.
N, TILES = 71, 5
EVEN = Form(2, 2, 2, 1, kept=2, wide_kept=2)
# Rings of fewer units than are kept and of more, which end inside a row tile; of several row tiles; and of a cluster's
# blocks.
CUT, AHEAD = Form(2, 1, 3, 1, kept=2, wide_kept=2), Form(4, 3, 2, 1, kept=1, wide_kept=1)
OVER = Form(4, 2, 2, 1, 2, 2, kept=1, wide_kept=1)


def few(sms: int) -> Target:
    return replace(TARGETS["h200"], sms=sms)


def plain(form: Form) -> Form:
    """Of the same warps, each of which loads x."""
    return form._replace(cluster=1, wide_cluster=1, kept=0, wide_kept=0)


def ran(name: str, form: Form, m: int, n: int, units: int, device: Device, target: Target) -> Ran:
    """Of an arm that has this form beside its first."""
    arm = type("Kept", (type(ARMS[name]),), {"forms": (ARMS[name].forms[0], form)})(name)
    case = Case(name, ("ffn.up",), m, n, arm.span * units, form_of(arm), setting=form.setting)
    return run(case, arm, device, base_context(target))


@cache
def loading(name: str, form: Form, units: int) -> np.ndarray:
    """What 16 rows come to in that form, which keeps nothing."""
    with open_device("interpreter", few(3)) as device:
        out: np.ndarray = ran(name, form, 16, N, units, device, device.target).out
    return out


CASES = {
    "even": (EVEN, 3, (1, 16)),
    "cut": (CUT, 1, (8, 16)),
    "ahead": (AHEAD, 1, (8,)),
    "over": (OVER, 2, (8,)),
}


@pytest.mark.parametrize(
    ("form", "sms", "ms", "name"),
    [
        pytest.param(*case, name, id=f"{key}-{name}", marks=() if key == "even" or name in MAIN else pytest.mark.full)
        for key, case in CASES.items()
        for name in KEPT
    ],
)
def test_bits_are_those_of_warps_that_load_x(name: str, form: Form, sms: int, ms: tuple[int, ...]) -> None:
    assert -(-N // TILE) == TILES > TURNS
    expected = loading(name, plain(form)._replace(depth=2, wide_depth=2), form.units)
    assert np.any(expected.astype(np.float32)[:, -7:])
    with open_device("interpreter", few(sms)) as device:
        for m in ms:
            kept = ran(name, form, m, N, form.units, device, device.target)
            assert kept.out.tobytes() == expected[:m].tobytes()
            (launch,) = kept.program.launches
            cluster, units = (form.cluster, form.kept) if m <= NARROW else (form.wide_cluster, form.wide_kept)
            assert dict(launch.kernel.spec.parameters)["kept"] == units
            assert launch.blocks == sms
            assert launch.cluster == (cluster, 1, 1)


@pytest.mark.parametrize("name", [n if n in MAIN else pytest.param(n, marks=pytest.mark.full) for n in KEPT])
def test_bits_do_not_depend_on_the_order_of_threads_and_copies(name: str) -> None:
    drawn = Options(order="random", late_async="random")
    with InterpreterDevice(few(2), seed=1, options=drawn) as device:
        out = ran(name, OVER, 9, N, OVER.units, device, device.target).out
    assert out.tobytes() == loading(name, plain(OVER), OVER.units)[:9].tobytes()


@pytest.mark.parametrize("form", [EVEN, CUT], ids=["even", "cut"])
def test_two_calls_that_nobody_waits_for_between_are_alike(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    name, units = "nvfp4_mma_repacked", form.units
    expected = loading(name, form._replace(kept=0, wide_kept=0, cluster=1, wide_cluster=1), units)
    monkeypatch.setattr(trial, "run_program", twice)
    with open_device("interpreter", few(3)) as device:
        got = ran(name, form, 16, N, units, device, device.target)
    assert got.out.tobytes() == expected.tobytes()
    assert [x.pdl for x in got.program.launches] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_bits_on_a_card_are_those_of_warps_that_load_x(name: str, form: Form, device: Device) -> None:
    """Of the blocks of four SMs, each of which uses places for sums again."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    target = replace(device.target, sms=4)
    n = TILE * 4 * TURNS + 9
    for m in (1, 8, 9, 16):
        apart, kept = (ran(name, f, m, n, form.units, device, target).out for f in (plain(form), form))
        assert kept.tobytes() == apart.tobytes()


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_a_setting_is_of_one_k(name: str, form: Form) -> None:
    arm, card = ARMS[name], TARGETS["h200"]
    assert form.setting in arm.settings(N, arm.span * form.units, card)
    for units in (form.units - 1, form.units + 1, 2 * form.units, form.units // 2):
        assert form.setting not in arm.settings(N, arm.span * units, card)
    if "whole" in arm.variants[0]:
        assert form.setting not in arm.settings(N, arm.span * form.units - 32, card)


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_cards_without_their_mbarriers_are_offered_none(name: str, form: Form) -> None:
    arm = ARMS[name]
    assert form.setting not in arm.settings(N, arm.span * form.units, TARGETS["a100"])


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
@pytest.mark.parametrize("m", [1, 16])
def test_shared_memory_fits_an_sm_of_hopper(name: str, form: Form, m: int) -> None:
    arm = ARMS[name]
    one = arm._launched(form, m)
    assert one.warps * one.kept in (0, form.units)
    assert (
        one.own * one.depth * arm.unit
        <= arm._shared(one, arm.span * form.units)
        <= TARGETS["h200"].shared_per_block
        == 232448
    )


def test_cards_are_offered_what_their_shared_memory_holds_for_any_rows() -> None:
    held_narrow = 0
    for (name, form), card in product(SHIPPED, TARGETS.values()):
        arm = ARMS[name]
        narrow, wide = (arm._shared(arm._launched(form, m), arm.span * form.units) for m in (1, 16))
        if wide > card.shared_per_block:
            held_narrow += narrow <= card.shared_per_block
            assert form.setting not in arm.settings(N, arm.span * form.units, card)
    assert held_narrow


@pytest.mark.parametrize("form", [EVEN, AHEAD, OVER])
def test_settings_that_keep_nothing_are_spelled_as_before(form: Form) -> None:
    usual = setting(warps=form.warps, depth=form.depth, wide_depth=form.wide_depth, wide_tiles=form.wide_tiles)
    assert plain(form).setting == usual
    only_wide = plain(form)._replace(wide_kept=form.wide_kept)
    assert only_wide.setting == tuple(sorted([*usual, ("wide_kept", form.wide_kept)]))
    assert only_wide.units == form.units
    assert plain(form).units == 0


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"warps": 4, "tiles": 2, "pair": True}, "a pair product, 2 tiles, 4 warps over 1 blocks"),
        ({"warps": 4, "joined": True, "clamp": True}, "a joined clamp product, 1 tiles, 4 warps over 1 blocks"),
        ({"warps": 4, "tiles": 2}, "a plain product, 2 tiles, 4 warps over 1 blocks"),
        ({"warps": 1, "columns": 2}, "a plain product, 1 tiles, 1 warps over 1 blocks"),
        ({"warps": 2, "columns": 2, "cluster": 2}, "a plain product, 1 tiles, 2 warps over 2 blocks"),
        ({"warps": 5, "cluster": 2}, "a plain product, 1 tiles, 5 warps over 2 blocks"),
        ({"warps": 6, "cluster": 3}, "a plain product, 1 tiles, 6 warps over 3 blocks"),
    ],
    ids=["pair", "joined", "tiles", "few-warps", "few-warps-a-block", "uneven-warps", "three-blocks"],
)
def test_what_no_kernel_can_keep_x_for_is_refused(parameters: dict[str, Any], found: str) -> None:
    least = parameters.get("columns", 1)
    said = f"kept: found {found}, expected a plain one, 1 tile, {least} or more warps a block"
    for family in (mma_nvfp4_lanes, mma_nvfp4):
        with pytest.raises(ValueError, match=said):
            family(kept=2, **parameters)


def test_a_k_that_is_not_whole_units_is_refused() -> None:
    with pytest.raises(ValueError, match="kept: found 2 units of a K that is not whole, expected K whole or kept 0"):
        mma_nvfp4(kept=2, whole=False)
