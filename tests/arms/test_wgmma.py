"""GEMMs on warpgroups: awkward shapes, every tile, bits that no tile and no order changes, faulty launches."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.tiles import NARROW, TALL, WIDE, Tile
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import Ran, run, run_case
from atlas_lab.formats import fp8_groups
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_fp8 import grid_rows, wgmma_fp8
from atlas_lab.kernels.gemm.wgmma_store import WARP_BYTES, row_storer
from atlas_lab.kernels.quantize.fp8_groups import ROWS, THREADS, quantize_fp8_groups
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMS = {"bf16_wgmma": "bf16", "fp8_wgmma_w8a8": "fp8"}
BOTH = pytest.mark.parametrize("name", FORMS)


def tiles_of(name: str) -> list:
    """With rows of x that are enough for each; of every height and cluster the narrowest, the others in full."""
    out, seen = [], set()
    for t in sorted((t for tiles in ARMS[name].tiles() for t in tiles if t.split == 1), key=lambda t: t.bn):
        kind = (t.bm, t.across, t.down)
        marks = pytest.mark.full if kind in seen else ()
        out.append(pytest.param(name, NARROW if t.bm == NARROW else 131, t, marks=marks))
        seen.add(kind)
    return out


TILES = [t for name in FORMS for t in tiles_of(name)]


def case_of(name: str, m: int, n: int, k: int, columns: int = 0) -> Case:
    setting = (("columns", columns),) if columns else ()
    return Case(name, ("ffn.up",), m, n, k, FORMS[name], setting=setting)


def tile_of(case: Case, base) -> tuple[int, int, int, int]:
    """Rows and columns of the tile that a case's product is made of, and blocks of a cluster, across and down."""
    parameters = dict(launched(case, ARMS[case.arm], base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"], parameters["across"], parameters["down"]


def ran(case: Case, device: Device) -> Ran:
    return run(case, ARMS[case.arm], device, base_context(device.target))


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((17, 8, 16), (33, 96, 48), (17, 136, 1040), (64, 5, 16), (65, 77, 400)),
        *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((100, 136, 272), (129, 264, 144))),
    ],
)
@BOTH
def test_awkward_shapes(name: str, m: int, n: int, k: int, device) -> None:
    result = run_case(case_of(name, m, n, k), ARMS[name], device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.parametrize(("name", "m", "t"), TILES, ids=str)
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(name: str, m: int, t: Tile, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    arm, target = ARMS[name], replace(HOPPER, sms=t.cluster)
    monkeypatch.setattr(arm, "tile", lambda c: t)
    case = case_of(name, m, t.bn * t.across + (8 if t.bn % 64 else 3), 144)
    assert tile_of(case, base_context(target)) == (t.bm, t.bn, t.across, t.down)
    with open_device("interpreter", target) as device:
        result = run_case(case, arm, device, base_context(target))
    assert result.ok, result.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("m", [61, 333, 1100])
@BOTH
def test_every_tile_on_a_card(name: str, m: int, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    arm, base, outputs = ARMS[name], base_context(device.target), []
    for t in (t for t in arm.tiles()[m > NARROW] if t.split == 1):
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        case = case_of(name, m, 5000, 2064)
        result = run_case(case, arm, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(ran(case, device).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
@BOTH
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order(name: str) -> None:
    outputs = []
    for target, form, options, seed in (
        (HOPPER, 64, Options(), 0),
        (HOPPER, 192, Options(order="random", late_async="random"), 1),
        (replace(HOPPER, sms=3), 136, Options(order="random", resident=3), 2),
        (replace(HOPPER, sms=2), 128, Options(order="random", late_async="random"), 3),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        outputs.append(ran(case_of(name, 33, 136, 272, form), device).out)
        outputs.append(ran(case_of(name, 129, 136, 272), device).out[:33])
        outputs.append(ran(case_of(name, 33, 136, 272, form), device).out)
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


def spoiled(launch: Launch, **changes) -> Launch:
    """A launch whose map of W has another box, or with other fields."""
    box = changes.pop("box", None)
    args = list(launch.args)
    if box is not None:
        args[1] = replace(args[1], box=box)
    return replace(launch, args=tuple(args), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"box": (32, 64)}, simt.Deadlock, "wgmma_ring.py"),
        ({"shared": 8 * (64 + 64) * 128}, simt.SimtError, "dynamic shared memory"),
        ({"block": 128}, simt.Deadlock, "wgmma_ring.py"),
    ],
)
def test_a_launch_that_fits_its_kernel_no_longer_is_reported(monkeypatch, changes, error, text) -> None:
    arm = ARMS["bf16_wgmma"]
    lower = arm.lower
    monkeypatch.setattr(arm, "lower", lambda c: [spoiled(x, **changes) for x in lower(c)])
    with open_device("interpreter", HOPPER) as device, pytest.raises(error, match=text):
        ran(case_of("bf16_wgmma", 17, 40, 128, 64), device)


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others' products read it."""
    from atlas_lab.kernels.gemm import wgmma_bf16

    of_ring = wgmma_ring.ring
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(wgmma_bf16, "ring", of_ring.__wrapped__)
    faulty = wgmma_bf16.wgmma_bf16(64, 136, 3)
    arm = ARMS["bf16_wgmma"]
    lower = arm.lower
    shared = wgmma_ring.shared_of(3, 200 * 128, 4 * WARP_BYTES)
    monkeypatch.setattr(arm, "kernels", (faulty,))
    monkeypatch.setattr(arm, "lower", lambda c: [replace(x, kernel=faulty, shared=shared) for x in lower(c)])
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        ran(case_of("bf16_wgmma", 17, 40, 1024, 136), device)


@pytest.mark.parametrize("name", ["barrier_sync", "fence_proxy_async"])
def test_rows_that_are_cleared_and_not_waited_for_are_reported(name: str, monkeypatch) -> None:
    """Warps of another warp's rows, or the matrix unit, which reads them otherwise than they were written."""
    monkeypatch.setattr(L, name, lambda *args: None)
    device = InterpreterDevice(HOPPER, options=Options(order="random"))
    with pytest.raises(simt.SimtError, match=r"race|fence"):
        ran(case_of("bf16_wgmma", 17, 40, 128, 64), device)


def test_x_that_is_loaded_before_it_was_quantized_is_reported(monkeypatch) -> None:
    from atlas_lab.kernels.gemm import wgmma_fp8 as fp8

    of_loader = fp8.loader

    def early(ring, walk, per_row, stages, bring_w, bring_x):
        run = of_loader(ring, walk, per_row, stages, bring_x, bring_w)

        @L.device
        def swapped(w, x, m, n, k, cut):
            run(x, w, m, n, k, cut)

        return swapped

    monkeypatch.setattr(fp8, "loader", early)
    arm = ARMS["fp8_wgmma_w8a8"]
    tile = Tile(NARROW, 40, beside=4)
    faulty = fp8.wgmma_fp8(64, 40, tile.stages, raster=7)
    lower = arm.lower
    monkeypatch.setattr(arm, "tile", lambda c: tile)
    monkeypatch.setattr(arm, "kernels", (quantize_fp8_groups, faulty))
    monkeypatch.setattr(arm, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=faulty)])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Unwaited, match=r"x\.codes"):
        ran(case_of("fp8_wgmma_w8a8", 17, 40, 128), device)


