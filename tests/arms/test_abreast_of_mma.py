"""Row tiles may be streamed abreast, weights straight into registers and x from shared memory: bits stay, x must fit,
and what no kernel of that kind can do is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from test_kept_x_of_mma import TARGETS, few, ran
from test_rows_of_mma import ARMS
from unwaited import twice

from atlas_lab.arms.mma.forms import NARROW, Form
from atlas_lab.core.tuning import setting
from atlas_lab.experiments import trial
from atlas_lab.kernels.gemv.abreast import BARRIERS, CHUNK, CHUNKS
from atlas_lab.kernels.gemv.columns import TILE
from atlas_lab.kernels.gemv.mma_fp8 import mma_fp8
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ABREAST = {name: forms for name, a in ARMS.items() if (forms := [f for f in a.forms if f.abreast])}
SHIPPED = [(name, form) for name, forms in ABREAST.items() for form in forms]
# Seven row tiles, the last one ragged: fewer than a card has places for, as many, and more, which follow in turn.
N, TILES = 103, 7
CASES = ((Form(2, 1, 1, 1, abreast=3), 3), (Form(2, 1, 1, 1, abreast=3), 2), (Form(3, 1, 1, 1, abreast=2), 1))


def plain(form: Form) -> Form:
    """Of the same warps, whose weights go through rings."""
    return form._replace(depth=2, wide_depth=2, abreast=0)


@cache
def through_rings(name: str, form: Form, units: int) -> np.ndarray:
    """What 16 rows come to in that form."""
    with open_device("interpreter", few(3)) as device:
        out: np.ndarray = ran(name, form, 16, N, units, device, device.target).out
    return out


@pytest.mark.parametrize("name", ABREAST)
@pytest.mark.parametrize(
    ("form", "sms"), [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.full), CASES[2]], ids=str
)
def test_bits_are_those_of_weights_through_rings(name: str, form: Form, sms: int) -> None:
    units = 9  # chunks of x that end inside, and warps that have more units than others
    assert -(-N // TILE) == TILES
    expected = through_rings(name, plain(form), units)
    assert np.any(expected.astype(np.float32)[:, -7:])
    with open_device("interpreter", few(sms)) as device:
        for m in (1, NARROW + 1):
            got = ran(name, form, m, N, units, device, device.target)
            assert got.out.tobytes() == expected[:m].tobytes()
            (launch,) = got.program.launches
            assert dict(launch.kernel.spec.parameters)["abreast"] == form.abreast
            assert dict(launch.kernel.spec.parameters)["turns"] == (sms * form.abreast < TILES)
            assert (launch.blocks, launch.block[0]) == (sms, 32 * form.warps * form.abreast)


@pytest.mark.parametrize("name", ABREAST)
def test_fewer_units_than_warps_and_fewer_tiles_than_places(name: str) -> None:
    form = Form(3, 1, 1, 1, abreast=2)
    with open_device("interpreter", few(2)) as device:
        for n in (1, TILE, TILE + 1):
            one, other = (ran(name, f, 3, n, 2, device, device.target).out for f in (form, plain(form)))
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ABREAST)
def test_bits_do_not_depend_on_the_order_of_threads_and_copies(name: str) -> None:
    form = CASES[1][0]
    drawn = Options(order="random", late_async="random")
    with InterpreterDevice(few(2), seed=1, options=drawn) as device:
        out = ran(name, form, 9, N, 9, device, device.target).out
    assert out.tobytes() == through_rings(name, plain(form), 9)[:9].tobytes()


@pytest.mark.parametrize("name", ABREAST)
def test_two_calls_that_nobody_waits_for_between_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, units = CASES[0][0], 9
    expected = through_rings(name, plain(form), units)
    monkeypatch.setattr(trial, "run_program", twice)
    with open_device("interpreter", few(3)) as device:
        got = ran(name, form, 16, N, units, device, device.target)
    assert got.out.tobytes() == expected.tobytes()
    assert [x.pdl for x in got.program.launches] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_bits_on_a_card_are_those_of_weights_through_rings(name: str, form: Form, device: Device) -> None:
    """Of the blocks of four SMs, each of which takes row tiles in turn; and of as many as they have at once."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    target = replace(device.target, sms=4)
    for m, tiles in product((1, 8, 9, 16), (2 * form.abreast + 1, form.abreast)):
        n = TILE * 4 * tiles - 7
        apart, got = (ran(name, f, m, n, 40, device, target).out for f in (plain(form), form))
        assert got.tobytes() == apart.tobytes()


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_x_of_sixteen_rows_leaves_most_of_an_sms_memory_to_l1_where_no_tiles_follow(name: str, form: Form) -> None:
    """164 KB are what a card can give to blocks and leave 92 to L1; a kilobyte of each block is the system's."""
    arm, one = ARMS[name], ARMS[name]._launched(form, 16)
    assert arm._shared(one._replace(turns=False), 5120) <= 163 * 1024 < arm._shared(one, 5120)


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_k_is_whole_units_whose_x_fits(name: str, form: Form) -> None:
    arm, card = ARMS[name], TARGETS["h200"]
    legal = [units for units in range(1, 100) if form.setting in arm.settings(N, arm.span * units, card)]
    assert legal == list(range(1, legal[-1] + 1))
    assert 6144 <= arm.span * legal[-1] < CHUNK * CHUNKS
    assert 16 * 2 * arm.span * legal[-1] < card.shared_per_block
    assert form.setting not in arm.settings(N, arm.span * 3 - 16, card)
    assert form.setting not in arm.settings(N, arm.span * 3, TARGETS["a100"])


@pytest.mark.parametrize(("name", "form"), SHIPPED, ids=str)
def test_the_model_prefers_none(name: str, form: Form) -> None:
    arm = ARMS[name]
    found = arm.settings(17408, 5120, TARGETS["h200"])
    assert found.index(form.setting) >= len([f for f in arm.forms if not f.alone])


def test_what_is_usual_is_left_out_of_a_setting() -> None:
    form = Form(2, 1, 1, 1, abreast=9)
    assert form.setting == setting(warps=2, depth=1, wide_depth=1, wide_tiles=1, abreast=9)
    assert Form(**dict(form.setting)) == form


@pytest.mark.parametrize(
    "more", [{"joined": True}, {"pair": True}, {"whole": False}, {"depth": 2}, {"tiles": 2}, {"cluster": 2}]
)
def test_what_is_not_plain_is_refused(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"abreast: found .*, expected a plain product, 1 tile, 1 block"):
        mma_fp8(**{"warps": 2, "depth": 1, "abreast": 3, **more})


def test_a_block_has_a_barrier_for_each_tile() -> None:
    with pytest.raises(ValueError, match=rf"abreast: found {BARRIERS + 1} row tiles a block, expected 1 to {BARRIERS}"):
        mma_fp8(warps=2, depth=1, abreast=BARRIERS + 1)


@pytest.mark.parametrize(("warps", "found"), [(4, 36), (0, 0)])
def test_a_block_has_so_many_warps(warps: int, found: int) -> None:
    with pytest.raises(ValueError, match=f"abreast: found {found} warps a block, expected 1 to 32"):
        mma_fp8(warps=warps, depth=1, abreast=9)
