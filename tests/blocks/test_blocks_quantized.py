"""Blocks whose down quantizes its input: the gated product and the quantization in one launch, with the bits of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_runs import Ran, entries_of, routes_of, weights_of

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.blocks.ffn import DOWN, GATE, UP
from atlas_lab.checkpoint import sizes, synthetic_sites
from atlas_lab.checkpoint.sizes import Sizes
from atlas_lab.core.call import Call, Operand
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.launch import Launch
from atlas_lab.core.levers import Levers
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import rows_from
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.ffn_parity import GROUP, MOST, Values, quantized_near
from atlas_lab.formats import fp8_groups, nvfp4_groups
from atlas_lab.formats.dtypes import dtype
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.activation import quantized
from atlas_lab.kernels.activation.gated import gated, kind_of
from atlas_lab.kernels.activation.product import THREADS, gated_product
from atlas_lab.kernels.quantize import nvfp4, nvfp4_blocks
from atlas_lab.runtime import load
from atlas_lab.runtime.device import open_device

ARMS = {a.name: a for a in atlas_arms()}
TARGETS = {t.name: t for t in shipped_targets()}
WIDTH = 256  # of what down reads
EMULATED = "nvfp4_w4a4_emulated"
BF16 = dtype("bf16").numpy


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    return request.param


def sizes_for(arm: str) -> Sizes:
    """The smallest that gate and up of `ran` take."""
    return sizes("tiny", hidden=256 if arm == "nvfp4_mmq" else 128, intermediate=WIDTH)


def sites_of(arm: str, scale: bool = False) -> list[Site]:
    """NVFP4, and for down what its arm starts from; with `scale` down has a tensor scale of its activations."""
    form = ARMS[arm].source or "bf16"
    (first, _), (_, down) = (synthetic_sites(sizes_for(arm), f, (0,), (GATE, UP, DOWN)) for f in ("nvfp4", form))
    if scale:
        (p,) = down.projections
        given = (("input_scale", Tensor("f32", (), "down.input_scale")),)
        down = Site((replace(p, weight=replace(p.weight, activation=given)),))
    return [first, down]


def ran(arm: str, place: str, m: int, kind: str, limit: float, on: str = "interpreter", scale: bool = False) -> Ran:
    sites = sites_of(arm, scale)
    dims = replace(sizes_for(arm).dims, activation=kind, activation_limit=limit)
    ctx = Context(TARGETS["h200"], dims, Levers(gated=place), rows=(rows_from(17 if m >= 17 else 2),))
    stored = weights_of(sites) | {"down.input_scale": np.array(0.031, np.float32)}
    first = ARMS["nvfp4_mmq_joined" if arm == "nvfp4_mmq" else "nvfp4_wgmma_joined"]
    return Ran(stored, routes_of(sites, ARMS, first, ARMS[arm], ctx), ARMS, m, ctx, on)


@pytest.mark.parametrize(
    ("arm", "m", "kind", "limit", "scale"),
    [
        ("nvfp4_mmq", 3, "silu", 0.0, False),
        pytest.param("nvfp4_mmq", 131, "gelu_tanh", 0.8, False, marks=pytest.mark.full),
        ("block_nvfp4_mmq", 18, "gelu_tanh", 0.8, False),
        (EMULATED, 17, "silu", 0.8, True),
        pytest.param(EMULATED, 17, "gelu_tanh", 0.0, False, marks=pytest.mark.full),
        pytest.param(EMULATED, 67, "silu", 0.8, True, marks=pytest.mark.full),
        ("fp8_wgmma_w8a8", 21, "gelu_tanh", 0.8, False),
        ("int8_wgmma", 17, "silu", 0.8, False),
        pytest.param("int8_wgmma_sub", 130, "silu", 0.0, False, marks=pytest.mark.full),
        pytest.param("fp8_wgmma_w8a8", 67, "silu", 0.0, False, marks=pytest.mark.full),
        pytest.param(EMULATED, 17, "silu", 0.0, True, marks=pytest.mark.full),
        pytest.param(EMULATED, 19, "gelu_tanh", 0.8, False, marks=pytest.mark.full),
    ],
)
def test_the_bits_of_two_launches(arm: str, m: int, kind: str, limit: float, scale: bool, on: str) -> None:
    two, one = (ran(arm, place, m, kind, limit, on, scale) for place in ("launch", "input"))
    assert one.said == two.said == ()
    assert one.parity.passed, one.parity.reason
    assert two.parity.passed, two.parity.reason
    assert len(one.program.launches) == len(two.program.launches) - 1
    assert [x.quantizes for x in one.program.launches][-2:] == [True, False]
    assert oracle.same_bits(one.out["y"], two.out["y"])
    assert np.abs(one.out["y"].astype(np.float64)).max() > 0.05


@pytest.mark.parametrize(
    ("kind", "limit", "scale"),
    [
        *(("silu", 0.0, False), ("gelu_tanh", 0.8, True)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("silu", 0.0, True), ("gelu_tanh", 0.8, False))),
    ],
)
def test_a_call_on_a_card_with_fp4(kind: str, limit: float, scale: bool) -> None:
    """No arm joins gate and up for as many rows there: down's call alone."""
    arm, m, k = ARMS["nvfp4_w4a4"], 19, WIDTH
    sites = sites_of(arm.name, scale)
    stored = weights_of(sites) | {"down.input_scale": np.array(0.031, np.float32)}
    read, down = (lambda t: stored[t.name]), sites[1]
    pins = Preferences((Pin(DOWN, arm.name),))
    target = next(t for t in shipped_targets() if t.arch == "sm_120a")
    ctx = Context(target, sizes_for(arm.name).dims, rows=(rows_from(17),), preferences=pins)
    route = resolve(down, ctx, entries_of(ARMS))
    (a,) = route.assignments
    plain = projection_call(down.projections, a, m, ctx)
    gu = Tensor("bf16", (m, 2 * k), plain.x.data.name)
    asked = replace(plain, x=Operand(gu), prologue=kind, prologue_limit=limit)
    one, two = program_of(arm, asked), program_of(arm, plain)
    assert [dict(p.launches[0].kernel.spec.parameters)["scaled"] for p in (one, two)] == [scale, scale]
    host = oracle.declared(a.declarations, read)
    both = (np.random.default_rng(m).standard_normal((m, 2 * k)) * 2).astype(BF16)
    h = halves_of(both, kind, limit)
    plan = load_plan([route])
    with open_device("interpreter", target) as device, load.execute(plan, read, lambda w, label: None, device) as held:
        found = trial.run_program(one, asked, held, device, {gu.name: both}, host)
        expected = trial.run_program(two, plain, held, device, {gu.name: h}, host)
    assert oracle.same_bits(found, expected)
    assert found.astype(bool).any()


