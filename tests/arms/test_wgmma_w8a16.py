"""The GEMM on warpgroups over stored FP8, x BF16: awkward shapes, every tile, bits that no tile changes, faults."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.w8a16 import StoredTile
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm import wgmma_w8a16 as kernels
from atlas_lab.kernels.quantize.lanes_order import THREADS, order_for_lanes, order_grid, ordered_k
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARM = {a.name: a for a in atlas_arms()}["fp8_wgmma"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMS = ("fp8", "fp8_tensor", "fp8_row")


def case_of(m: int, n: int, k: int, form: str = "fp8", columns: int = 0, stored: str = "") -> Case:
    setting = (("columns", columns),) if columns else ()
    return Case(ARM.name, ("ffn.up",), m, n, k, form, setting=setting, stored=stored)


def tile_of(case: Case, base) -> tuple[int, int, int]:
    """Rows of x and of W of a tile, and blocks of a cluster."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"], parameters["cluster"]


SHAPES = {
    **dict.fromkeys([(17, 8, 16), (33, 136, 272), (64, 5, 128)], FORMS),
    (129, 264, 144): ("fp8",),
    (17, 9, 4240): ("fp8",),  # more stages than a warp has lanes
    (65, 77, 400): ("fp8_row",),
}


@pytest.mark.parametrize(
    ("m", "n", "k", "form"),
    [
        pytest.param(*shape, form, marks=() if form in forms else pytest.mark.full)
        for shape, forms in SHAPES.items()
        for form in FORMS
    ],
)
def test_awkward_shapes(m: int, n: int, k: int, form: str, device) -> None:
    result = run_case(case_of(m, n, k, form), ARM, device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.parametrize("form", ["fp8", "fp8_row"])
def test_scales_stored_as_bf16(form: str, device) -> None:
    result = run_case(case_of(33, 136, 272, form, stored="bf16 scales"), ARM, device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.full
@pytest.mark.parametrize("m", [31, 64, 163])
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    few, more = ARM.tiles()
    for t in more if m > 64 else [t for t in few if t.bm - 32 < m <= t.bm]:
        target = replace(HOPPER, sms=t.cluster)
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, t.bn * t.at_once(t.cluster) + 8, 640 if m <= 64 else 272)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn, t.cluster)
        with open_device("interpreter", target) as device:
            result = run_case(case, ARM, device, base_context(target))
        assert result.ok, f"{t}: {result.sentence}"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [29, 61, 333, 1100])
