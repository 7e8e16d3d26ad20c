"""The GEMM on warpgroups over NVFP4 codes as E4M3, block scales on the sums: every tile, fragments, faults."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.repacked import pack
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.nvfp4_fp8 import CodesTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import e2m1
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_nvfp4_w4a8 as kernels
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_lanes import codes_of_groups, scales_in_order, scales_of_group
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_wgmma_w4a8"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def case_of(m: int, n: int, k: int, form: str = "nvfp4", arm: str = ARM.name) -> Case:
    return Case(arm, ("ffn.up",), m, n, k, form)


def tile_of(case: Case, base) -> tuple[int, int]:
    """Rows of x and of W of a tile."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"]


@pytest.mark.full
@pytest.mark.parametrize("m", [31, 64, 115])
def test_every_tile_with_ragged_edges_on_a_card_of_one_sm(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    few, more = ARM.tiles()
    target = replace(HOPPER, sms=1)
    for t in [t for t in more if t.bm > 64] if m > 64 else [t for t in few if t.bm - 32 < m <= t.bm]:
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, t.bn + 8, 1280 if m <= 32 else 128)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn)
        with open_device("interpreter", target) as device:
            result = run_case(case, ARM, device, base_context(target))
        assert result.ok, f"{t}: {result.sentence}"


def test_tiles_that_are_cut_along_k(monkeypatch) -> None:
    """Three shares of two tiles: the middle one lies on both."""
    target = replace(HOPPER, sms=1)  # three blocks of one warpgroup
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    monkeypatch.setattr(ARM, "tile", lambda c: CodesTile(32, 64))
    launch, cuts = ARM.launch, []

    def recorded(*args, **options):
        product = launch(*args, **options)
        cuts.append(product.args[-2])
        return product

    monkeypatch.setattr(ARM, "launch", recorded)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(17, 128, 768), ARM, device, base_context(target))
    assert result.ok, result.sentence
    assert set(cuts) == {1}


def test_it_is_w4a16_but_for_the_rounding_of_x() -> None:
    base = base_context(HOPPER)
    with open_device("interpreter", HOPPER) as device:
        ours, exact = (
            run(case_of(17, 72, 256, arm=name), ARMS[name], device, base).out.astype(np.float64).ravel()
            for name in (ARM.name, "nvfp4_wgmma")
        )
    cosine = ours @ exact / np.sqrt((ours @ ours) * (exact @ exact))
    assert 0.9993 < cosine < 0.99995


@L.kernel(launch_bounds=(128, 1))
def fragments(unit: L.In[L.u8], out: L.Out[L.u32], scales: L.Out[L.f32]):
    """A unit's fragments, a half of one for each group, `[8, 32, 2]`, and its lanes' scales, alike."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 72, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
    L.cuda.syncwarp()
    words = scales_in_order(tile, 0)
    for half in L.unroll(2):
        made = codes_of_groups(tile, 0, half)
        for j in L.unroll(4):
            of_rows = scales_of_group(words[j], half)
            for h in L.unroll(2):
                at = 64 * (4 * half + j) + 2 * lane + h
                L.stg_b32(out, at, made[j][h])
                L.stg_f32(scales, at, of_rows[h])


def test_fragments_are_the_codes_and_scales_exactly() -> None:
    """All codes under all block scales but 0, which the copy has as the smallest over codes of 0."""
    seen: set[int] = set()
    for first in range(1, 127, 9):
        scale = (1 + (first + np.arange(128)) % 126).astype(np.uint8).reshape(16, 8)
        seen |= set(scale.ravel().tolist())
        codes = (np.arange(16)[:, None] + np.arange(128) * 5 + first).astype(np.uint8) & 15
        stored = {
            "weight": codes[:, ::2] | codes[:, 1::2] << 4,
            "scale": scale.view(ml_dtypes.float8_e4m3fn),
            "global_scale": np.float32([1]),
        }
        unit = pack(stored)["weight"]
        out, scales = simt.Buffer("out", 4 * 8 * 64), simt.Buffer("scales", 4 * 8 * 64)
        simt.run(
            fragments, grid=1, block=32, shared_bytes=1152, args=(simt.Buffer("unit", 1152, data=unit), out, scales)
        )
        made = out.array(np.uint8, (8, 8, 4, 2, 4)).transpose(3, 1, 0, 2, 4).reshape(16, 128)  # row half, g, group, t
        sixty_fourths = made.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 64
        assert np.array_equal(sixty_fourths, e2m1.VALUES[codes])
        found = scales.array(np.float32, (8, 8, 4, 2)).transpose(3, 1, 0, 2).reshape(16, 8, 4)
        assert (found == stored["scale"].astype(np.float32)[..., None]).all()
    assert seen == set(range(1, 127))


def faulty(monkeypatch, raster: int) -> None:
    """The arm with kernels made of what is patched, for every call."""
    lower, t = ARM.lower, CodesTile(32, 128)
    kernel = kernels.wgmma_nvfp4_w4a8(t.bm, t.bn, t.stages, raster=raster)
    monkeypatch.setattr(ARM, "tile", lambda c: t)
    monkeypatch.setattr(ARM, "kernels", (ARM.order, kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of eight warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    faulty(monkeypatch, 7)
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 1152), ARM, device, base_context(HOPPER))


def test_sums_that_are_read_before_their_product_ended_are_reported(monkeypatch) -> None:
    """As if every wait left the newest product pending."""
    of_wait = L.wgmma_wait

    def wait(count):
        run = of_wait(count)

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
    assert tile_of(case_of(32, 17408, 5120), base) == (64, 64)
    assert tile_of(case_of(64, 17408, 5120), base) == (64, 64)
    assert tile_of(case_of(128, 17408, 5120), base) == (64, 128)
    assert tile_of(case_of(4096, 17408, 5120), base) == (112, 128)
