"""Suites of `bench`: their cases can be planned, name a peer that reads such weights, and say what must be reached."""

from __future__ import annotations

from itertools import groupby

import pytest

from atlas_lab import formats
from atlas_lab.core.route import RouteError
from atlas_lab.experiments import bench_peer, peers, shapes, suites
from atlas_lab.experiments.bench_case import BenchCase, FfnCase
from atlas_lab.experiments.bench_ffn import Blocks
from atlas_lab.experiments.bench_projection import Measuring, plan_of, reference_of
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.settings import Said


def decode_of(kind: type):
    return [c for c in suites.suite("decode") if isinstance(c, kind)]


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_case_of_a_suite_can_be_planned(registry, name: str):
    cases = suites.suite(name)
    assert len({c.name for c in cases}) == len(cases)
    rows = {e.arm.name: e.arm.rows for e in registry.entries}
    lacking = sorted({c.name for c in cases if any(a not in rows or c.m not in rows[a] for a in c.arms)})
    groups = [list(g) for _, g in groupby(cases, key=lambda c: c.group)]
    assert len({g[0].group for g in groups}) == len(groups)  # those of a weight follow each other
    for group in groups:
        if isinstance(group[0], FfnCase):
            if not any(c.name in lacking for c in group):
                with_ = Measuring(registry, Said(), False, 5, 0, bench_peer.Products())
                assert len(Blocks(group, with_, registry.targets["h200"]).steps) == len(group)
            continue
        assert all(peers.reads(c.peer, c.format) in formats.FORMATS for c in group if c.peer)
        assert reference_of(group[0]).sites(group[0].format)
        if any(c.name in lacking for c in group):
            continue
        plan = plan_of(group, registry, Said(), registry.targets["h200"])
        found = [(s.assignment.arm, s.call.n, s.call.k, s.call.m) for s in plan.steps]
        assert sorted(found) == sorted((c.arm, c.n, c.k, c.m) for c in group)
    if lacking:
        pytest.skip(f"no arm serves {len(lacking)} cases of {name}, such as {lacking[0]}: they were not planned")


def test_what_the_foundation_must_reach():
    must = {(c.arm, c.m): (c.of_peer, c.of_floor) for c in suites.suite("foundation") if c.of_peer or c.of_floor}
    assert must == {
        ("bf16_gemv", 1): (0.85, 0),
        ("fp8_gemv", 1): (0, 0.75),
        ("nvfp4_gemv", 1): (0, 0.55),
        ("bf16_gemm", 4096): (0.5, 0),
    }


def test_what_decode_must_reach():
    """The bounds of the targets, at their shape alone, of one row by the arms that serve it where none is named."""
    cases = decode_of(BenchCase)
    assert {(c.n, c.k) for c in cases if c.of_peer or c.of_floor or c.of_one_row} == {(17408, 5120)}
    by_peer = {(c.arm, c.m): (c.peer, c.of_peer) for c in cases if c.of_peer}
    assert by_peer == {
        ("bf16_gemv", 1): ("torch.mv", 1.0),
        ("fp8_gemv", 1): ("humming", 1.25),
        ("fp8_mma", 16): ("humming", 1.2),
        ("nvfp4_mma_repacked", 1): ("humming", 1.6),
        **{("nvfp4_mma_repacked", m): ("humming", 1.55) for m in (2, 3, 4, 5, 8)},
        ("nvfp4_mma_repacked", 16): ("humming", 1.4),
    }
    assert {(c.arm, c.m): c.of_floor for c in cases if c.of_floor} == {("q4k_mma_repacked", 1): 0.7, ("q2_mma", 1): 0.5}
    assert {(c.arm, c.m, c.of_one_row) for c in cases if c.of_one_row} == {
        (arm, 16, 0.8) for arm in ("bf16_mma", "fp8_mma", "nvfp4_mma_repacked")
    }


