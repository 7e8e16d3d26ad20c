"""The GEMMs on warpgroups over int8 under a scale for 32: awkward shapes, every tile, bits that no tile and no order
changes, how sums are scaled, faulty launches and kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from impatient import impatient

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.int8_tiles import FloatsTile, Int8Tile
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
from atlas_lab.kernels.gemm import wgmma_int8_f16, wgmma_ring
from atlas_lab.kernels.gemm.wgmma_int8_scale import COUNT, HELD, OWN, add_scaled, scaled_sums
from atlas_lab.kernels.lang.compile import compile_kernel, compiler_missing, sass
from atlas_lab.kernels.quantize.int8 import ROWS, quantize_int8_groups
from atlas_lab.kernels.quantize.int8_lanes import quantize_int8_lanes
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
    return parameters.get("bm", NARROW), parameters["bn"]


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
        (81, FloatsTile(64, 256, each=2), 1, Options(order="random", late_async="random")),
        (33, FloatsTile(64, 128), 132, Options(order="random")),
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
    """Of every size that 32 products have, rounded once."""
    rng = np.random.default_rng(0)
    add, put, add_floats = scaled_sums(), scaled_sums(True), add_scaled(2 * COUNT, 2)
    for _ in range(20):
        acc = [np.float32(v) for v in rng.standard_normal(2 * COUNT) * 10.0 ** rng.integers(-8, 9)]
        sums = [int(v) for v in rng.integers(-516128, 516129, COUNT)]
        rows, columns = ([np.float32(v) for v in rng.standard_normal(c)] for c in (2, HELD * OWN))
        added, fresh = add(acc[COUNT:], sums, rows, columns, 1), put(acc[COUNT:], sums, rows, columns, 0)
        floats = add_floats(acc, [np.float32(v) for v in sums], columns[:OWN], rows, 1)
        assert list(floats[:COUNT]) == acc[:COUNT]
        for i, s in enumerate(sums):
            half, column = (i >> 1) & 1, 2 * (i >> 2) + (i & 1)
            factor = L.mul_rn(rows[half], columns[OWN + column])
            assert added[i] == L.fma_rn(np.float32(s), factor, acc[COUNT + i])
            assert fresh[i] == L.mul_rn(np.float32(s), L.mul_rn(rows[half], columns[column]))
            own = L.mul_rn(rows[half], columns[column])  # as many columns of x, four of each 16 rows
            assert floats[COUNT + i] == L.fma_rn(np.float32(s), own, acc[COUNT + i])


@L.kernel(launch_bounds=(32, 1))
def fragments(w: L.In[L.u8], out: L.Out[L.u32]):
    """The eight A fragments of 16 rows of 128 bytes, as TMA swizzles them: `[8, 32, 4]`."""
    tile = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 128, 32):
        L.sts_v4_b32(tile, 16 * (i ^ (i >> 3 & 7)), L.ldg_v4_b32(w, 16 * i))
    L.cuda.syncwarp()
    for g in L.unroll(kernels.GROUPS):
        held = wgmma_int8_f16.words(tile, wgmma_int8_f16.first_byte(lane), g)
        made = wgmma_int8_f16.weights(held, wgmma_int8_f16.ABOVE)
        for j in L.unroll(2):
            L.stg_v4_b32(out, 128 * (2 * g + j) + 4 * lane, made[j])


def test_fragments_are_codes_exactly_in_the_order_of_x() -> None:
    """Every byte; rows g and g + 8 of a product are neighbours."""
    codes = np.random.default_rng(5).permutation(np.arange(2048) % 256).astype(np.uint8).reshape(16, 128)
    given, out = simt.Buffer("w", codes.nbytes, data=codes), simt.Buffer("out", 8 * 32 * 16)
    simt.run(fragments, grid=1, block=32, shared_bytes=2048, args=(given, out))
    found = out.array(np.float16, (8, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
    expected = reordered(codes.view(np.int8).astype(np.float16))
    assert np.array_equal(found.transpose(1, 4, 0, 3, 2, 5).reshape(16, 128), expected)


def reordered(x: np.ndarray) -> np.ndarray:
    """Each 32 of a row in the lanes' order: product j, half h, lane t, element of a pair; from t, j, h, element."""
    return x.reshape(len(x), -1, 4, 2, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


@pytest.mark.parametrize(("m", "k"), [(1, 32), (19, 352)])
def test_activations_are_quantized_alike_in_the_lanes_order(m: int, k: int) -> None:
    """Rows past the last have scales of 0."""
    rng = np.random.default_rng(m)
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-135, 40, (m, 1))).astype(ml_dtypes.bfloat16)
    x[0, :8] = 0
    codes, expected = int8_groups.quantize(x.astype(np.float32))
    groups, pitch = k // 32, -(-m // ROWS) * ROWS
    buffers = [
        simt.Buffer("x", x.nbytes, data=x),
        simt.Buffer("codes", 2 * m * k),
        simt.Buffer("scales", 4 * groups * pitch),
        simt.Buffer("flags", 4 * 700),
    ]
    args = (*buffers, m, k, pitch, 700)
    simt.run(quantize_int8_lanes, grid=(-(-m // ROWS), -(-k // 128)), block=256, args=args)
    assert np.array_equal(buffers[1].array(np.float16, (m, k)).astype(np.int8), reordered(codes))
    scales = buffers[2].array(np.float32, (groups, pitch // 16, 4, 2, 2)).transpose(0, 1, 3, 2, 4).reshape(-1, pitch)
    assert oracle.same_bits(scales[:, :m], expected.T)
    assert not scales[:, m:].any()
    assert not buffers[3].array(np.uint32, (700,)).any()


def products(kernel) -> tuple[list[str], list[int]]:
    """Lines of machine code, and which of them are products."""
    lines = sass(kernel, "sm_90a").splitlines()
    return lines, [i for i, line in enumerate(lines) if "GMMA" in line]


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("name", FORMS)
def test_every_sum_of_every_product_is_made_float_and_added(name: str) -> None:
    """In machine code: the assembler was seen to drop a product whose sums were added too late. No product waits
    for a uniform register."""
    for kernel in (k for k in ARMS[name].kernels if k.spec.family == "wgmma_int8"):
        lines, found = products(kernel)
        counted = {op: sum(op in line for line in lines) for op in ("I2FP.F32.S32", " FFMA ")}
        assert len(found) == 4
        assert all("IGMMA" in lines[i] for i in found)
        assert not any("R2UR" in line for line in lines[found[0] : found[-1]])
        assert counted["I2FP.F32.S32"] == 4 * COUNT
        assert counted[" FFMA "] == (4 * COUNT if name == "int8_wgmma" else 3 * COUNT)


@pytest.mark.skipif(compiler_missing() is not None, reason="needs the CUDA compiler")
def test_sums_of_products_in_f16_take_two_instructions() -> None:
    """No conversion, no spills, and no product that waits for another or for a uniform register."""
    for t in ARMS["int8_wgmma"].tiles()[1][:1]:
        kernel = wgmma_int8_f16.wgmma_int8_f16(t.bm, t.bn, t.stages, t.each)
        compiled = compile_kernel(kernel, "sm_90a")
        assert (compiled.spill_stores, compiled.spill_loads, compiled.warnings) == (0, 0, ())
        lines, found = products(kernel)
        sums = kernels.GROUPS * t.bm // 2 * t.each
        assert len(found) == 2 * kernels.GROUPS * t.each
        assert all("HGMMA" in lines[i] for i in found)
        body = lines[found[0] : found[-1]]
        assert not any(op in line for line in body for op in ("R2UR", "I2F"))
        # those of the last block of a group but the last of a tile's end are in the loop
        assert sum(" FFMA " in line for line in lines) == sums + t.bm // 2


def with_floats(monkeypatch, kernel, tile: FloatsTile) -> None:
    """The arm with this kernel of integers in F16 for every call."""
    arm = ARMS["int8_wgmma"]
    lower = arm.lower
    monkeypatch.setattr(arm, "tile", lambda c: tile)
    monkeypatch.setattr(arm, "kernels", (quantize_int8_lanes, kernel))
    monkeypatch.setattr(arm, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=kernel)])


def test_products_in_f16_have_the_bits_of_s8_unless_their_order_or_scales_are_wrong() -> None:
    """Each kernel has a raster of its own: those of equal parameters are made once."""
    arm, case, base = ARMS["int8_wgmma"], case_of("int8_wgmma", 17, 41, 256), base_context(HOPPER)
    with open_device("interpreter", HOPPER) as device:
        expected = run(case, arm, device, base).out
        for raster, fault in enumerate(({}, {"words": _crossed}, {"add_scaled": _of_another_row}), start=7):
            with pytest.MonkeyPatch.context() as patch:
                for name, wrong in fault.items():
                    patch.setattr(wgmma_int8_f16, name, wrong)
                tile = FloatsTile(16, 64) if fault else FloatsTile(16, 128, each=2)
                kernel = wgmma_int8_f16.wgmma_int8_f16(16, tile.bn, 2, tile.each, raster=raster)
                with_floats(patch, kernel, tile)
                assert oracle.same_bits(run(case, arm, device, base).out, expected) == (not fault)


_words = wgmma_int8_f16.words


@L.device
def _crossed(tiles, at, group):
    p, q = _words(tiles, at, group)
    return (p[1], p[0]), q


def _of_another_row(bm: int, blocks: int, loads: bool = False):
    """One block of 16 rows of x, the scales of two exchanged that are loaded."""
    right = add_scaled(bm, blocks, loads)

    @L.device
    def run(acc, sums, columns, rows, p, i, block):
        v = right(acc, sums, columns, rows, p, i, 0)
        return (*v[:8], v[9], v[8], v[10], v[11])

    return run if loads else right


@pytest.mark.full
def test_sums_that_blocks_share(monkeypatch) -> None:
    """A tile of two blocks of W cut into two shares."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    tile = FloatsTile(32, 128, each=2)
    with_floats(monkeypatch, wgmma_int8_f16.wgmma_int8_f16(tile.bm, tile.bn, tile.stages, tile.each), tile)
    target = replace(HOPPER, sms=2)
    with open_device("interpreter", target) as device:
        result = run_case(case_of("int8_wgmma", 17, 72, 2048), ARMS["int8_wgmma"], device, base_context(target))
    assert result.ok, result.sentence


def test_a_stage_of_integers_in_f16_that_is_filled_too_early_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(wgmma_int8_f16, "ring", impatient(wgmma_int8_f16.ring))
    with_floats(monkeypatch, wgmma_int8_f16.wgmma_int8_f16(16, 64, 2, raster=13), FloatsTile(16, 64))
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        run(case_of("int8_wgmma", 17, 64, 512), ARMS["int8_wgmma"], device, base_context(HOPPER))


def test_a_ring_whose_stages_are_released_too_early_is_reported(monkeypatch) -> None:
    """A stage that one of four warps releases for all is loaded while the others read it."""
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = Int8Tile(64, 64)
    faulty = kernels.wgmma_int8(64, 3, raster=7)
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


def test_tiles_are_chosen_for_what_they_must_fill() -> None:
    base = base_context(HOPPER)
    expected = {
        (64, 17408): (64, 128),
        (64, 1024): (64, 64),
        (128, 17408): (64, 256),
        (512, 1024): (64, 128),
        (4096, 17408): (64, 256),
        (4096, 17411): (64, 256),
    }
    for (m, n), tile in expected.items():
        assert tile_of(case_of("int8_wgmma", m, n, 5120), base) == tile
