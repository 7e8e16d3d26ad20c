"""What is drawn for an arm, and that the drawing holds still."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from defective import DEFECTS

from atlas_lab.arms import atlas_arms
from atlas_lab.core.arm import Arm, epilogue_of, is_group, kernels_of
from atlas_lab.core.rows import Rows, rows
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.experiments.case import Case, base_context, target_for, verdict_of
from atlas_lab.experiments.cases import Budget, cases, launched, refusal, role_sets, teeth_case
from atlas_lab.experiments.checks import Check, checks_of, compiled_in
from atlas_lab.experiments.ran_by_models import ran_by_models
from atlas_lab.formats import FORMATS
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.lang import Kernel, architectures

H200 = shipped_targets()[0]
A100 = next(t for t in shipped_targets() if t.arch == "sm_80")
ARMS = {a.name: a for a in (*atlas_arms(), DEFECTS[0][0])}
TARGETS = {name: target_for(arm, H200) for name, arm in ARMS.items()}  # which the arm's cases are of
# One of each kind of arm; all with `--full`.
KINDS = ("bf16_gemm", "fp8_gemv", "fp8_row_gemv", "fp8_mma", "nvfp4_wgmma", "nvfp4_mma_joined", "q2_mma", "int8_gemv")
EACH = pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.full) for name in ARMS]
)


@functools.cache
def drawn_for(name: str, budget: Budget = "interpreter") -> tuple[Case, ...]:
    return cases(ARMS[name], target=TARGETS[name], budget=budget)


@EACH
def test_cases_are_where_the_arm_says_yes_and_awkward(name: str) -> None:
    arm = ARMS[name]
    drawn = drawn_for(name)
    assert drawn == cases(arm, target=TARGETS[name])
    assert len({c.id for c in drawn}) == len(drawn)
    base = base_context(TARGETS[name])
    assert all(verdict_of(c, arm, base) for c in drawn)
    assert {c.m for c in drawn} >= {arm.rows.first, min(arm.rows.last, 67)}
    assert all(c.m in arm.rows for c in drawn)
    ns, ks = {c.n for c in drawn}, {c.k for c in drawn}
    # projections that border on each other in one launch end where two tiles do
    if all(map(is_group, arm.roles)) and 1 in arm.rows and "mma" in name:
        assert min(ns) == 32
        assert any(n % 64 for n in ns - {32})
    else:
        assert 1 in ns
        assert any(n % 2 for n in ns - {1})
    assert max(ns) > 128
    long = arm.rows.first <= 16  # drawn for few rows alone
    assert len(ks) >= {64: 4, 128: 3 + long, 256: 3}.get(min(ks), 5)
    assert max(ks) > 1024
    assert {c.values for c in drawn} == {"heavy", "plain", "huge", "tiny"}
    unreached = [c for c in drawn if c.why in ("a kernel that no other case launches", "a setting of this K")]
    assert len(unreached) < len(kernels_of(arm)) + len(arm.library_calls)
    assert 5 <= len(drawn) - len(unreached) <= (14 if arm.source else 4 * len(FORMATS)), "few, telling cases"


@EACH
def test_a_gpu_gets_the_same_and_full_size_ones(name: str) -> None:
    small, large = drawn_for(name), drawn_for(name, "gpu")
    assert set(small) <= set(large)
    assert max(c.n * c.k for c in large) == 17408 * 5120
    assert max(c.m for c in large) == min(ARMS[name].rows.last, 4099)


@EACH
def test_every_format_and_convention_of_the_family_is_drawn(name: str) -> None:
    drawn = drawn_for(name)
    formats = {c.format for c in drawn}
    family = {f.name for f in FORMATS.values() if ARMS[name].source in ("", f.family)}
    # arms of its own, and one that reads all, read this
    of_rows = {"fp8_row"} if ARMS[name].source == "fp8" and name != "fp8_wgmma" else set()
    of_groups = {"q2_0_g64"} if name == "q2_mmq" else set()
    assert formats == (of_rows if name.startswith("fp8_row_") else family - of_rows - of_groups)
    if ARMS[name].source == "fp8":
        assert "bf16 scales" in {c.stored for c in drawn}


def reached_on(target: Target, arm: Arm) -> set[Kernel]:
    base = base_context(target)
    drawn = drawn_for(arm.name) if target == TARGETS[arm.name] else cases(arm, target=target)
    return {k for c in drawn for k in launched(c, arm, base)}


@pytest.mark.parametrize("name", ["fp8_gemv", "fp8_row_gemv"])
def test_a_card_launches_the_fp8_gemvs_for_what_it_has_and_no_others(name: str) -> None:
    assert reached_on(H200, ARMS[name]) == set(ARMS[name].optional_kernels)
    assert reached_on(A100, ARMS[name]) == set(ARMS[name].kernels)


@EACH
def test_every_kernel_that_a_small_shape_reaches_is_launched(name: str) -> None:
    arm = ARMS[name]
    reached = reached_on(TARGETS[name], arm)
    if not set(arm.kernels) <= reached and all(A100.meets(k.needs) for k in arm.kernels):
        reached |= reached_on(A100, arm)  # what stands in for an instruction that newer cards have
    # tiles that need a card full of them, and what clears flags before tiles that are cut: tests/arms/test_wgmma_cut.py
    never = [dict(k.spec.parameters) for k in arm.kernels if k not in (*reached, clear_flags)]
    assert all(p.get("bm", 0) >= 80 or p.get("bn", 0) >= 256 for p in never)
    assert len(never) < len(arm.kernels)


def test_tiles_are_tried_at_ragged_edges_and_past_one_in_each_direction() -> None:
    drawn = [c for c in cases(ARMS["bf16_gemm"]) if c.why.startswith("a kernel")]
    assert any(c.m > 64 and c.n > 64 and c.n % 64 and c.k % 64 and c.k > 256 for c in drawn)


@pytest.mark.parametrize("name", ARMS)
def test_a_refusal_is_found(name: str) -> None:
    found = refusal(ARMS[name], target=TARGETS[name])
    assert found is not None
    assert found.verdict.code in ("k-multiple", "scale-geometry", "source")


def test_checks_survive_json() -> None:
    for check in checks_of(ARMS["fp8_gemv"], H200):
        again = Check.of(json.loads(json.dumps(check.to_json())))
        assert again == check
        assert again.id == check.id
    compiled = checks_of(ARMS["fp8_gemv"], H200, everywhere=False)[-1]
    assert Check.of(compiled.to_json()) == compiled
    c = Case("a", ("ffn.up",), 1, 2, 3, "bf16", levers=(("graph", False),))
    assert Case.of(json.loads(json.dumps(c.to_json()))) == c
    assert c.id == "bf16-ffn_up-m1-n2-k3-graph=false"


def compiled(arm: Arm, target: Target, *, everywhere: bool) -> list[tuple[Kernel, str]]:
    checks = [c for c in checks_of(arm, target, everywhere=everywhere) if c.kind == "compile"]
    return [(k, c.arch) for c in checks for k in compiled_in(c, arm)]


def test_kernels_are_compiled_for_every_architecture_or_those_of_models_for_the_target_s() -> None:
    arm = ARMS["nvfp4_mma_repacked"]
    pairs = [(k, a) for k in kernels_of(arm) for a in architectures(k.needs)]
    ran = ran_by_models(arm, H200)
    here = [(k, a) for k, a in pairs if k == arm.kernels[0] or (a == H200.arch and k in ran)]
    assert sorted(compiled(arm, H200, everywhere=True), key=str) == sorted(pairs, key=str)
    assert sorted(compiled(arm, H200, everywhere=False), key=str) == sorted(here, key=str)
    assert len(kernels_of(arm)) / 4 < len(ran) < len(kernels_of(arm))


def test_of_kernels_with_an_epilogue_the_first_of_each_family_and_epilogue_is_compiled() -> None:
    """The arm names that first which has the fewest registers left; `--full` compiles them all."""
    arm = ARMS["fp8_wgmma_w8a8"]
    few, every = (compiled_in(Check("compile", arm.name, arch=H200.arch, home=home), arm) for home in (H200.name, ""))
    apart = [k for k in few if epilogue_of(k) is not None]
    assert [epilogue_of(k) for k in apart] == ["addends", "fp8_groups", "addends fp8_groups"]
    assert [dict(k.spec.parameters)["bn"] for k in apart] == [192, 128, 128]
    assert set(few) - set(apart) > ran_by_models(arm, H200)
    assert set(every) == set(kernels_of(arm))


@pytest.mark.parametrize("name", ["nvfp4_mma", "fp8_wgmma_w8a8", "int8_mma"])
def test_of_models_kernels_those_that_a_small_shape_reaches_are_launched(name: str) -> None:
    arm = ARMS[name]
    drawn = [c.case for c in checks_of(arm, H200, everywhere=False) if c.kind == "parity" and c.case is not None]
    reached = {k for c in drawn for k in launched(c, arm, base_context(H200))}
    ran = ran_by_models(arm, H200, few=True)
    assert ran <= ran_by_models(arm, H200)
    assert ran & {k for c in drawn_for(name) for k in launched(c, arm, base_context(H200))} <= reached
    assert {c.format for c in drawn} == {c.format for c in drawn_for(name)}


def test_an_optional_kernel_that_the_target_s_architecture_cannot_run_is_compiled_where_it_can() -> None:
    arm, hopper = few(rows(1)), next(k for k in ARMS["bf16_wgmma"].kernels if architectures(k.needs) == ("sm_90a",))
    arm.optional_kernels = (hopper,)
    other = next(t for t in shipped_targets() if t.arch == "sm_120a")
    assert (hopper, "sm_90a") in compiled(arm, other, everywhere=False)


def few(served: Rows, *patterns: str) -> Arm:
    arm = type(DEFECTS[0][0])()
    arm.rows, arm.roles = served, patterns or arm.roles
    return arm


@pytest.mark.parametrize(("served", "expected"), [(rows(1), {1}), (rows(2, 16), {2, 3, 16}), (rows(5), {5})])
def test_row_counts_are_both_ends_and_ragged_between(served: Rows, expected: set[int]) -> None:
    assert {c.m for c in cases(few(served))} == expected


def test_every_pattern_of_roles_is_tried() -> None:
    arm = next(a for a, _ in DEFECTS if a.name == "pair")
    arm = type(arm)()
    arm.roles = ("attn.*", "ffn.gate+ffn.up", "moe.expert")
    arm.finalize = lambda p, ctx: []  # type: ignore[method-assign]
    assert role_sets(arm) == [("attn.q",), ("ffn.gate", "ffn.up"), ("moe.expert",)]
    assert {c.roles for c in cases(arm)} == {("attn.q",), ("ffn.gate", "ffn.up"), ("moe.expert",)}


def test_the_case_for_teeth_is_small_and_normal() -> None:
    for name, arm in ARMS.items():
        c = teeth_case(arm, TARGETS[name])
        assert c is not None
        assert c.values == "plain"
        assert 32 <= c.k <= (256 if arm.source == "q4_k" or "mmq" in arm.name else 128)
        assert replace(c, why="") != c
