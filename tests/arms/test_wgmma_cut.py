"""GEMMs on warpgroups whose tiles are cut along K: however shares fall on tiles, and the same bits in every order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma import tiles as of_tiles
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.gemm.wgmma_walk import share
from atlas_lab.kernels.quantize.fp8_groups import quantize_fp8_groups
from atlas_lab.kernels.quantize.int8 import quantize_int8_groups
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMATS = {
    **{"bf16_wgmma": "bf16", "fp8_wgmma_w8a8": "fp8", "fp8_wgmma": "fp8"},
    **{"nvfp4_wgmma": "nvfp4", "nvfp4_wgmma_fp8": "nvfp4", "int8_wgmma": "bf16"},
}
STEP = {name: 64 if name == "bf16_wgmma" else 128 for name in FORMATS}  # K of a stage
EACH = pytest.mark.parametrize("name", FORMATS)
# Of these each is a way to meet: sums of rows of x, scaled ones, transposed ones, transposed and scaled ones.
FULL = pytest.mark.full
WAYS = pytest.mark.parametrize(
    "name",
    [
        "bf16_wgmma",
        *(pytest.param(name, marks=FULL) for name in ("nvfp4_wgmma", "fp8_wgmma_w8a8", "fp8_wgmma")),
    ],
)


@pytest.fixture
def cut(monkeypatch):
    """Cut whatever does not come out even, in tiles of 64 rows of x by 64 of W."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    for name in FORMATS:
        arm = ARMS[name]
        made = arm.made(64, 64) if isinstance(arm, Transposed) else arm._tile(64, 64)
        monkeypatch.setattr(arm, "tile", lambda c, t=made: t)


def case_of(name: str, m: int, tiles: int, steps: int) -> Case:
    return Case(name, ("ffn.up",), m, 64 * tiles, STEP[name] * steps, FORMATS[name])


SHARES = [
    (1, 24, 3),  # one tile, three equal shares
    (1, 17, 2),  # of unequal length
    (2, 12, 3),  # the middle share lies on both
    (4, 8, 3),  # shares of more than a tile
    (3, 5, 1),  # less than a share's least in a block: fewer blocks
    (7, 4, 2),  # whole tiles after the shares
]
SHORT = (2, 6, 3)  # as above, of short shares


# each arm as three blocks share two tiles; one of them however shares fall
@pytest.mark.parametrize(
    ("name", "tiles", "steps", "blocks"),
    [
        pytest.param(name, *s, marks=() if s == SHORT or name == "bf16_wgmma" else FULL)
        for name in FORMATS
        for s in (*SHARES, SHORT)
    ],
)
def test_however_shares_fall_on_tiles(name: str, tiles: int, steps: int, blocks: int, cut, monkeypatch) -> None:
    if (tiles, steps, blocks) == SHORT:
        monkeypatch.setattr(of_tiles, "LEAST", 4)
    target = replace(HOPPER, sms=blocks)
    case, base = case_of(name, 33, tiles, steps), base_context(target)
    launches = launched(case, ARMS[name], base)
    assert launches[0] in (clear_flags, quantize_fp8_groups, quantize_int8_groups, getattr(ARMS[name], "order", None))
    with open_device("interpreter", target) as opened:
        result = run_case(case, ARMS[name], opened, base)
    assert result.ok, result.sentence


@pytest.mark.parametrize(("tiles", "steps", "groups"), [(40, 272, 120), (27, 136, 108), (1, 17, 2), (68, 80, 132)])
def test_shares_are_equal_and_end_where_tiles_do_if_as_many_are_to_each(tiles: int, steps: int, groups: int) -> None:
    begins = [share(i, tiles * steps, groups) for i in range(groups + 1)]
    sizes = {b - a for a, b in pairwise(begins)}
    assert (begins[0], begins[-1]) == (0, tiles * steps)
    assert max(sizes) - min(sizes) <= 1
    assert groups % tiles or begins[:: groups // tiles] == [steps * i for i in range(tiles + 1)]


@WAYS
def test_blocks_are_grouped_by_the_rows_of_x_they_have(name: str, cut) -> None:
    """Three row tiles on seven SMs: two groups, which share tiles of a row each, and a block left over."""
    target = replace(HOPPER, sms=7)
    case, base = case_of(name, 150, 3, 12), base_context(target)
    with open_device("interpreter", target) as opened:
        result = run_case(case, ARMS[name], opened, base)
    assert result.ok, result.sentence


@WAYS
def test_bits_depend_on_no_order(name: str, cut) -> None:
    """Not even where blocks run one after the other: none waits for one that starts later."""
    outputs = []
    ways = (Options(), Options(resident=1), *[Options(order="random", late_async="random")] * 2)
    for seed, options in enumerate(ways):
        device = InterpreterDevice(replace(HOPPER, sms=3), seed=seed, options=options)
        outputs.append(run(case_of(name, 64, 2, 12), ARMS[name], device, base_context(device.target)).out)
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


@pytest.mark.gpu
@EACH
def test_the_same_bits_from_run_to_run_on_a_card(name: str, device, cut) -> None:
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    base = base_context(device.target)
    for tiles, steps in ((1, 160), (100, 40), (140, 40), (300, 23)):
        case = case_of(name, 64, tiles, steps)
        result = run_case(case, ARMS[name], device, base)
        assert result.ok, result.sentence
        first = run(case, ARMS[name], device, base).out
        assert all(oracle.same_bits(first, run(case, ARMS[name], device, base).out) for _ in range(3))


def test_tiles_are_cut_where_that_pays() -> None:
    """168 tiles on 132 SMs would take two turns for 1.27; 128 of one turn are left as they are."""
    base = base_context(HOPPER)
    arm = ARMS["bf16_wgmma"]
    first, *_ = launched(Case("bf16_wgmma", ("ffn.up",), 384, 14336, 4096, "bf16"), arm, base)
    assert first is clear_flags
    assert Tile(128, 256).cut(512, 17408, 10240, HOPPER, "mma_bf16")
    assert not Tile(64, 136).cut(64, 17408, 10240, HOPPER, "mma_bf16")
    assert not Tile(128, 256).cut(16384, 17408, 10240, HOPPER, "mma_bf16")  # a row of tiles is more than half the SMs
    assert Tile(64, 64).grid(64, 64, 2 * 64 * 20, 132, True) == 2
    assert Tile(64, 64).grid(150, 640, 2 * 64 * 20, 7, True) == 6
