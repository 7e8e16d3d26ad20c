"""LoRA adapters and a residual: of one projection and of a whole block, on arms that add them and arms that do not."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from adapters import BF16, Adapters, Finished, labels
from block_runs import entries_of, routes_of, weights_of
from lanes_arms import JOINED, LANES, PLAIN

from atlas_lab.arms import atlas_arms
from atlas_lab.blocks.ffn import DOWN, GATE, UP, ffn_program
from atlas_lab.blocks.lora import Adapter, delta
from atlas_lab.blocks.projection import projection_program
from atlas_lab.checkpoint import sizes, synthetic_sites
from atlas_lab.core.arm import Arm
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.launch import Program
from atlas_lab.core.levers import Levers
from atlas_lab.core.numbers import OUTPUTS
from atlas_lab.core.program import PlanError, projection_call
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.ffn_parity import Values, judged
from atlas_lab.experiments.numbers import activations
from atlas_lab.kernels.activation.added import added
from atlas_lab.kernels.lang.compile import check_kernel, compiler_missing
from atlas_lab.kernels.lora.low_rank import low_rank_in, low_rank_out
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.load import execute

BUILT_IN = {a.name: a for a in atlas_arms()}
H200 = next(t for t in shipped_targets() if t.name == "h200")
SIZES = sizes("tiny", hidden=128, intermediate=128)
SITES = synthetic_sites(SIZES, "nvfp4", (0,), (GATE, UP, DOWN))
ARMS = {a.name: a for a in (LANES, JOINED, PLAIN)} | BUILT_IN
FULL = pytest.mark.full
ROLES = (GATE, UP, DOWN)


def context(*, first: int = 1, **levers: object) -> Context:
    return Context(H200, SIZES.dims, Levers(**levers), rows=(rows_from(17) if first > 16 else rows(1, 16),))


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return weights_of(SITES)


def adapters_of(roles: tuple[str, ...], r: int = 5) -> Adapters:
    return Adapters((p for s in SITES for p in s.projections if p.role in roles), r)


@pytest.mark.parametrize(
    ("roles", "residual", "m", "first", "second", "gated", "said"),
    [
        (ROLES, True, 3, JOINED, LANES, "epilogue", "arm lanes_joined adds no LoRA before its activation"),
        pytest.param((DOWN,), False, 2, JOINED, LANES, "epilogue", "", marks=FULL),
        ((GATE,), True, 2, JOINED, LANES, "input", ""),
        pytest.param((UP, DOWN), False, 1, JOINED, PLAIN, "input", "the adapter of ffn.down reads it", marks=FULL),
        pytest.param((), True, 3, LANES, LANES, "launch", "", marks=FULL),
        ((UP, DOWN), True, 17, BUILT_IN["nvfp4_wgmma"], BUILT_IN["nvfp4_wgmma"], "launch", ""),
        pytest.param(*(ROLES, True, 67, BUILT_IN["nvfp4_wgmma"], BUILT_IN["nvfp4_wgmma"], "launch", ""), marks=FULL),
        pytest.param(
            *(ROLES, True, 17, BUILT_IN["nvfp4_wgmma_joined"], BUILT_IN["nvfp4_wgmma"], "launch", ""), marks=FULL
        ),
    ],
)
def test_a_block_adds_what_it_is_to(
    stored, roles: tuple[str, ...], residual: bool, m: int, first: Arm, second: Arm, gated: str, said: str
) -> None:
    """Wherever the gated product is, and whatever each arm adds itself; what is wrong would be seen."""
    ctx = context(first=m, gated=gated)
    found = tuple(routes_of(SITES, ARMS, first, second, ctx))
    ran = Finished(stored, found, ARMS, m, ctx, adapters_of(roles), residual)
    start = f"layers.0.ffn M={m}: gated={gated}"
    assert ran.said == ((f"{start}: {said}: a launch makes the gated product",) if said else ())
    assert ran.parity().passed, ran.parity().reason
    fused = "lora" in second.epilogues
    groups = first.roles == ("ffn.gate+ffn.up",)
    apart = sum(role in roles for role in (GATE, UP) if groups or "lora" not in first.epilogues)
    assert labels(ran.program).count("addends") == apart + (not fused and (residual or DOWN in roles))
    assert labels(ran.program).count("LoRA A") == labels(ran.program).count("LoRA B") == len(roles)
    assert all(x.pdl is not False for x in ran.program.launches if second is not PLAIN)

    def without(role: str, x: np.ndarray) -> Values | None:
        return None if role == wrong else ran.added(role, x)

    def twice(role: str, x: np.ndarray) -> Values | None:
        more = ran.added(role, x)
        return Values(2 * more.values, more.bound) if more and role == wrong else more

    def of_another_row(role: str, x: np.ndarray) -> Values | None:
        more = ran.added(role, x)
        return Values(np.roll(more.values, 1, axis=0), more.bound) if more and role == wrong else more

    for wrong in dict.fromkeys((*roles, *([DOWN] if residual else []))):
        for how in (without, twice, *([of_another_row] if m > 1 else [])):
            assert not ran.parity(how).passed, (wrong, how.__name__)


@pytest.mark.parametrize("first", [JOINED, LANES])
def test_nothing_is_launched_for_no_adapter(first: Arm) -> None:
    ctx = context()
    found = routes_of(SITES, ARMS, first, LANES, ctx)
    plain = ffn_program(*found, 3, ctx, ARMS)
    assert ffn_program(*found, 3, ctx, ARMS, adapters={}) == plain
    off = replace(ctx, levers=Levers(lora=False))
    assert ffn_program(*found, 3, off, ARMS, adapters=adapters_of(ROLES).of) == plain
    held = ffn_program(*found, 3, ctx, ARMS, adapters=adapters_of(ROLES).of)[0]
    assert len(held.persistent) == len(plain[0].persistent) + 6
    assert {t.name for t in plain[0].buffers} < {t.name for t in held.buffers} | {"layers.0.ffn/h"}


# Of each: what serves a projection, how many rows, N and K that no tile or vector divides where the arm takes such.
SERVED = [
    ("bf16_wgmma", 17, 77, 136, 3),
    ("bf16_mma", 3, 77, 136, 8),
    ("bf16_gemm", 18, 40, 72, 1),
    pytest.param("fp8_wgmma_w8a8", 18, 144, 144, 16, marks=FULL),
    pytest.param("q2_dequant", 17, 48, 128, 4, marks=FULL),
]


def projected(name: str, m: int, n: int, k: int, ctx: Context) -> tuple[Site, object]:
    arm = BUILT_IN[name]
    form = {"bf16": "bf16", "fp8": "fp8", "q2_0": "q2_0_g128", "nvfp4": "nvfp4"}[arm.source]
    made = sizes("tiny", hidden=k, intermediate=n)
    (site,) = synthetic_sites(made, form, (0,), (UP,))
    preferences = Preferences((Pin(UP, name, rows=rows(m, m)),))
    return site, resolve(site, replace(ctx, preferences=preferences, rows=(rows(m, m),)), entries_of(BUILT_IN))


def run_projection(
    name: str, m: int, n: int, k: int, r: int, ctx: Context, *, residual: bool = True
) -> tuple[Program, np.ndarray, Values]:
    """A projection's program, its output, and what that should be."""
    site, route = projected(name, m, n, k, ctx)
    (p,), arm, a = site.projections, BUILT_IN[name], route.at(UP, m)
    adapters, weights = Adapters((p,), r), weights_of([site])
    program = projection_program(p, a, m, ctx, arm, adapter=adapters.of[UP], residual=residual)
    call = projection_call((p,), a, m, ctx)
    x = activations((0, UP, m), k, 3)
    beside = np.random.default_rng(1).standard_normal((m, n)).astype(BF16)
    given = dict(zip((t.name for t in program.inputs), (x, beside), strict=False))
    declared = oracle.declared(a.declarations, lambda t: weights[t.name])
    with open_device("interpreter", H200) as device, ExitStack() as stack:
        loaded = execute(load_plan([route]), lambda t: weights[t.name], lambda w, label: None, device)
        buffers = {**stack.enter_context(loaded), **adapters.upload(device, stack)}
        y = trial.run_program(program, call, buffers, device, given, declared)
    product = oracle.reference(arm, call, a.declarations, declared, x.astype(np.float64))[0]
    bound = arm.tolerance.bound(product.values, product.magnitude, k)
    more = adapters.added(UP, x)
    total = product.values + (more.values if ctx.levers.lora else 0) + (beside.astype(np.float64) if residual else 0)
    wide = bound + more.bound
    return program, y, Values(total, wide + OUTPUTS["bf16"] * (np.abs(total) + wide))