@pytest.mark.parametrize("form", ["fp8", "fp8_row"])
def test_every_tile_on_a_card(m: int, form: str, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    few, more = ARM.tiles()
    base, outputs = base_context(device.target), []
    for t in more if m > 64 else [t for t in few if m <= t.bm]:
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, 5000, 4240, form)
        result = run_case(case, ARM, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, ARM, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order() -> None:
    outputs = []
    for target, form, options, seed in (
        (HOPPER, 64, Options(), 0),
        (HOPPER, 128, Options(order="random", late_async="random"), 1),
        (replace(HOPPER, sms=2), 64, Options(order="random", late_async="random"), 2),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        for m, columns in ((33, form), (20, form), *[(129, 0)] * (seed < 2)):
            made = run(case_of(m, 136, 272, "fp8", columns), ARM, device, base_context(target)).out
            outputs.append(made[:20])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


def test_scales_of_rows_multiply_sums_that_blocks_share(monkeypatch) -> None:
    """One tile and a half on three SMs, cut along K."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    monkeypatch.setattr(ARM, "tile", lambda c: StoredTile(64, 64))
    target = replace(HOPPER, sms=3)
    with open_device("interpreter", target) as device:
        result = run_case(case_of(33, 96, 768, "fp8_row"), ARM, device, base_context(target))
    assert result.ok, result.sentence


@L.kernel(launch_bounds=(128, 1))
def fragments(w: L.InMap[L.u8], out: L.Out[L.u32]):
    """The eight A fragments of 64 rows as TMA brings them, `[8, 4, 32, 4]`."""
    tile, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, 8192)
    lane, warp = L.lane_id(), L.warp_id()
    if L.cuda.threadIdx.x == 0:
        L.mbarrier_init(bars, 0, 1)
        L.fence_mbarrier_init()
        L.mbarrier_arrive_expect_tx(bars, 0, 8192)
        L.tma_load_2d(tile, 0, w, (0, 0), bars, 0)
    L.cuda.syncthreads()
    L.mbarrier_wait(bars, 0, L.u32(0))
    at = kernels.first_byte(warp, lane)
    for half in L.unroll(2):
        made = kernels.weights(tile, at, half)
        for j in L.unroll(4):
            L.stg_v4_b32(out, 512 * (4 * half + j) + 128 * warp + 4 * lane, made[j])


def test_fragments_are_the_weights_exactly_in_the_order_of_x() -> None:
    """Every finite code in every place of a lane, zeros and subnormal ones too."""
    codes = (np.arange(64)[:, None] * 5 + np.arange(128) * 3).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80
    stored, out = simt.Buffer("w", codes.nbytes, data=codes), simt.Buffer("out", 8 * 4 * 32 * 16)
    of_w = TensorMap(Tensor("u8", (64, 128), "w"), (64, 128), swizzle=128)
    simt.run(fragments, grid=1, block=128, shared_bytes=8200, args=((stored, of_w), out))
    found = out.array(np.uint16, (8, 4, 8, 4, 2, 2, 2))  # product, warp, g, t, K half, row half, element
    values = (found.astype(np.uint32) << 16).view(np.float32).transpose(1, 5, 2, 0, 4, 3, 6).reshape(64, 128)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(values, reordered(expected, 32))
    assert np.array_equal(np.signbit(values), np.signbit(reordered(expected, 32)))


def reordered(x: np.ndarray, run: int) -> np.ndarray:
    """Each 4·run of a row in the lanes' order: product j, half h, lane t, element of a pair; from t, j, h, element."""
    return x.reshape(len(x), -1, 4, run // 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


@pytest.mark.parametrize(("run", "k", "words"), [(16, 192, 0), (16, 192, 700), (32, 400, 5), (32, 8, 0)])
def test_x_is_put_into_the_lanes_order(run: int, k: int, words: int) -> None:
    """With zeros past its end, whatever lay there."""
    x = np.random.default_rng(words).integers(0, 2**16, (3, k), np.uint16)
    wide = ordered_k(k, run)
    padded = np.zeros((3, wide), np.uint16)
    padded[:, :k] = x
    given, out = simt.Buffer("x", x.nbytes, data=x), simt.Buffer("out", padded.nbytes)
    flags = simt.Buffer("flags", 4 * 704)
    args = (given, out, flags, k, words)
    simt.run(order_for_lanes(run), grid=order_grid(3, k, run), block=THREADS, args=args)
    assert np.array_equal(out.array(np.uint16, padded.shape), reordered(padded, run))
    assert not flags.array(np.uint32, (704,))[:words].any()


def faulty(monkeypatch, tile: StoredTile, kernel) -> None:
    """The arm with this kernel for every call."""
    lower = ARM.lower
    monkeypatch.setattr(ARM, "tile", lambda c: tile)
    monkeypatch.setattr(ARM, "kernels", (ARM.order, kernel))
    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = StoredTile(32, 64)
    faulty(monkeypatch, tile, kernels.wgmma_w8a16(32, 64, tile.stages, 3, raster=7))
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 1408), ARM, device, base_context(HOPPER))


def test_x_that_is_loaded_before_it_was_ordered_is_reported(monkeypatch) -> None:
    of_loader = kernels.loader

    def early(ring, walk, per_row, stages, bring_w, bring_x):
        run = of_loader(ring, walk, per_row, stages, bring_x, bring_w)

        @L.device
        def swapped(w, x, m, n, k, cut):
            run(x, w, m, n, k, cut)

        return swapped

    monkeypatch.setattr(kernels, "loader", early)
    tile = StoredTile(32, 64)
    faulty(monkeypatch, tile, kernels.wgmma_w8a16(32, 64, tile.stages, 3, raster=8))
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Unwaited, match=r"x\.ordered"):
        run(case_of(17, 64, 256), ARM, device, base_context(HOPPER))


def test_a_map_of_too_few_rows_is_reported(monkeypatch) -> None:
    lower = ARM.lower

    def spoiled(launch: Launch) -> Launch:
        x, w, *rest = launch.args
        return replace(launch, args=(x, replace(w, box=(32, 128)), *rest))

    monkeypatch.setattr(ARM, "lower", lambda c: [lower(c)[0], spoiled(lower(c)[1])])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Deadlock, match=r"wgmma_ring\.py"):
        run(case_of(17, 64, 128), ARM, device, base_context(HOPPER))


def test_rows_that_tma_cannot_load_are_refused() -> None:
    base = base_context(HOPPER)
    assert "K must be a multiple of 16" in str(verdict_of(case_of(17, 8, 40), ARM, base))
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(17, 8, 128), ARM, elsewhere)


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(32, 17408, 5120), base) == (32, 128, 1)
    assert tile_of(case_of(64, 1024, 5120), base) == (64, 64, 1)
    assert tile_of(case_of(128, 17408, 5120), base) == (128, 128, 2)
    assert tile_of(case_of(4096, 17408, 5120), base) == (160, 128, 1)
    assert [StoredTile(bm, bn).at_once(132) for bm, bn in ((32, 64), (64, 64), (160, 128))] == [396, 264, 132]
