"""MMQ of NVFP4 blocks on warpgroups: fragments, activations in the blocks' order, tiles, cuts, sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms, copies
from atlas_lab.arms.mma.base import JOINED
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.block_nvfp4 import BlocksTile
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Program
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.projection import Projection, Site
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.case import Case, base_context, entry_of, site_of, verdict_of
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run_case
from atlas_lab.formats import block_nvfp4, get, nvfp4_groups
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm import wgmma_block_nvfp4 as kernels
from atlas_lab.kernels.gemm import wgmma_ring
from atlas_lab.kernels.gemm.wgmma_block_nvfp4 import BLOCK_BYTES, PITCH, pick_of, weights
from atlas_lab.kernels.quantize.nvfp4_blocks import THREADS, blocks_grid, quantize_nvfp4_blocks
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
MADE, STORED, TOGETHER = ARMS["nvfp4_mmq"], ARMS["block_nvfp4_mmq"], ARMS["nvfp4_mmq_joined"]
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FFN, QKV, GDN = (tuple(group.split("+")) for group in JOINED)
WAYS = pytest.mark.parametrize(
    ("arm", "form"),
    [(MADE, "nvfp4"), (MADE, "nvfp4_ct"), (STORED, "block_nvfp4")],
    ids=["copy", "reciprocal", "stored"],
)


def in_blocks_order(x: np.ndarray) -> np.ndarray:
    """Each 64 of a row as the lanes own them."""
    parts = x.reshape(len(x), -1, 2, 2, 2, 2, 2, 2)  # half, group, high, word, second of a pair, odd
    return parts.transpose(0, 1, 2, 4, 7, 3, 5, 6).reshape(x.shape)


@L.kernel(launch_bounds=(128, 1))
def fragments(tile: L.In[L.u8], out: L.Out[L.u32], odd: L.i32):
    """The eight A fragments of 16 rows of a stage, `[8, 32, 4]`."""
    tiles = L.dynamic_shared(L.u8, 0)
    lane = L.lane_id()
    for i in range(lane, 80, 32):
        L.sts_v4_b32(tiles, 16 * i, L.ldg_v4_b32(tile, 16 * i))
    L.cuda.syncwarp()
    pick = pick_of(lane)
    for half in L.unroll(2):
        made = weights(tiles, (lane >> 2) * PITCH + 8 * odd + half * BLOCK_BYTES, pick)
        for j in L.unroll(4):
            L.stg_v4_b32(out, 128 * (4 * half + j) + 4 * lane, made[j])


@pytest.mark.parametrize("odd", [0, 1])
def test_fragments_are_the_weights_exactly(odd: int) -> None:
    """All codes under all block scales, zero and subnormal ones too; against x in the same order."""
    rng = np.random.default_rng(7)
    for first in range(0, 127, 16):
        scale = ((first + np.arange(256)) % 127).astype(np.uint8).reshape(16, 16)
        codes = rng.integers(0, 256, (16, 128), dtype=np.uint8)
        blocks = block_nvfp4.from_nvfp4(codes, scale.view(ml_dtypes.float8_e4m3fn))
        tile = np.ascontiguousarray(blocks[:, 64 * odd : 64 * odd + PITCH])
        out = simt.Buffer("out", 8 * 32 * 16)
        buffers = (simt.Buffer("tile", tile.nbytes, data=tile), out)
        simt.run(fragments, grid=1, block=32, shared_bytes=16 * PITCH, args=(*buffers, odd))
        found = out.array(np.uint16, (8, 8, 4, 2, 2, 2))  # product, g, t, K half, row half, element
        values = (found.astype(np.uint32) << 16).view(np.float32).transpose(4, 1, 0, 3, 2, 5).reshape(16, 128) * 256
        expected = get("block_nvfp4").dequantize({"blocks": blocks})[:, 128 * odd : 128 * odd + 128]
        assert np.array_equal(values, in_blocks_order(expected))


@pytest.mark.parametrize(("m", "k"), [(1, 64), (3, 256), (5, 1088)])
def test_activations_are_those_of_the_host_in_the_blocks_order(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)) * 2.0 ** np.repeat(rng.integers(-16, 14, (m, k // 16)), 16, axis=1)
    x[:, :16], x[0, 16:32] = 0, np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)  # zeros and ties
    x = x.astype(ml_dtypes.bfloat16)
    words = 700
    out, flags = simt.Buffer("out", x.nbytes), simt.Buffer("flags", 4 * words)
    args = (simt.Buffer("x", x.nbytes, data=x), out, flags, k, words)
    simt.run(quantize_nvfp4_blocks, grid=blocks_grid(m, k), block=THREADS, args=args)
    assert not flags.array(np.uint32, (words,)).any()
    expected = nvfp4_groups.dequantize(*nvfp4_groups.quantize(x.astype(np.float32)))
    assert np.array_equal(out.array(ml_dtypes.bfloat16, (m, k)).astype(np.float64), in_blocks_order(expected))


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k"), [(2, 8, 256), (17, 5, 512), (33, 136, 256), (129, 77, 256)])
@WAYS
def test_awkward_shapes(arm: Arm, form: str, m: int, n: int, k: int, device) -> None:
    result = run_case(Case(arm.name, ("ffn.up",), m, n, k, form), arm, device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.full
@pytest.mark.parametrize("m", [11, 31, 61, 131])
def test_every_tile_with_ragged_edges_on_a_card_of_one_block(m: int, monkeypatch) -> None:
    """A block takes several tiles, its ring goes around."""
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    target = replace(HOPPER, sms=1)
    k = 1280 if m <= 64 else 768  # more than is in flight
    base, case = base_context(target), Case(STORED.name, ("ffn.up",), m, 136, k, "block_nvfp4")
    with open_device("interpreter", target) as device:
        result = run_case(case, STORED, device, base)
    assert result.ok, result.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 29, 61, 333, 1100])
@WAYS
def test_every_tile_on_a_card(arm: Arm, form: str, m: int, device) -> None:
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    result = run_case(Case(arm.name, ("ffn.up",), m, 5000, 2304, form), arm, device, base_context(device.target))
    assert result.ok, result.sentence


def test_the_smallest_tile_that_covers_the_rows() -> None:
    base = base_context(HOPPER)
    cases = {m: Case(MADE.name, ("ffn.up",), m, 17408, 5120, "nvfp4") for m in (2, 16, 17, 32, 33, 64, 65, 128, 4096)}
    found = {m: dict(launched(c, MADE, base)[-1].spec.parameters)["bm"] for m, c in cases.items()}
    assert found == {2: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128, 128: 128, 4096: 128}


class Made(NamedTuple):
    program: Program
    out: np.ndarray
    compared: oracle.Comparison


def site_with(roles: Sequence[str], ns: Sequence[int], k: int, form: str) -> Site:
    one = [site_of(Case("", (role,), 1, n, k, form)).projections[0] for role, n in zip(roles, ns, strict=True)]
    return Site(tuple(one))


def ran(arm: Arm, site: Site, m: int, device: Device) -> Made:
    """An arm on the projections of a site, whose values depend on their roles alone."""
    arrays: dict[str, np.ndarray] = {}
    for p in site.projections:
        times = {role: 3.0**i for group in (FFN, QKV, GDN) for i, role in enumerate(group)}[p.role]
        w = np.random.default_rng([p.n, p.k]).standard_normal((p.n, p.k)).astype(np.float32) * np.float32(times)
        made = get(p.weight.format).quantize(w)
        arrays |= {t.name: np.asarray(made[f]).reshape(t.shape) for f, t in p.weight.fields}
    pins = Preferences(tuple(Pin(role, arm.name) for role in site.roles))
    ctx = replace(base_context(device.target), rows=(Rows(m, m),), preferences=pins)
    route = resolve(site, ctx, [entry_of(arm)])
    (a,) = route.assignments
    call = projection_call(site.projections, a, m, ctx)
    program = program_of(arm, call)
    x = np.random.default_rng(site.k).standard_normal((m, site.k)).astype(ml_dtypes.bfloat16)
    host = oracle.declared(a.declarations, lambda t: arrays[t.name])
    with load.execute(load_plan([route]), lambda t: arrays[t.name], lambda w, label: None, device) as loaded:
        out = trial.run_program(program, call, loaded, device, {call.x.data.name: x}, host)
    ref = oracle.reference(arm, call, a.declarations, host, x.astype(np.float64))[0]
    return Made(program, out, oracle.compare(out, ref, arm.tolerance, call.k))


@pytest.mark.full
@pytest.mark.parametrize(
    ("roles", "ns", "m", "form"),
    [
        (FFN, (136, 136), 33, "nvfp4"),
        (QKV, (130, 5, 9), 20, "nvfp4_ct"),
        (QKV, (136, 8, 24), 66, "nvfp4"),
        (GDN, (7, 140), 9, "nvfp4_ct"),
    ],
)
def test_projections_of_a_site_have_the_bits_of_each_alone(roles, ns, m: int, form: str, device) -> None:
    """x is quantized once for all of them; each has its own tensor scale."""
    site = site_with(roles, ns, 256, form)
    together = ran(TOGETHER, site, m, device)
    assert together.compared.ok, str(together.compared)
    assert [x.quantizes for x in together.program.launches] == [True, *[False] * len(roles)]
    alone = [ran(MADE, Site((p,)), m, device).out for p in site.projections]
    assert oracle.same_bits(together.out, np.concatenate(alone, axis=1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("roles", "ns", "k", "blocks"),
    [
        (FFN, (136, 136), 1536, 3),  # the middle share lies on both tiles of a projection
        (QKV, (128, 8, 130), 1280, 4),
        (GDN, (300, 24), 1024, 2),  # whole tiles after the shares
    ],
)
def test_tiles_that_are_cut(roles, ns, k: int, blocks: int, monkeypatch) -> None:
    """Each product has flags of its own, all of which are cleared before the first."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    options = Options(order="random", late_async="random")
    device = InterpreterDevice(replace(HOPPER, sms=blocks), seed=k, options=options)
    found = ran(TOGETHER, site_with(roles, ns, k, "nvfp4"), 9, device)
    assert found.compared.ok, str(found.compared)
    quantized, *products = found.program.launches
    assert quantized.args[-1] == sum(x.args[5].elements for x in products)
    assert len({x.args[5].offset for x in products}) == len(products)


