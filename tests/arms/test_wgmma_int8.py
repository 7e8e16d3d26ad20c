"""The GEMMs on warpgroups over int8 under a scale for 32: awkward shapes, every tile, bits that no tile and no order
changes, how sums are made float32, faulty launches."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.int8 import Int8Tile
from atlas_lab.arms.wgmma.tiles import NARROW, Tile
from atlas_lab.core.launch import Launch
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.formats import int8_groups
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_int8 as kernels
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_int8_scale import COUNT, HELD, OWN, scaled_sums
from atlas_lab.kernels.lang.compile import compiler_missing, sass
from atlas_lab.kernels.quantize.int8 import ROWS, quantize_int8_groups
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMS = {"int8_wgmma": "bf16", "int8_wgmma_sub": "nvfp4"}
BOTH = pytest.mark.parametrize("name", FORMS)


def case_of(name: str, m: int, n: int, k: int, columns: int = 0) -> Case:
    setting = (("columns", columns),) if columns else ()
    return Case(name, ("ffn.up",), m, n, k, FORMS[name], setting=setting)


def tile_of(case: Case, base) -> tuple[int, int]:
    """Rows and columns of the tile that a case's product is made of."""
    parameters = dict(launched(case, ARMS[case.arm], base)[-1].spec.parameters)
    return parameters["bm"], parameters["bn"]


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k"), [(17, 8, 128), (33, 136, 256), (131, 136, 256), (64, 5, 128), (70, 77, 1152)])
@BOTH
def test_awkward_shapes(name: str, m: int, n: int, k: int, device) -> None:
    result = run_case(case_of(name, m, n, k), ARMS[name], device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.full
@pytest.mark.parametrize("m", [NARROW, 131])
def test_every_tile_with_ragged_edges_on_a_card_of_two_blocks(m: int, monkeypatch) -> None:
    """Whatever the model would choose: each block takes several tiles, its ring goes around."""
    arm, target = ARMS["int8_wgmma"], replace(HOPPER, sms=2)
    for t in arm.tiles()[m > NARROW]:
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        case = case_of(arm.name, m, 2 * t.bn + 8, 640 if m <= NARROW else 256)
        assert tile_of(case, base_context(target)) == (t.bm, t.bn)
        with open_device("interpreter", target) as device:
            result = run_case(case, arm, device, base_context(target))
        assert result.ok, f"{t}: {result.sentence}"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [61, 333, 1100])
