"""The GEMM on warpgroups of repacked Q4_K and x in q8_1: awkward shapes, every tile, bits, faulty kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from impatient import impatient

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.lanes_q4_k import pack
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.q4_k import BlockTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.numbers import snr_db
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import get, q4_k, q8_1
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_q4_k as kernels
from atlas_lab.kernels.gemv.columns import opaque
from atlas_lab.kernels.quantize.q8_1 import ROWS, SPAN, SUMS, THREADS, quantize_q8_1
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARM = {a.name: a for a in atlas_arms()}["q4k_mmq"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")


def case_of(m: int, n: int, k: int, values: str = "heavy") -> Case:
    return Case(ARM.name, ("ffn.up",), m, n, k, "q4_k", values=values)


def tile_of(case: Case, base) -> tuple[int, int, int]:
    """Rows of x and of W of a tile, and blocks of a cluster."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"], parameters["cluster"]


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k"), [(17, 8, 256), (33, 136, 768), (97, 5, 256), (65, 77, 512)])
def test_awkward_shapes(m: int, n: int, k: int, device) -> None:
    result = run_case(case_of(m, n, k), ARM, device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.full
@pytest.mark.parametrize("m", [31, 64, 97])
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    few, more = ARM.tiles()
    for t in more if m > 64 else [t for t in few if t.bm - 32 < m <= t.bm]:
        target = replace(HOPPER, sms=t.cluster)
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        n = t.bn * (t.cluster - (m > 64)) + 8  # for more than 64 rows it has two row tiles
        case = case_of(m, n, 1024 if m < 32 else 256)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn, t.cluster)
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
        case = case_of(m, 5000, 4352)
        result = run_case(case, ARM, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, ARM, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order() -> None:
    outputs = []
    for target, options, seed in (
        (HOPPER, Options(), 0),
        (HOPPER, Options(order="random", late_async="random"), 1),
        (replace(HOPPER, sms=1), Options(order="random", late_async="random"), 2),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        for m in ((33, 20), (20, 70), (33,))[seed]:
            outputs.append(run(case_of(m, 40, 512), ARM, device, base_context(target)).out[:20])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


def test_sums_that_blocks_share(monkeypatch) -> None:
    """A tile cut into two shares."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    tile = BlockTile(32, 64)
    with_kernel(monkeypatch, kernels.wgmma_q4_k(32, 64, tile.stages, 3))
    target = replace(HOPPER, sms=1)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(17, 40, 2048), ARM, device, base_context(target))
    assert result.ok, result.sentence


@L.kernel(launch_bounds=(32, 1))
def fragments(unit: L.In[L.u8], out: L.Out[L.u32], k: L.i32):
    """The 16 A fragments of a unit's codes, then that of its minimums, `[17, 32, 4]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, kernels.UNIT // 16, 32):
        L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
    L.cuda.syncwarp()
    head = L.lds_v4_b32(tile, kernels.SCALES + 16 * (lane >> 2))
    rest = L.lds_v4_b32(tile, kernels.REST + 16 * (lane >> 2))
    for g in L.unroll(kernels.GROUPS):
        made = kernels.weights(tile, 0, g, head, opaque(kernels.MAGIC, k))
        for j in L.unroll(2):
            L.stg_v4_b32(out, 128 * (2 * g + j) + 4 * lane, made[j])
    L.stg_v4_b32(out, 128 * 16 + 4 * lane, kernels.minimums(head, rest))


def test_fragments_are_codes_times_their_scales_exactly() -> None:
    """Every code under every scale's bits, and every minimum, in the order of x and of its sums."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (16, q4_k.BYTES), np.uint8)
    sc, m = rng.permuted(np.arange(64, dtype=np.uint8).repeat(4)).reshape(2, 16, 8)
    blocks[:, 4:16] = q4_k.pack_scales(sc, m)
    unit = pack({"blocks": blocks})["weight"]
    given, out = simt.Buffer("unit", unit.nbytes, data=unit), simt.Buffer("out", 17 * 32 * 16)
    simt.run(fragments, grid=1, block=32, shared_bytes=kernels.UNIT, args=(given, out, 256))
    found = out.array(np.uint16, (17, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
    values = found[:16].view(np.float16).transpose(4, 1, 0, 3, 2, 5).reshape(16, 256).astype(np.float64)
    expected = (sc[..., None].astype(np.float64) * q4_k.codes(blocks)).reshape(16, 256)
    assert np.array_equal(values, reordered(expected))
    least = (found[16].astype(np.uint32) << 16).view(np.float32).transpose(3, 0, 2, 1, 4).reshape(16, 2, 8)
    assert np.array_equal(least, -np.stack([m, m], axis=1).astype(np.float32))


def reordered(x: np.ndarray) -> np.ndarray:
    """Each 32 of a row in the lanes' order: product j, half h, lane t, element of a pair; from t, j, h, element."""
    return x.reshape(len(x), -1, 4, 2, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


@pytest.mark.parametrize(("m", "k", "words"), [(1, 256, 0), (17, 512, 700), (35, 768, 5)])
def test_activations_are_quantized_as_on_the_host(m: int, k: int, words: int) -> None:
    """Scales from subnormal to large, groups of zeros, halves; codes of Q8_0."""
    rng = np.random.default_rng(m)
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-40, 40, (m, 1))).astype(ml_dtypes.bfloat16)
    x[0, :32], x[0, 32:64] = 0, np.float32(2.0**-130)
    x[0, 64:96] = np.arange(32) * 4 + 0.5
    x[0, 95] = 127
    pitch = -(-m // 16) * 16
    expected = q8_1.quantize(x.astype(np.float32))
    buffers = [
        simt.Buffer("x", x.nbytes, data=x),
        simt.Buffer("codes", 2 * m * k),
        simt.Buffer("scales", 4 * (k // 32) * pitch),
        simt.Buffer("sums", 2 * m * k // 16),
        simt.Buffer("flags", 4 * 704),
    ]
    grid = (-(-m // ROWS), k // SPAN)
    simt.run(quantize_q8_1(), grid=grid, block=THREADS, args=(*buffers, m, k, pitch, words))
    codes = buffers[1].array(np.float16, (m, k))
    assert np.array_equal(codes.astype(np.int8), reordered(expected.codes))
    # of 16 rows, from j, t, element of a column of the product
    scales = buffers[2].array(np.float32, (k // 32, pitch // 16, 4, 2, 2)).transpose(0, 1, 3, 2, 4).reshape(-1, pitch)
    assert oracle.same_bits(scales[:, :m], expected.d.T)
    assert not scales[:, m:].any()
    sums = buffers[3].array(ml_dtypes.bfloat16, (m, k // 256, 2, 8))
    assert oracle.same_bits(sums[:, :, 0], expected.high.reshape(m, -1, 8))
    assert oracle.same_bits(sums[:, :, 1], expected.low.reshape(m, -1, 8))
    assert not buffers[4].array(np.uint32, (704,))[:words].any()
    assert SUMS == 16


def test_codes_are_those_of_q8_0_and_sums_theirs() -> None:
    x = np.random.default_rng(7).standard_normal((5, 320)).astype(np.float32)
    made, stored = q8_1.quantize(x), get("q8_0").quantize(x)["blocks"].reshape(5, 10, 34)
    assert np.array_equal(made.codes.reshape(5, 10, 32), stored[..., 2:].view(np.int8))
    assert np.array_equal(made.d.astype(np.float16), np.ascontiguousarray(stored[..., :2]).view(np.float16)[..., 0])
    exact = q8_1.dequantize(made).reshape(5, 10, 32).sum(axis=2)
    assert np.abs(made.sums - exact).max() <= 2.0**-16 * np.abs(exact).max()
    assert snr_db(q8_1.dequantize(made), x.astype(np.float64)) > 42
    with pytest.raises(ValueError, match="found K = 40, expected a multiple of 32"):
        q8_1.quantize(x[:, :40])


def with_kernel(monkeypatch, kernel) -> None:
    """The arm with this kernel of tiles of 32 by 64 for every call."""
    lower = ARM.lower
    monkeypatch.setattr(ARM, "tile", lambda c: BlockTile(32, 64))
    monkeypatch.setattr(ARM, "kernels", (quantize_q8_1(), kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_a_ring_that_is_filled_before_it_is_empty_is_reported(monkeypatch) -> None:
    """A third block of K lands on the first, whose codes are read."""
    monkeypatch.setattr(kernels, "ring", impatient(kernels.ring))
    with_kernel(monkeypatch, kernels.wgmma_q4_k(32, 64, 2, 3, raster=7))
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 768), ARM, device, base_context(HOPPER))


def test_x_that_is_loaded_before_it_was_quantized_is_reported(monkeypatch) -> None:
    of_loader = kernels.loader

    def early(ring, walk, per_row, stages, bring_w, bring_x):
        run = of_loader(ring, walk, per_row, stages, bring_x, bring_w)

        @L.device
        def swapped(w, x, m, n, k, cut):
            run(x, w, m, n, k, cut)

        return swapped

    monkeypatch.setattr(kernels, "loader", early)
    with_kernel(monkeypatch, kernels.wgmma_q4_k(32, 64, 2, 3, raster=8))
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Unwaited, match=r"x\.codes"):
        run(case_of(17, 64, 256), ARM, device, base_context(HOPPER))


def test_weights_that_are_not_whole_blocks_are_refused() -> None:
    base = base_context(HOPPER)
    assert verdict_of(case_of(17, 8, 256), ARM, base)
    assert "starts from q4_k" in str(verdict_of(replace(case_of(17, 8, 256), format="q8_0"), ARM, base))
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(17, 8, 256), ARM, elsewhere)


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(32, 17408, 5120), base) == (32, 128, 1)
    assert tile_of(case_of(64, 1024, 5120), base) == (64, 128, 1)
    assert tile_of(case_of(128, 17408, 5120), base) == (64, 128, 1)
    assert tile_of(case_of(4096, 17408, 5120), base)[0] == 96
    assert [BlockTile(bm, 128).stages for bm in (32, 64, 96)] == [6, 4, 3]