def halves_of(both: np.ndarray, kind: str, limit: float) -> np.ndarray:
    """What the gated product as a launch of its own makes of g and u side by side."""
    (m, k), out = both.shape, simt.Buffer("h", both.nbytes // 2)
    gu, i = simt.Buffer("gu", both.nbytes, data=both), k // 2
    up = simt.Buffer("u", both.nbytes - k, data=np.ascontiguousarray(both.reshape(-1)[i:]))
    args = (gu, up, out, i, k, k, kind_of(kind, limit))
    simt.run(gated_product(clamp=limit > 0), grid=(m, -(-i // (8 * THREADS))), block=THREADS, args=args)
    return out.array(BF16, (m, i))


@L.device
def rounded_between(g, u, kind):
    """The activation rounded to BF16 before it meets u."""
    first = gated(g, L.f32(1), kind)
    return L.mul_rn(L.bf16_lo(L.bf16x2(first, first)), u)


@L.device
def one_more(most, tensor_scale):
    """The next larger code of a scale."""
    return nvfp4.scale_code(most, tensor_scale) + 1


@pytest.mark.parametrize("fault", [None, "rounded twice", "scale"])
def test_a_faulty_quantizer_is_noticed(fault: str | None, monkeypatch) -> None:
    arm = ARMS["block_nvfp4_mmq"]
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "gated_words", quantized.gated_words.__wrapped__)
        if fault == "rounded twice":
            patch.setattr(quantized, "gated_of", lambda clamp: rounded_between)
        elif fault:
            patch.setattr(nvfp4_blocks, "scale_code", one_more)
        made = quantized.gated_nvfp4_blocks.__wrapped__(clamp=False)
        lower = arm.lower

        def spoiled(c: Call) -> list[Launch]:
            first, *rest = lower(c)
            return [replace(first, kernel=made) if c.prologue else first, *rest]

        patch.setattr(arm, "lower", spoiled)
        patch.setattr(arm, "optional_kernels", (made,))
        found = ran(arm.name, "input", 17, "silu", 0.0).parity
    assert found.passed == (fault is None), found.reason
    assert fault is None or "outputs of y are outside the tolerance" in found.reason


def test_a_product_that_only_its_arm_knows_is_refused(monkeypatch) -> None:
    arm = ARMS["block_nvfp4_mmq"]
    r = ran(arm.name, "launch", 17, "silu", 0.0)
    monkeypatch.setattr(arm, "quantized", None)
    monkeypatch.setattr(arm, "reference", lambda call, x, weights: x)
    with pytest.raises(
        oracle.OracleError, match="arm block_nvfp4_mmq: expected a product of BF16, or of what `quantiz"
    ):
        r.judge.parity(r.program, 17, sizes_for(arm.name).dims, r.x, r.out.__getitem__)


QUANTIZERS = {
    "nvfp4": lambda x: nvfp4_groups.dequantize(*nvfp4_groups.quantize(x.astype(np.float32))),
    "fp8": lambda x: fp8_groups.dequantize(*fp8_groups.quantize(x.astype(np.float32))),
}


@pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
def test_what_is_known_within_a_rounding_covers_every_choice(quantize) -> None:
    """The largest of a group among what is unsure too: its scale moves all."""
    rng, k = np.random.default_rng(5), GROUP + 32
    h = (rng.standard_normal((6, k)) * 4).astype(BF16).astype(np.float64)
    h[:, 40] = np.float64(np.float32(8.5).astype(BF16))
    unsure = rng.random(h.shape) < 0.015
    unsure[:, 40] = True
    near = quantized_near(Values(h, np.where(unsure, np.abs(h) * 2.0**-7, 1e-38)), quantize)
    assert np.array_equal(near.values, quantize(h))
    most = np.zeros(h.shape)
    for _ in range(300):
        moved = (h * (1 + unsure * rng.choice([-1, 0, 1], h.shape) * 2.0**-7)).astype(BF16).astype(np.float64)
        most = np.maximum(most, np.abs(quantize(moved) - near.values))
    assert (most <= near.bound).all()
    assert np.mean(most == near.bound) > 0.9
    assert 0 < np.count_nonzero(near.bound) < h.size / 2
    sure = quantized_near(Values(h, np.full(h.shape, 1e-38)), quantize)
    assert not sure.bound.any()


def test_too_much_that_is_unsure_is_refused() -> None:
    h = np.ones((1, GROUP))
    off = np.where(np.arange(GROUP) <= MOST, 2.0**-7, 0)[None]
    with pytest.raises(
        oracle.OracleError, match=f"{MOST + 1} of {GROUP} of K lie between two BF16, expected {MOST} or"
    ):
        quantized_near(Values(h, off), QUANTIZERS["nvfp4"])
