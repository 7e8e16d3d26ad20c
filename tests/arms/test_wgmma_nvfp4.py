"""The GEMM on warpgroups over repacked NVFP4: awkward shapes, every tile, bits that no tile changes, faulty kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.copies.repacked import pack
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, site_of, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import get
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_nvfp4 as kernels
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_lanes import Lanes, in_lanes_order, in_order
from atlas_lab.kernels.gemm.wgmma_transposed import transposed_storer
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
ARM = ARMS["nvfp4_wgmma"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
BOTH = ("nvfp4", "nvfp4_ct")
FULL = pytest.mark.full


def fragments(lanes: Lanes):
    """A kernel that shows the eight A fragments of a unit, `[8, 32, 4]`."""
    pick_of, scales_of, weights = lanes

    @L.kernel(launch_bounds=(128, 1))
    def kernel(unit: L.In[L.u8], out: L.Out[L.u32]):
        tile = L.dynamic_shared(L.u8, 0)
        lane = L.lane_id()
        for i in range(lane, 72, 32):
            L.sts_v4_b32(tile, 16 * i, L.ldg_v4_b32(unit, 16 * i))
        L.cuda.syncwarp()
        pick, scales = pick_of(lane), scales_of(tile, 0)
        for half in L.unroll(2):
            made = weights(tile, 0, half, pick, scales)
            for j in L.unroll(4):
                L.stg_v4_b32(out, 128 * (4 * half + j) + 4 * lane, made[j])

    return kernel


def case_of(m: int, n: int, k: int, form: str = "nvfp4", columns: int = 0) -> Case:
    setting = (("columns", columns),) if columns else ()
    return Case(ARM.name, ("ffn.up",), m, n, k, form, setting=setting)


def tile_of(case: Case, base) -> tuple[int, int, int]:
    """Rows of x and of W of a tile, and blocks of a cluster."""
    parameters = dict(launched(case, ARM, base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"], parameters["cluster"]


@pytest.mark.parametrize(
    ("m", "n", "k", "form"),
    [
        *((*shape, form) for shape in ((17, 8, 128), (33, 96, 256), (64, 5, 128)) for form in BOTH),
        *((*shape, "nvfp4") for shape in ((129, 264, 128), (17, 136, 1408), (65, 77, 512))),
        *(pytest.param(*s, "nvfp4_ct", marks=FULL) for s in ((129, 264, 128), (17, 136, 1408), (65, 77, 512))),
        *(pytest.param(100, 136, 384, form, marks=FULL) for form in BOTH),
    ],
)
def test_awkward_shapes(m: int, n: int, k: int, form: str, device) -> None:
    result = run_case(case_of(m, n, k, form), ARM, device, base_context(device.target))
    assert result.ok, result.sentence


FEW, MORE = ARM.tiles()
TILES = [
    *(pytest.param(t.bm - 1, t, 640, marks=() if t.bn == 64 else FULL) for t in FEW if t.split == 1),
    *(pytest.param(131, t, 384, marks=FULL) for t in MORE),
]


@pytest.mark.parametrize(("m", "t", "k"), TILES, ids=str)
def test_every_tile_with_ragged_edges_on_a_card_of_one_cluster(m: int, t: Tile, k: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    target = replace(HOPPER, sms=t.cluster)
    monkeypatch.setattr(ARM, "tile", lambda c: t)
    case = case_of(m, t.bn * t.at_once(t.cluster) + 8, k)
    assert tile_of(case, base_context(target)) == (t.bm, t.bn, t.cluster)
    with open_device("interpreter", target) as device:
        result = run_case(case, ARM, device, base_context(target))
    assert result.ok, result.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("m", [29, 61, 333, 1100])
def test_every_tile_on_a_card(m: int, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    few, more = ARM.tiles()
    base, outputs = base_context(device.target), []
    whole = [t for t in few if t.split == 1]
    for t in whole if m <= 64 else [t for t in more if m <= 512 or t.bn < 192]:
        if m > t.bm and m <= 64:
            continue
        monkeypatch.setattr(ARM, "tile", lambda c, t=t: t)
        case = case_of(m, 5000, 2176)
        result = run_case(case, ARM, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, ARM, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order() -> None:
    outputs = []
    for target, form, options, seed in (
        (HOPPER, 64, Options(), 0),
        (HOPPER, 192, Options(order="random", late_async="random"), 1),
        (replace(HOPPER, sms=3), 192, Options(order="random", resident=3), 2),
        (replace(HOPPER, sms=2), 128, Options(order="random", late_async="random"), 3),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        for m, columns in ((33, form), (129, 0), (33, form), (20, form)):
            made = run(case_of(m, 136, 384, "nvfp4", columns), ARM, device, base_context(target)).out
            outputs.append(made[:20])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


@pytest.mark.parametrize(("m", "rows"), [(20, 32), (33, 64)])
def test_k_of_few_tiles_is_split(m: int, rows: int, device) -> None:
    base = base_context(device.target)
    settings = [dict(s) for s in ARM.settings(400, 256, device.target)]
    assert {(s["columns"], s["split"]) for s in settings if len(s) > 1} == set(ARM.splits)
    assert dict(ARM.settings(6144, 5120, HOPPER)[0]).get("split") == 2
    assert "split" not in dict(ARM.settings(17408, 5120, HOPPER)[0])
    case = replace(case_of(m, 400, 256), setting=(("columns", 128), ("split", 2)))
    assert dict(launched(case, ARM, base)[-1].spec.parameters)["split"] == 2
    assert tile_of(replace(case, setting=(("columns", 128),)), base) == (rows, 128, 1)
    result = run_case(case, ARM, device, base)
    assert result.ok, result.sentence


def test_it_reads_the_copy_that_decode_reads() -> None:
    """Copies of one identity are one buffer, built once and charged once."""
    base = base_context(HOPPER)
    (p,) = site_of(case_of(17, 40, 256)).projections
    (mine,), (decodes,) = (ARMS[name].finalize(p, base) for name in (ARM.name, "nvfp4_mma_repacked"))
    assert (mine.key, mine.identity) == (decodes.key, decodes.identity)


@pytest.mark.parametrize("lanes", [in_order, in_lanes_order], ids=["in order", "in lanes' order"])
def test_fragments_are_the_weights_exactly(lanes: Lanes) -> None:
    """All codes under all block scales, zero and subnormal ones too; against x in the same order."""
    rng = np.random.default_rng(7)
    for first in range(0, 127, 16):
        scale = ((first + np.arange(128)) % 127).astype(np.uint8).reshape(16, 8)
        stored = {
            "weight": rng.integers(0, 256, (16, 64), dtype=np.uint8),
            "scale": scale.view(ml_dtypes.float8_e4m3fn),
            "global_scale": np.float32([1]),
        }
        unit = pack(stored)["weight"]
        out = simt.Buffer("out", 8 * 32 * 16)
        buffers = (simt.Buffer("unit", unit.nbytes, data=unit), out)
        simt.run(fragments(lanes), grid=1, block=32, shared_bytes=1152, args=buffers)
        found = out.array(np.uint16, (8, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
        values = (found.astype(np.uint32) << 16).view(np.float32).transpose(4, 1, 0, 3, 2, 5).reshape(16, 128) * 256
        expected = get("nvfp4").dequantize(stored)
        assert np.array_equal(values, expected if lanes is in_order else reordered(expected))


def reordered(x: np.ndarray) -> np.ndarray:
    """Each 64 of a row in the lanes' order: product j, half h, lane t, element of a pair; from t, j, h and element."""
    return x.reshape(len(x), -1, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = RepackedTile(32, 64)
    faulty = kernels.wgmma_nvfp4(32, 64, tile.stages, 3, ordered=True, raster=7)
    lower = ARM.lower
    monkeypatch.setattr(ARM, "tile", lambda c: tile)
    monkeypatch.setattr(ARM, "kernels", (ARM.order, faulty))
    monkeypatch.setattr(ARM, "lower", lambda c: [*lower(c)[:-1], replace(lower(c)[-1], kernel=faulty)])
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(17, 64, 1408), ARM, device, base_context(HOPPER))