@BOTH
def test_every_tile_on_a_card(name: str, m: int, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    arm, base, outputs = ARMS[name], base_context(device.target), []
    for t in arm.tiles()[m > NARROW]:
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        case = case_of(name, m, 5000, 2176)
        result = run_case(case, arm, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, arm, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order(monkeypatch) -> None:
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    arm, outputs = ARMS["int8_wgmma"], []
    for m, t, sms, options in (
        (33, Int8Tile(64, 64), 132, Options()),
        (129, Int8Tile(128, 128), 1, Options(order="random", late_async="random")),
        (33, Int8Tile(64, 128), 132, Options(order="random")),
    ):
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        device = InterpreterDevice(replace(HOPPER, sms=sms), seed=m, options=options)
        outputs.append(run(case_of(arm.name, m, 136, 256), arm, device, base_context(device.target)).out[:33])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


def test_the_two_orders_differ() -> None:
    """Both are within their tolerance of one reference; their bits are not the same everywhere."""
    base = base_context(HOPPER)
    with open_device("interpreter", HOPPER) as device:
        case = replace(case_of("int8_wgmma", 64, 128, 1024, 64), format="nvfp4")
        one = run(case, ARMS["int8_wgmma"], device, base).out
        other = run(replace(case, arm="int8_wgmma_sub"), ARMS["int8_wgmma_sub"], device, base).out
    assert not oracle.same_bits(one, other)
    assert ARMS["int8_wgmma"].reduction_class.id != ARMS["int8_wgmma_sub"].reduction_class.id


@pytest.mark.parametrize(("m", "k"), [(1, 32), (17, 224), (35, 1024)])
def test_activations_are_quantized_as_on_the_host(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-40, 40, (m, 1))).astype(ml_dtypes.bfloat16)
    x[0, :32] = 0
    groups, pitch = k // 32, m + 3
    codes, scales = int8_groups.quantize(x.astype(np.float32))
    buffers = [
        simt.Buffer("x", x.nbytes, data=x),
        simt.Buffer("codes", m * k),
        simt.Buffer("scales", 4 * groups * pitch),
        simt.Buffer("flags", 4 * 700),
    ]
    args = (*buffers, m, k, pitch, 700)
    simt.run(quantize_int8_groups, grid=(-(-m // ROWS), -(-k // 128)), block=256, args=args)
    assert not buffers[3].array(np.uint32, (700,)).any()
    assert oracle.same_bits(buffers[1].array(np.int8, (m, k)), codes)
    assert oracle.same_bits(buffers[2].array(np.float32, (groups, pitch))[:, :m], scales.T)
    error = np.abs(int8_groups.dequantize(codes, scales) - x.astype(np.float64)).reshape(m, groups, 32).max(axis=2)
    assert (error <= scales * 0.501).all()


def test_sums_are_scaled_and_added_as_one_by_one() -> None:
    """Of every size that 32 products have, rounded once, in both ways to make them float32."""
    rng = np.random.default_rng(0)
    add, put = scaled_sums(2), scaled_sums(2, True)
    for _ in range(20):
        acc = [np.float32(v) for v in rng.standard_normal(2 * COUNT) * 10.0 ** rng.integers(-8, 9)]
        sums = [int(v) for v in rng.integers(-516128, 516129, COUNT)]
        rows, columns = ([np.float32(v) for v in rng.standard_normal(c)] for c in (2, HELD * OWN))
        added, fresh = add(acc, sums, rows, columns, 1, 1), put(acc, sums, rows, columns, 1, 0)
        assert list(added[:COUNT]) == acc[:COUNT] == list(fresh[:COUNT])
        for i, s in enumerate(sums):
            half, column = (i >> 1) & 1, 2 * (i >> 2) + (i & 1)
            factor = L.mul_rn(rows[half], columns[OWN + column])
            assert added[COUNT + i] == L.fma_rn(np.float32(s), factor, acc[COUNT + i])
            assert fresh[COUNT + i] == L.mul_rn(np.float32(s), L.mul_rn(rows[half], columns[column]))


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("name", FORMS)
def test_every_sum_of_every_product_is_made_float_and_added(name: str) -> None:
    """In machine code: the assembler was seen to drop a product whose sums were added too late. No product waits
    for a uniform register."""
    for kernel in ARMS[name].kernels[1:]:
        bm = dict(kernel.spec.parameters)["bm"]
        lines = sass(kernel, "sm_90a").splitlines()
        products = [i for i, line in enumerate(lines) if "IGMMA" in line]
        sums = 32 * bm // 16
        counted = {op: sum(op in line for line in lines) for op in ("I2FP.F32.S32", " FFMA ")}
        assert len(products) == bm // 16
        assert not any("HGMMA" in line for line in lines)
        assert not any("R2UR" in line for line in lines[products[0] : products[-1]])
        assert counted["I2FP.F32.S32"] == sums
        assert counted[" FFMA "] == (sums if name == "int8_wgmma" else sums * 3 // 4)


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = Int8Tile(64, 64)
    faulty = kernels.wgmma_int8(64, 64, 3, raster=7)
    arm = ARMS["int8_wgmma"]
    lower = arm.lower
    monkeypatch.setattr(arm, "tile", lambda c: tile)
    monkeypatch.setattr(arm, "kernels", (quantize_int8_groups, faulty))
    monkeypatch.setattr(arm, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=faulty)])
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of(arm.name, 17, 64, 1408), arm, device, base_context(HOPPER))


def test_a_map_of_too_few_scales_is_reported(monkeypatch) -> None:
    arm = ARMS["int8_wgmma"]
    lower = arm.lower

    def spoiled(launch: Launch) -> Launch:
        x, w, of_x, of_w, *rest = launch.args
        return replace(launch, args=(x, w, of_x, replace(of_w, box=(32, 4)), *rest))

    monkeypatch.setattr(arm, "lower", lambda c: [lower(c)[0], spoiled(lower(c)[1])])
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Deadlock, match=r"wgmma_ring\.py"):
        run(case_of(arm.name, 17, 64, 128), arm, device, base_context(HOPPER))


def test_shapes_that_it_does_not_serve_are_refused() -> None:
    arm = ARMS["int8_wgmma"]
    assert "K must be a multiple of 128" in str(verdict_of(case_of(arm.name, 17, 8, 160), arm, base_context(HOPPER)))
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(arm.name, 17, 8, 128), arm, elsewhere)
    with pytest.raises(ValueError, match="found 128 rows of x with sums of their own for a stage, expected 64"):
        kernels.wgmma_int8(128, 128, 4, sub=True)


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    expected = {
        (64, 17408): (64, 128),
        (64, 1024): (64, 64),
        (128, 17408): (128, 128),
        (512, 1024): (64, 128),
        (4096, 17408): (128, 128),
        (4096, 17411): (128, 128),
    }
    for (m, n), tile in expected.items():
        assert tile_of(case_of("int8_wgmma", m, n, 5120), base) == tile