def test_flags_that_a_product_before_has_set_are_reported(monkeypatch) -> None:
    """Products that share their flags take sums of another projection for theirs."""
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    lower = TOGETHER.lower

    def spoiled(c) -> list:
        first, one, two = lower(c)
        return [first, one, replace(two, args=(*two.args[:5], one.args[5], *two.args[6:]))]

    monkeypatch.setattr(TOGETHER, "lower", spoiled)
    device = InterpreterDevice(replace(HOPPER, sms=3), seed=0, options=Options(order="random"))
    with pytest.raises(simt.Race, match="parts"):
        ran(TOGETHER, site_with(FFN, (136, 136), 768, "nvfp4"), 9, device)


@pytest.mark.parametrize("with_scale", [True, False])
def test_blocks_are_read_in_place_with_and_without_a_tensor_scale(with_scale: bool, device) -> None:
    (p,) = site_with(("ffn.up",), (40,), 256, "block_nvfp4").projections
    fields = tuple((f, t) for f, t in p.weight.fields if with_scale or f != "global_scale")
    site = Site((Projection(0, p.role, p.n, p.k, replace(p.weight, fields=fields)),))
    assert [type(d) for d in STORED.finalize(site.projections[0], base_context(HOPPER))] == [Bind]
    found = ran(STORED, site, 17, device)
    assert found.compared.ok, str(found.compared)
    assert len(found.program.persistent) == 1 + with_scale