def test_what_prefill_must_reach():
    """The bounds of the targets above 16 rows in the mean over six shapes, 0.93 of them at each."""
    cases = [c for c in suites.suite("prefill") if isinstance(c, BenchCase)]
    bounds = {
        ("bf16_wgmma", 64, "torch.mm"): 1.0,
        ("bf16_wgmma", 4096, "torch.mm"): 0.98,
        ("fp8_wgmma_w8a8", 64, "torch.scaled_mm"): 1.4,
        ("fp8_wgmma_w8a8", 4096, "torch.scaled_mm"): 1.0,
        ("nvfp4_wgmma", 64, "humming"): 1.2,
        ("nvfp4_wgmma", 128, "humming"): 1.1,
        ("nvfp4_wgmma", 512, "humming"): 1.0,
        ("nvfp4_wgmma", 4096, "humming"): 1.07,
        ("nvfp4_wgmma", 4096, "torch.mm"): 0.97,
    }
    assert {(c.arm, c.m, c.peer): c.of_peers for c in cases if c.of_peers} == bounds
    for n, k in ((17408, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 4096), (8192, 8192)):
        found = {(c.arm, c.m, c.peer): c.of_peer for c in cases if (c.n, c.k) == (n, k) and c.of_peer}
        assert found == pytest.approx({what: 0.93 * least for what, least in bounds.items()})
    assert next(c.name for c in cases if c.again) == "nvfp4_wgmma N=17408 K=5120 M=64 against torch.mm"
    assert min(c.m for c in cases) == 17


def test_rows_go_from_decode_to_long_prompts():
    """One line a format, each row count once, none 5 % slower than a larger one."""
    cases = [c for c in suites.suite("rows") if isinstance(c, BenchCase)]
    assert {(c.n, c.k, c.of_more_rows) for c in cases} == {(17408, 5120, 0.95)}
    for format in ("bf16", "fp8", "nvfp4"):
        ms = [c.m for c in cases if c.format == format]
        assert ms == sorted(set(ms))
        assert (ms[0], ms[-1], len(ms)) == (16, 16384, 23)
        assert [c.m for c in cases if c.format == format and "wgmma" in c.arm] == ms[1:]


def test_the_block_of_decode():
    """Every place of the gated product, dependent and not at M=1, dependent above; one bound, on the best form."""
    cases = decode_of(FfnCase)
    assert {(c.hidden, c.intermediate, c.format, c.arms) for c in cases} == {
        (5120, 17408, "nvfp4", ("nvfp4_mma_repacked_joined", "nvfp4_mma_repacked"))
    }
    places = ("epilogue", "launch", "input")
    at_one = [(1, g, pdl) for g in places for pdl in (True, False)]
    assert [(c.m, c.gated, c.pdl) for c in cases] == at_one + [(m, g, True) for m in (4, 16) for g in places]
    assert [(c.name, round(c.of_floor, 4)) for c in cases if c.of_floor] == [
        ("ffn gated=epilogue pdl=on nvfp4 N=17408 K=5120 M=1", 0.7143)
    ]


def test_decode_covers_every_shape_of_the_models():
    found = shapes.shapes()
    assert len(found) == 32
    assert found[5120, 6144] == ("qwen3.5-27b gdn.out", "qwen3.5-27b attn.o")
    assert found[17408, 5120] == ("qwen3.5-27b ffn.gate", "qwen3.5-27b ffn.up")
    assert found[28672, 8192] == ("llama-3-70b ffn.gate", "llama-3-70b ffn.up")
    assert {used[0].partition(" ")[0] for used in found.values()} == set(shapes.MODELS)
    cases = decode_of(BenchCase)
    for arm in ("bf16_mma", "fp8_mma", "nvfp4_mma_repacked"):
        assert {(c.n, c.k): c.used for c in cases if c.arm == arm and c.m == 1} == found
    assert len(cases) < 130


def test_a_part_of_a_suite():
    names = [c.name for c in suites.suite("decode", "nvfp4_mma* N=17408 K=5120 M=1")]
    assert names == ["nvfp4_mma_repacked N=17408 K=5120 M=1", "nvfp4_mma N=17408 K=5120 M=1"]
    known = "expected one of foundation, decode, prefill, rows, load, did you mean 'foundation'?"
    such = "of the 18 of foundation, such as 'bf16_gemv N=17408 K=5120 M=1'"
    for suite, only, said in (
        ("fundation", "", f"--suite fundation: found no such suite, {known}"),
        ("foundation", "nvfp4", f"--only nvfp4: found no case, expected a pattern {such}"),
        ("load", "*", "--only *: found no case, expected a pattern of the 0 of load"),
    ):
        with pytest.raises(ConfigError) as e:
            suites.suite(suite, only)
        assert str(e.value) == said


def test_rows_that_the_arm_does_not_serve_are_refused(registry):
    """Another arm would be measured in its name."""
    cases = [BenchCase("toy_one", "bf16", 64, 48, m) for m in (1, 4)]
    with pytest.raises(RouteError) as e:
        plan_of(cases, registry, Said(), registry.targets["h200"])
    assert str(e.value) == "toy_one N=64 K=48 M=4: found bf16_mma for these rows, expected toy_one"
