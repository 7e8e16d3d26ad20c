"""The GEMM on warpgroups of repacked Q2_0 and x in q8_1: awkward shapes, every tile, bits, faulty kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from impatient import impatient

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.lanes_q2_0 import pack
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.q2_0 import UnitTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import q8_1
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_q2_0 as kernels
from atlas_lab.kernels.gemv.columns import opaque
from atlas_lab.kernels.quantize.q8_1 import ROWS, SPAN, THREADS, quantize_q8_1
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARM = {a.name: a for a in atlas_arms()}["q2_mmq"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def case_of(m: int, n: int, k: int, group: int = 128) -> Case:
    return Case(ARM.name, ("ffn.up",), m, n, k, f"q2_0_g{group}")


def tile_of(case: Case, base) -> tuple[int, int]:
    """Rows of x and of W of a tile."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"]


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k"), [(17, 8, 128), (33, 136, 384), (97, 5, 128), (65, 77, 640)])
def test_awkward_shapes(m: int, n: int, k: int, device) -> None:
    result = run_case(case_of(m, n, k), ARM, device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.full
@pytest.mark.parametrize("m", [31, 64, 97])
def test_every_tile_with_ragged_edges_on_one_sm(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    few, more = ARM.tiles()
    target = replace(HOPPER, sms=1)
    for t in more if m > 64 else [t for t in few if t.bm - 32 < m <= t.bm]:
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, t.bn * (m <= 64) + 8, 1280 if m < 32 else 256)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn)
        with open_device("interpreter", target) as device:
            result = run_case(case, ARM, device, base_context(target))
        assert result.ok, f"{t}: {result.sentence}"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [29, 61, 333, 1100])
def test_every_tile_on_a_card(m: int, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    few, more = ARM.tiles()
    base, outputs = base_context(device.target), []
    for t in more if m > 64 else [t for t in few if m <= t.bm]:
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, 5000, 4224)
        result = run_case(case, ARM, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, ARM, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order() -> None:
    outputs = []
    for target, options, seed in (
        (HOPPER, Options(), 0),
        (replace(HOPPER, sms=1), Options(order="random", late_async="random"), 1),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        for m in ((33, 20), (20, 70))[seed]:
            outputs.append(run(case_of(m, 40, 384), ARM, device, base_context(target)).out[:20])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


def test_sums_that_blocks_share(monkeypatch) -> None:
    """A tile cut into two shares."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    monkeypatch.setattr(ARM, "tile", lambda c: UnitTile(64, 128))
    target = replace(HOPPER, sms=2)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(33, 40, 1024), ARM, device, base_context(target))
    assert result.ok, result.sentence


@L.kernel(launch_bounds=(32, 1))
def fragments(unit: L.In[L.u8], out: L.Out[L.u32], k: L.i32):
    """The eight A fragments of a unit's codes, `[8, 32, 4]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, kernels.UNIT // 16, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
    L.cuda.syncwarp()
    for g in L.unroll(kernels.GROUPS):
        made = kernels.weights(tile, 0, g, opaque(kernels.MAGIC, k))
        for j in L.unroll(2):
            L.stg_v4_b32(out, 128 * (2 * g + j) + 4 * lane, made[j])


def test_fragments_are_codes_less_1_exactly_in_the_order_of_x() -> None:
    """Every code in every place of a lane, 3 too, which quantizers do not make."""
    blocks = np.random.default_rng(5).integers(0, 256, (16, 34), np.uint8)
    unit = pack({"blocks": blocks}, 128)["weight"]
    given, out = simt.Buffer("unit", unit.nbytes, data=unit), simt.Buffer("out", 8 * 32 * 16)
    simt.run(fragments, grid=1, block=32, shared_bytes=kernels.UNIT, args=(given, out, 128))
    found = out.array(np.float16, (8, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
    codes = np.stack([blocks[:, 2:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(16, 128)
    assert set(codes.flat) == {0, 1, 2, 3}
    assert np.array_equal(found.transpose(4, 1, 0, 3, 2, 5).reshape(16, 128), reordered(codes - np.float16(1)))


def reordered(x: np.ndarray) -> np.ndarray:
    """Each 32 of a row in the lanes' order: product j, half h, lane t, element of a pair; from t, j, h, element."""
    return x.reshape(len(x), -1, 4, 2, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


def test_activations_are_quantized_without_sums() -> None:
    """K that no sums are made for; rows past the last have scales of 0."""
    m, k = 19, 384
    x = np.random.default_rng(1).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    expected = q8_1.quantize(x.astype(np.float32))
    buffers = [
        simt.Buffer("x", x.nbytes, data=x),
        simt.Buffer("codes", 2 * m * k),
        simt.Buffer("scales", 4 * (k // 32) * 32),
        simt.Buffer("flags", 4 * 704),
    ]
    grid = (-(-m // ROWS), k // SPAN)
    simt.run(quantize_q8_1(with_sums=False), grid=grid, block=THREADS, args=(*buffers, m, k, 32, 700))
    assert np.array_equal(buffers[1].array(np.float16, (m, k)).astype(np.int8), reordered(expected.codes))
    # of 16 rows, from j, t, element of a column of the product
    scales = buffers[2].array(np.float32, (k // 32, 2, 4, 2, 2)).transpose(0, 1, 3, 2, 4).reshape(-1, 32)
    assert oracle.same_bits(scales[:, :m], expected.d.T)
    assert not scales[:, m:].any()
    assert not buffers[3].array(np.uint32, (704,))[:700].any()


def with_kernel(monkeypatch, kernel) -> None:
    """The arm with this kernel of tiles of 32 by 64 for every call."""
    lower = ARM.lower
    monkeypatch.setattr(ARM, "tile", lambda c: UnitTile(32, 64))
    monkeypatch.setattr(ARM, "kernels", (ARM.order, kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_a_stage_that_is_filled_before_it_is_empty_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "ring", impatient(kernels.ring))
    with_kernel(monkeypatch, kernels.wgmma_q2_0(32, 64, 2, 3, raster=7))
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 384), ARM, device, base_context(HOPPER))


def test_groups_of_64_are_left_to_the_arm_that_dequantizes() -> None:
    base, other = base_context(HOPPER), {a.name: a for a in atlas_arms()}["q2_dequant"]
    assert "reads groups of 128" in str(verdict_of(case_of(17, 8, 128, group=64), ARM, base))
    assert verdict_of(replace(case_of(17, 8, 128, group=64), arm=other.name), other, base)
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(17, 8, 128), ARM, elsewhere)


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(32, 17408, 5120), base) == (32, 128)
    assert tile_of(case_of(64, 1024, 5120), base) == (64, 128)
    assert tile_of(case_of(128, 17408, 5120), base) == (64, 128)
    assert tile_of(case_of(4096, 17408, 5120), base) == (96, 128)
    assert [UnitTile(bm, 128).stages for bm in (32, 64, 96)] == [8, 8, 7]