@pytest.mark.parametrize("m", [20, 100])
def test_a_setting_that_the_arm_does_not_know_is_refused_for_every_m(m: int) -> None:
    case = case_of("bf16_wgmma", m, 40, 64, 999)
    with open_device("interpreter", HOPPER) as device:
        found = run_case(case, ARMS[case.arm], device, base_context(HOPPER))
    assert not found.ok
    assert "columns=999, expected one of the arm's" in found.sentence


@BOTH
def test_k_of_few_tiles_is_split(name: str, device) -> None:
    arm, base = ARMS[name], base_context(device.target)
    settings = arm.settings(400, 272, device.target)
    assert len(set(settings)) == len(settings) == len(arm.few)
    assert {(s["columns"], s["split"]) for s in map(dict, settings) if len(s) > 1} == set(arm.splits)
    assert dict(arm.settings(1024, 5120, HOPPER)[0]).get("split") == 2
    assert "split" not in dict(arm.settings(16384, 5376, HOPPER)[0])
    case = replace(case_of(name, 33, 400, 272), setting=(("columns", 128), ("split", 2)))
    assert dict(launched(case, arm, base)[-1].spec.parameters)["split"] == 2
    assert tile_of(replace(case, setting=(("columns", 128),)), base) == (NARROW, 128, 1, 1)
    assert tile_of(replace(case, m=100), base) == tile_of(case_of(name, 100, 400, 272), base)
    result = run_case(case, arm, device, base)
    assert result.ok, result.sentence
    refused = run_case(replace(case, setting=(("columns", 128), ("split", 4))), arm, device, base)
    assert "columns=128 split=4, expected one of the arm's" in refused.sentence


