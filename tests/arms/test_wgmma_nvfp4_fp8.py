"""The GEMM on warpgroups over NVFP4 rounded to E4M3: every tile, bits of weights and of x, faults."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.repacked import pack
from atlas_lab.arms.wgmma.nvfp4_fp8 import RoundedTile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import FORMATS, nvfp4_rounded
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_nvfp4_fp8 as kernels
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_lanes import rounded_weights, scales_in_lanes_order
from atlas_lab.kernels.quantize.fp8_rows import THREADS, quantize_fp8_rows
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_wgmma_fp8"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def case_of(m: int, n: int, k: int, form: str = "nvfp4") -> Case:
    return Case(ARM.name, ("ffn.up",), m, n, k, form)


def tile_of(case: Case, base) -> tuple[int, int, int]:
    """Rows of x and of W of a tile, and blocks of a cluster."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"], parameters["cluster"]


@pytest.mark.full
@pytest.mark.parametrize("m", [31, 64, 179])
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    few, more = ARM.tiles()
    for t in more if m > 64 else [t for t in few if t.bm - 32 < m <= t.bm]:
        target = replace(HOPPER, sms=t.cluster)
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, t.bn * t.at_once(t.cluster) + 8, 640 if m <= 64 else 256)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn, t.cluster)
        with open_device("interpreter", target) as device:
            result = run_case(case, ARM, device, base_context(target))
        assert result.ok, f"{t}: {result.sentence}"


@L.kernel(launch_bounds=(128, 1))
def fragments(unit: L.In[L.u8], out: L.Out[L.u32]):
    """The four A fragments of a unit, `[4, 32, 4]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 72, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
    L.cuda.syncwarp()
    scales = scales_in_lanes_order(tile, 0)
    for half in L.unroll(2):
        made = rounded_weights(tile, 0, half, scales)
        for j in L.unroll(2):
            L.stg_v4_b32(out, 128 * (2 * half + j) + 4 * lane, made[j])


def reordered(codes: np.ndarray) -> np.ndarray:
    """Each 64 of a row as products take them: product p, half h, lane t, element e of four; from t, p, h and e."""
    return codes.reshape(len(codes), -1, 4, 2, 2, 4).transpose(0, 1, 3, 4, 2, 5).reshape(codes.shape)


def test_fragments_are_the_rounded_weights_bit_for_bit() -> None:
    """All codes under all block scales, zero and subnormal ones too; in the order that x is put into."""
    seen: set[tuple[int, int]] = set()
    for first in range(127):
        scale = ((first + np.arange(128)) % 127).astype(np.uint8).reshape(16, 8)
        codes = (np.arange(16)[:, None] + np.arange(128) * 5 + first).astype(np.uint8) & 15
        seen |= set(zip(np.repeat(scale, 16, axis=1).ravel().tolist(), codes.ravel().tolist(), strict=True))
        stored = {
            "weight": codes[:, ::2] | codes[:, 1::2] << 4,
            "scale": scale.view(ml_dtypes.float8_e4m3fn),
            "global_scale": np.float32([1]),
        }
        unit = pack(stored)["weight"]
        out = simt.Buffer("out", 4 * 32 * 16)
        buffers = (simt.Buffer("unit", unit.nbytes, data=unit), out)
        simt.run(fragments, grid=1, block=32, shared_bytes=1152, args=buffers)
        found = out.array(np.uint8, (4, 8, 4, 2, 2, 4))  # product, g, t, K half, row half, element
        made = found.transpose(4, 1, 0, 3, 2, 5).reshape(16, 128)
        expected = reordered(nvfp4_rounded.encode(stored["weight"], stored["scale"]).view(np.uint8))
        # a code under a scale of 0 has become +0
        assert np.array_equal(np.where(made == 0x80, 0, made), np.where(expected == 0x80, 0, expected))
    assert len(seen) == 127 * 16


@pytest.mark.parametrize(("m", "k", "words", "ordered"), [(1, 128, 0, True), (3, 2432, 700, True), (3, 2184, 9, False)])
def test_x_is_quantized_as_on_the_host_and_put_into_order(m: int, k: int, words: int, ordered: bool) -> None:
    rng = np.random.default_rng(m)
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-40, 40, (m, 1))).astype(ml_dtypes.bfloat16)
    if m > 1:
        x[0] = 0
    made = FORMATS["fp8_row"].quantize(x.astype(np.float32))
    given, codes, scales = simt.Buffer("x", x.nbytes, data=x), simt.Buffer("codes", m * k), simt.Buffer("scales", 4 * m)
    flags = simt.Buffer("flags", 4 * 704)
    simt.run(quantize_fp8_rows(ordered), grid=m, block=THREADS, args=(given, codes, scales, flags, k, words))
    expected = made["weight"].view(np.uint8)
    assert np.array_equal(codes.array(np.uint8, (m, k)), reordered(expected) if ordered else expected)
    assert oracle.same_bits(scales.array(np.float32, (m, 1)), made["scale"])
    assert not flags.array(np.uint32, (704,))[:words].any()


def faulty(monkeypatch, tile: RoundedTile, kernel) -> None:
    """The arm with this kernel for every call."""
    lower = ARM.lower
    monkeypatch.setattr(ARM, "tile", lambda c: tile)
    monkeypatch.setattr(ARM, "kernels", (ARM.order, kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = RoundedTile(32, 64)
    faulty(monkeypatch, tile, kernels.wgmma_nvfp4_fp8(32, 64, tile.stages, 3, raster=7))
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 1408), ARM, device, base_context(HOPPER))


def test_x_that_is_loaded_before_it_was_quantized_is_reported(monkeypatch) -> None:
    of_loader = kernels.loader

    def early(ring, walk, per_row, stages, bring_w, bring_x):
        run = of_loader(ring, walk, per_row, stages, bring_x, bring_w)

        @L.device
        def swapped(w, x, m, n, k, cut):
            run(x, w, m, n, k, cut)

        return swapped

    monkeypatch.setattr(kernels, "loader", early)
    tile = RoundedTile(32, 64)
    faulty(monkeypatch, tile, kernels.wgmma_nvfp4_fp8(32, 64, tile.stages, 3, raster=8))
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Unwaited, match=r"x\.codes"):
        run(case_of(17, 64, 256), ARM, device, base_context(HOPPER))


def test_x_that_is_not_in_the_lanes_order_is_found(monkeypatch) -> None:
    """As a quantizer that keeps K in order would leave it."""
    from atlas_lab.kernels.quantize import fp8_groups

    lower = ARM.lower

    def in_order(c):
        quantized, product = lower(c)
        groups = replace(
            quantized,
            kernel=fp8_groups.quantize_fp8_groups,
            grid=(-(-c.m // fp8_groups.ROWS), 1),
            block=fp8_groups.THREADS,
            args=(*quantized.args[:4], c.m, c.k, c.m, 0),
        )
        return [groups, product]

    monkeypatch.setattr(ARM, "kernels", (*ARM.kernels, fp8_groups.quantize_fp8_groups))
    with open_device("interpreter", HOPPER) as device:
        assert run_case(case_of(17, 64, 128), ARM, device, base_context(HOPPER)).ok
        monkeypatch.setattr(ARM, "lower", in_order)
        assert not run_case(case_of(17, 64, 128), ARM, device, base_context(HOPPER)).ok


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(32, 17408, 5120), base) == (64, 64, 1)
    assert tile_of(case_of(64, 17408, 5120), base) == (64, 64, 1)
    assert tile_of(case_of(128, 17408, 5120), base) == (128, 128, 1)
    assert tile_of(case_of(4096, 17408, 5120), base) == (176, 128, 2)
