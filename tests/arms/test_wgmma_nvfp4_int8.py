"""The GEMM on warpgroups over NVFP4 codes as int8: nothing of a weight is lost, tiles, faults."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.repacked import pack
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.nvfp4_int8 import IntegersTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import values
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import e2m1
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_nvfp4_int8 as kernels
from atlas_lab.kernels.gemm.wgmma_lanes import integers_of_groups, scales_of_group
from atlas_lab.runtime.device import open_device

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_wgmma_int8"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def case_of(m: int, n: int, k: int, form: str = "nvfp4", arm: str = ARM.name) -> Case:
    return Case(arm, ("ffn.up",), m, n, k, form)


def tile_of(case: Case, base) -> tuple[int, int]:
    """Rows of x and of W of a tile."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"]


def test_tiles_that_are_cut_along_k(monkeypatch) -> None:
    """Three shares of two tiles: the middle one lies on both."""
    target = replace(HOPPER, sms=3)
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    monkeypatch.setattr(ARM, "tile", lambda c: IntegersTile(32, 128))
    launch, cuts = ARM.launch, []

    def recorded(*args, **options):
        product = launch(*args, **options)
        cuts.append((product.blocks, product.args[-2]))
        return product

    monkeypatch.setattr(ARM, "launch", recorded)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(17, 136, 768), ARM, device, base_context(target))
    assert result.ok, result.sentence
    assert set(cuts) == {(3, 1)}


def test_nothing_of_a_weight_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over x whose codes are exact it is W4A16 but for the last bit of FP32 sums, where int8 under a scale for 32 of K,
    which re-quantizes weights, is not."""

    def integers(case: Case, m: int | None = None) -> np.ndarray:
        x = np.random.default_rng(3).integers(-127, 128, (m or case.m, case.k))
        x[:, ::32] = 127
        return x.astype(ml_dtypes.bfloat16)

    monkeypatch.setattr(values, "activations", integers)
    base = base_context(HOPPER)
    with open_device("interpreter", HOPPER) as device:
        ours, requantized, exact = (
            run(case_of(17, 72, 256, arm=name), ARMS[name], device, base).out.astype(np.float64)
            for name in (ARM.name, "int8_wgmma_sub", "nvfp4_wgmma")
        )
    apart, of_both = (np.linalg.norm(y - exact) / np.linalg.norm(exact) for y in (ours, requantized))
    assert apart < 1e-4
    assert of_both > 3e-3


@L.kernel(launch_bounds=(128, 1))
def fragments(unit: L.In[L.u8], out: L.Out[L.u32]):
    """A unit's fragments, a half of one for each group, `[8, 32, 2]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 72, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
    L.cuda.syncwarp()
    for half in L.unroll(2):
        made = integers_of_groups(tile, 0, half)
        for j in L.unroll(4):
            for h in L.unroll(2):
                L.stg_b32(out, 64 * (4 * half + j) + 2 * lane + h, made[j][h])


def test_fragments_are_twice_the_codes_exactly() -> None:
    """All codes in all places, -0 among them."""
    for first in range(16):
        codes = (np.arange(16)[:, None] * 3 + np.arange(128) * 5 + first).astype(np.uint8) & 15
        stored = {
            "weight": codes[:, ::2] | codes[:, 1::2] << 4,
            "scale": np.full((16, 8), 1, dtype("e4m3").numpy),
            "global_scale": np.float32([1]),
        }
        unit, out = pack(stored)["weight"], simt.Buffer("out", 4 * 8 * 64)
        simt.run(fragments, grid=1, block=32, shared_bytes=1152, args=(simt.Buffer("unit", 1152, data=unit), out))
        made = out.array(np.int8, (8, 8, 4, 2, 4)).transpose(3, 1, 0, 2, 4).reshape(16, 128)  # row half, g, group, t
        assert np.array_equal(made, 2 * e2m1.VALUES[codes])


def faulty(monkeypatch, raster: int) -> None:
    """The arm with kernels made of what is patched, for every call."""
    lower, t = ARM.lower, IntegersTile(32, 128)
    kernel = kernels.wgmma_nvfp4_int8(t.bm, t.bn, t.stages, raster=raster)
    monkeypatch.setattr(ARM, "tile", lambda c: t)
    monkeypatch.setattr(ARM, "kernels", (ARM.order, kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_sums_that_are_read_before_their_product_ended_are_reported(monkeypatch) -> None:
    """As if every wait left the newest product pending."""
    of_wait = L.wgmma_wait

    def wait(count, dtype):
        run = of_wait(count, dtype)

        @L.device
        def early(acc, pending):
            return run(acc, 1)

        return early

    monkeypatch.setattr(kernels.L, "wgmma_wait", wait)
    faulty(monkeypatch, 8)
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.PoisonRead, match="not waited for"):
        run(case_of(17, 64, 128), ARM, device, base_context(HOPPER))


def test_scales_of_the_wrong_half_are_found(monkeypatch) -> None:
    @L.device
    def first_half(s, half):
        return scales_of_group(s, 0)

    case = case_of(17, 64, 128)
    with open_device("interpreter", HOPPER) as device:
        faulty(monkeypatch, 9)
        assert run_case(case, ARM, device, base_context(HOPPER)).ok
        monkeypatch.undo()
        monkeypatch.setattr(kernels, "scales_of_group", first_half)
        faulty(monkeypatch, 10)
        assert not run_case(case, ARM, device, base_context(HOPPER)).ok


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(32, 17408, 5120), base) == (32, 128)
    assert tile_of(case_of(64, 17408, 5120), base) == (64, 128)
    assert tile_of(case_of(128, 17408, 5120), base) == (64, 128)
    assert tile_of(case_of(4096, 17408, 5120), base) == (80, 128)