@pytest.mark.parametrize(("name", "m", "n", "k", "r"), SERVED)
def test_a_projection_on_any_arm(name: str, m: int, n: int, k: int, r: int) -> None:
    program, y, expected = run_projection(name, m, n, k, r, context())
    found = judged("y", y, expected)
    assert found.passed, found.reason
    assert labels(program)[:2] == ["LoRA A", "LoRA B"]
    assert ("addends" in labels(program)) is ("lora" not in BUILT_IN[name].epilogues)


@pytest.mark.parametrize(("name", "m", "n", "k", "r"), SERVED[:2])
def test_an_adapter_that_is_off_changes_no_bit(name: str, m: int, n: int, k: int, r: int) -> None:
    program, y, _ = run_projection(name, m, n, k, r, context(lora=False), residual=False)
    site, route = projected(name, m, n, k, context())
    plain = projection_program(*site.projections, route.at(UP, m), m, context(lora=False), BUILT_IN[name])
    assert plain == program
    assert not any(label.startswith("LoRA") or label == "addends" for label in labels(program))
    on, z, _ = run_projection(name, m, n, k, r, context(), residual=False)
    assert not oracle.same_bits(y, z)
    assert len(on.launches) > len(program.launches)


X = Tensor("bf16", (4, 64), "x")
GOOD = Adapter(Tensor("bf16", (8, 64), "a"), Tensor("bf16", (24, 8), "b"))
BAD = {
    "K": (replace(GOOD, a=Tensor("bf16", (8, 32), "a")), r"A of the adapter is a: bf16\[8, 32\], expected .*\[8, 64\]"),
    "N": (replace(GOOD, b=Tensor("bf16", (8, 24), "b")), r"B of the adapter is b: bf16\[8, 24\], expected .*\[24, 8\]"),
    "dtype": (replace(GOOD, a=Tensor("f32", (8, 64), "a")), r"A of the adapter is a: f32\[8, 64\], expected .* bf16"),
    "no rank": (replace(GOOD, a=Tensor("bf16", (0, 64), "a")), r"A of the adapter is .*, a rank from 1"),
    "factor": (replace(GOOD, scale=inf), "found a factor of inf, expected a finite one"),
}


@pytest.mark.parametrize("how", BAD)
def test_an_adapter_of_something_else_is_refused(how: str) -> None:
    wrong, said = BAD[how]
    assert len(delta(GOOD, X, 24, context(), "here").launches) == 2
    with pytest.raises(PlanError, match=f"here: {said}"):
        delta(wrong, X, 24, context(), "here")


def test_an_adapter_of_another_role_is_refused() -> None:
    found = routes_of(SITES, ARMS, JOINED, LANES, context())
    with pytest.raises(PlanError, match=r"layers.0.ffn: found an adapter of 'attn.q', expected one of ffn.gate, ffn.u"):
        ffn_program(*found, 1, context(), ARMS, adapters={"attn.q": GOOD})


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=FULL), "sm_90a", pytest.param("sm_120a", marks=FULL)])
def test_its_launches_compile_clean(arch: str) -> None:
    if (missing := compiler_missing()) is not None:
        pytest.skip(missing)
    for kernel in (*(make(vector=v) for make in (added, low_rank_in) for v in (True, False)), low_rank_out()):
        assert check_kernel(kernel, arch) == ()