def test_a_map_of_too_few_units_is_reported(monkeypatch) -> None:
    lower = ARM.lower

    def spoiled(launch: Launch) -> Launch:
        x, w, *rest = launch.args
        return replace(launch, args=(x, replace(w, box=(2, *w.box[1:])), *rest))

    monkeypatch.setattr(ARM, "lower", lambda c: [*lower(c)[:-1], spoiled(lower(c)[-1])])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Deadlock, match=r"wgmma_ring\.py"):
        run(case_of(17, 64, 128), ARM, device, base_context(HOPPER))


def test_shapes_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match="found 24 rows of x, expected a multiple of 16"):
        transposed_storer(24, 0)
    with pytest.raises(ValueError, match="found memory from byte 8, expected a multiple of 16"):
        transposed_storer(32, 8)


def test_weights_that_are_not_whole_units_are_refused() -> None:
    base = base_context(HOPPER)
    assert "K must be a multiple of 128" in str(verdict_of(case_of(17, 8, 192), ARM, base))
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(17, 8, 128), ARM, elsewhere)


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    assert tile_of(case_of(64, 17408, 5120), base) == (64, 64, 1)
    assert tile_of(case_of(128, 17408, 5120), base) == (128, 128, 1)
    assert tile_of(case_of(512, 17408, 5120), base) == (256, 128, 2)
    assert tile_of(case_of(4096, 17408, 5120), base) == (256, 128, 2)
    assert [RepackedTile(bm, bn).at_once(132) for bm, bn in ((32, 64), (64, 64), (256, 128))] == [396, 264, 132]