def test_tiles_that_warpgroups_or_blocks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="found tiles of 96 rows of x, expected a multiple of 64"):
        wgmma_ring.ring(3, 1024, 0, 96, 1)
    with pytest.raises(ValueError, match="found clusters of 3 x 1 blocks, expected 1, 2, 4 or 8"):
        wgmma_ring.ring(3, 1024, 0, 64, 3)


def test_columns_that_more_scales_cover_than_a_tile_has_are_refused() -> None:
    assert [grid_rows(bn) for bn in (40, 64, 128, 136, 192, 152)] == [2, 1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="found 152 columns, which lie in 3 rows of scales, expected 1 or 2"):
        wgmma_fp8(64, 152, 4)


def test_stores_need_whole_chunks_and_aligned_memory() -> None:
    with pytest.raises(ValueError, match="found 132 columns, expected a multiple of 8"):
        row_storer(132, 0)
    with pytest.raises(ValueError, match="found memory from byte 8, expected a multiple of 16"):
        row_storer(128, 8)


def test_clusters_share_whole_repeats_of_a_swizzle() -> None:
    with pytest.raises(ValueError, match="found 136 rows of W for 2 blocks, expected a multiple of 8 each"):
        wgmma_ring.ring(2, 0, 0, 64, bn=136, down=2)
    with pytest.raises(ValueError, match="found mbarriers from byte 8, expected a multiple of 16"):
        wgmma_ring.ring(2, 0, 8, 64)


def test_rows_that_tma_cannot_load_are_refused() -> None:
    base = base_context(HOPPER)
    assert "K must be a multiple of 8" in str(verdict_of(case_of("bf16_wgmma", 17, 8, 36), ARMS["bf16_wgmma"], base))
    fp8 = verdict_of(case_of("fp8_wgmma_w8a8", 17, 8, 40), ARMS["fp8_wgmma_w8a8"], base)
    assert "K must be a multiple of 16" in str(fp8)
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of("bf16_wgmma", 17, 8, 64), ARMS["bf16_wgmma"], elsewhere)


@pytest.mark.parametrize(("m", "k"), [(1, 8), (17, 200), (35, 1032)])
def test_activations_are_quantized_as_on_the_host(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-40, 40, (m, 1))).astype(ml_dtypes.bfloat16)
    x[0, : min(k, 128)] = 0
    groups, pitch = -(-k // 128), m + 3
    codes, scales = fp8_groups.quantize(x.astype(np.float32))
    buffers = [
        simt.Buffer("x", x.nbytes, data=x),
        simt.Buffer("codes", m * k),
        simt.Buffer("scales", 4 * groups * pitch),
        simt.Buffer("flags", 4 * 700),
    ]
    simt.run(quantize_fp8_groups, grid=(-(-m // ROWS), groups), block=THREADS, args=(*buffers, m, k, pitch, 700))
    assert not buffers[3].array(np.uint32, (700,)).any()
    assert oracle.same_bits(buffers[1].array(ml_dtypes.float8_e4m3fn, (m, k)), codes)
    assert oracle.same_bits(buffers[2].array(np.float32, (groups, pitch))[:, :m], scales)
    assert (
        np.abs(fp8_groups.dequantize(codes, scales) - x.astype(np.float64)).max()
        <= np.abs(x.astype(np.float64)).max() / 16
    )


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    """At M = 64 a tile for every SM of one wave; above, the largest whose turns come out even or can be cut."""
    arm = ARMS["bf16_wgmma"]
    assert arm.settings(17408, 5120, HOPPER)[0] == (("columns", 136),)
    base = base_context(HOPPER)
    assert tile_of(case_of("bf16_wgmma", 4096, 17408, 5120), base) == (WIDE, 256, 1, 2)
    assert tile_of(case_of("bf16_wgmma", 512, 17408, 5120), base) == (WIDE, 176, 1, 2)
    assert tile_of(case_of("bf16_wgmma", 384, 17408, 5120), base) == (WIDE, 136, 1, 1)
    assert tile_of(case_of("bf16_wgmma", 192, 17408, 5120), base) == (TALL, 136, 1, 1)
    fp8 = {m: tile_of(case_of("fp8_wgmma_w8a8", m, 17408, 5120), base) for m in (192, 512, 4096)}
    assert fp8 == {192: (TALL, 128, 1, 1), 512: (WIDE, 128, 1, 1), 4096: (TALL, 128, 1, 2)}
    assert [Tile(NARROW, 40, c).at_once(132) for c in (1, 2, 4)] == [132, 132, 128]
    assert Tile(NARROW, 40, 4).grid(64, 170, 1024, 132, False) == 8