def test_stored_blocks_and_shuffled_ones_give_the_same_bits(device) -> None:
    outs = [
        ran(arm, site_with(("ffn.up",), (40,), 512, form), 20, device).out
        for arm, form in ((MADE, "nvfp4"), (STORED, "block_nvfp4"))
    ]
    assert oracle.same_bits(*outs)


def test_the_copy_is_that_of_the_format_s_own_shuffle() -> None:
    (p,) = site_with(("ffn.up",), (40,), 256, "nvfp4").projections
    (mine,) = MADE.finalize(p, base_context(HOPPER))
    assert mine.identity == copies.block_nvfp4(p).identity


def test_a_map_whose_rows_are_too_short_is_reported(monkeypatch) -> None:
    lower = MADE.lower

    def spoiled(c) -> list:
        first, last = lower(c)
        x, w, *rest = last.args
        return [first, replace(last, args=(x, replace(w, box=(w.box[0], 64)), *rest))]

    monkeypatch.setattr(MADE, "lower", spoiled)
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.Deadlock, match=r"wgmma_ring\.py"):
        ran(MADE, site_with(("ffn.up",), (40,), 256, "nvfp4"), 17, device)


def test_a_stage_that_one_warp_releases_for_all_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(wgmma_ring, "warps_of", lambda bm: 1)
    monkeypatch.setattr(kernels, "ring", wgmma_ring.ring.__wrapped__)
    tile = BlocksTile(32, 64)
    faulty = kernels.wgmma_block_nvfp4(32, 64, 3, raster=7)
    lower = MADE.lower
    monkeypatch.setattr(MADE, "tile", lambda c: tile)
    monkeypatch.setattr(MADE, "kernels", (quantize_nvfp4_blocks, faulty))
    monkeypatch.setattr(MADE, "lower", lambda c: [lower(c)[0], replace(lower(c)[1], kernel=faulty)])
    device = InterpreterDevice(HOPPER, options=Options(late_async=True))
    with pytest.raises(simt.SimtError, match="wgmma_"):
        ran(MADE, site_with(("ffn.up",), (64,), 1536, "nvfp4"), 17, device)


def test_what_the_copy_engine_cannot_read_is_refused() -> None:
    base = base_context(HOPPER)
    for arm, form in ((MADE, "nvfp4"), (STORED, "block_nvfp4")):
        assert "K must be a multiple of 256" in str(
            verdict_of(Case(arm.name, ("ffn.up",), 17, 8, 320, form), arm, base)
        )
        elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
        assert "needs" in str(verdict_of(Case(arm.name, ("ffn.up",), 17, 8, 256, form), arm, elsewhere))
    assert MADE.accuracy is not None
