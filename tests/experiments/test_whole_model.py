"""Plans of whole models: equal layers together, gaps in words, bytes that add up, memory that is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import whole_model_cases as cases
from headers_gguf import write_headers

from atlas_lab import checkpoint
from atlas_lab.checkpoint import qwen35
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.writer import write_checkpoint
from atlas_lab.core.context import Order
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import PHASES, rows, rows_from
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import no, yes
from atlas_lab.experiments import grouping
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.plan_results import read_plan, result_of
from atlas_lab.experiments.results import dumps
from atlas_lab.experiments.whole_model import ModelPlan, Other, others_of

SMALL = checkpoint.sizes("tiny", layers=8, intermediate=512)
INT8 = (Order("ffn.*", rows_from(1), ("fake_int8_always",), "arms"),)


def without(registry: Registry, *names: str) -> Registry:
    return Registry(entries=[e for e in registry.entries if e.arm.name not in names], targets=registry.targets)


def served(p: ModelPlan) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    return [
        (
            grouping.span(g.layers),
            " ".join(g.roles),
            [(", ".join(map(str, x.rows)), x.arm, x.reads) for x in g.lines],
        )
        for g in grouping.groups(p)
    ]


def test_equal_layers_are_one_group(model_registry):
    fp4 = [("1 to 3", "nvfp4_gemv", "nvfp4 in place"), ("4 to 16384", "nvfp4_gemm", "nvfp4 in place")]
    bf16 = [("1 to 3", "bf16_gemv", "bf16 in place"), ("4 to 16384", "bf16_gemm", "bf16 in place")]
    few = [fp4[0], ("4 to 16", *fp4[1][1:])]
    assert served(cases.planned(model_registry, "nvfp4", cases.HYBRID)) == [
        ("0-2, 4-6, ..., 60-62 (48)", "gdn.qkv gdn.z gdn.out", fp4),
        ("0-2, 4-6, ..., 60-62 (48)", "gdn.b gdn.a", bf16),
        ("0-63 (64)", "ffn.gate ffn.up", [*few, ("17 to 16384", "fake_q4k_mmq", "q4_k,through=bf16 of nvfp4")]),
        ("0-63 (64)", "ffn.down", [*few, ("17 to 16384", "fake_w4a8_int8", "int8_32 of nvfp4")]),
        ("3, 7, ..., 63 (16)", "attn.q attn.k attn.v attn.o", fp4),
        ("64", "lm_head", bf16),
    ]


def test_decode_and_prefill_on_one_repacked_copy_hold_no_other(registry):
    """As many bytes as stored, where N is in whole tiles: the stored weights go once the copy is made."""
    orders = (Order("*", rows_from(1), ("nvfp4_mma_repacked", "nvfp4_wgmma"), "arms"),)
    p = cases.planned(registry, "nvfp4", orders, SMALL)
    found = {r.label: r.bytes for r in p.load.ledger()}
    assert set(found) == {"derived nvfp4_lanes", "checkpoint bf16"}
    in_place = cases.planned(registry, "nvfp4", (Order("*", rows_from(1), ("nvfp4_gemm",), "arms"),), SMALL)
    assert found["derived nvfp4_lanes"] == {r.label: r.bytes for r in in_place.load.ledger()}["checkpoint nvfp4"]


@pytest.mark.parametrize("spelled", ["bf16", "fp8", "nvfp4", "nvfp4+fp8", "q2_0_g64"])
@pytest.mark.parametrize("orders", [(), cases.HYBRID, INT8], ids=["built in", "hybrid", "int8"])
def test_resident_bytes_add_up(model_registry, spelled: str, orders: tuple[Order, ...]):
    p = cases.planned(model_registry, spelled, orders, SMALL)
    assert sum(g.resident for g in grouping.groups(p)) == p.load.steady
    assert sum(len(g.layers) * len(g.roles) for g in grouping.groups(p)) == 8 * 4 + 6 * 5 + 2 * 4 - 7
    assert p.stored == p.load.steady or orders


def test_bytes_of_a_line_are_what_its_arm_reads(model_registry):
    groups = grouping.groups(cases.planned(model_registry, "nvfp4", cases.HYBRID))
    (gate_up,) = [g for g in groups if "ffn.gate" in g.roles]
    nvfp4 = 128 * (17408 * 2560 + 17408 * 320 + 4)
    assert [x.bytes for x in gate_up.lines] == [nvfp4, nvfp4, 128 * 17408 * 5120 // 256 * 144]


def test_a_format_that_no_arm_reads_is_a_gap_and_counted_as_it_is_stored(model_registry):
    p = cases.planned(model_registry, "q2_0_g128")
    said = {(g.role, str(g.rows), g.reason) for g in p.gaps}
    packed = {"ffn.gate", "ffn.up", "ffn.down", "gdn.qkv", "gdn.z", "gdn.out", "attn.q", "attn.k", "attn.v", "attn.o"}
    assert said == {(role, "1 to 16384", "no arm starts from q2_0_g128 weights") for role in packed}
    assert len(p.gaps) == 3 * 64 + 3 * 48 + 4 * 16
    assert p.load.steady == p.stored
    assert not p.load.pruned
    assert str(p.gaps[0]) == (
        "layers.0.gdn.qkv: no arm serves M 1 to 16384 of its q2_0_g128 weight (no arm starts from q2_0_g128 weights)"
    )


def test_rows_that_no_arm_serves_beside_rows_that_one_does(model_registry):
    registry = without(model_registry, "nvfp4_gemm")
    p = cases.planned(registry, "nvfp4", s=SMALL)
    (gate_up,) = [g for g in grouping.groups(p) if "ffn.gate" in g.roles]
    assert [(str(x.rows[0]), x.arm) for x in gate_up.lines] == [("1 to 3", "nvfp4_gemv"), ("4 to 16384", "")]
    assert {g.reason for g in p.gaps if g.role == "ffn.up"} == {
        "nvfp4_gemv: serves M 1 to 3; fake_w4a16_t, fake_q4k_mmq, fake_w4a8_int8, fake_int8_always: runs only where an "
        "order or pin names it"
    }
    # what decode builds stays built, and the rows of the gap are counted beside it
    built = (Order("ffn.*", rows(1), ("fake_int8_always",), "arms"),)
    q = cases.planned(registry, "nvfp4", built, SMALL)
    assert {r.label for r in q.load.ledger()} == {"derived int8_32", "checkpoint nvfp4", "checkpoint bf16"}
    assert q.load.steady - p.load.steady == {r.label: r.bytes for r in q.load.ledger()}["derived int8_32"]


def test_every_arm_says_its_verdict_on_a_projection(model_registry):
    p = cases.planned(model_registry, "nvfp4", cases.HYBRID, SMALL)
    found = {c.arm: c for c in p.considered("layers.3.ffn.down")}
    assert next(iter(found)) == "fake_w4a8_int8"
    assert str(found["bf16_gemv"].verdict) == "starts from bf16 weights (found nvfp4, expected bf16)"
    assert found["fake_w4a16_t"].verdict
    assert found["fake_w4a16_t"].rank < 0
    assert [c.arm for c in p.considered("lm_head") if c.verdict] == ["bf16_gemv", "bf16_gemm"]
    with pytest.raises(ConfigError, match=r"--explain 9.ffn.down: found no such projection, .* did you mean '7.ffn"):
        p.considered("9.ffn.down")


def test_refusals_in_short(model_registry, monkeypatch: pytest.MonkeyPatch):
    arms = {e.arm.name: e.arm for e in model_registry.entries}

    def odd(q: Any, ctx: Any) -> Any:
        return no("odd", "serves even layers", found=q.layer, allowed="0, 2, ...") if q.layer % 2 else yes()

    monkeypatch.setattr(arms["fake_q4k_mmq"], "eligible", odd)
    monkeypatch.setattr(arms["fake_w4a8_int8"], "eligible", odd)
    p = cases.planned(model_registry, "nvfp4", s=SMALL)
    assert grouping.refusals_in_short(p) == [
        (
            ("fake_q4k_mmq", "fake_w4a8_int8"),
            tuple(f"ffn.{role} (layers 1, 3, 5, 7 (4))" for role in ("gate", "up", "down")),
            "serves even layers (found 1, 3, 5, ..., expected 0, 2, ...)",
        )
    ]
    row = cases.planned(model_registry, "fp8_row", s=SMALL)
    ((refused, roles, why),) = grouping.refusals_in_short(row)
    assert refused == ("fp8_gemv", "fp8_gemm")
    assert len(roles) == 10
    assert why == "reads a grid of block scales (found row, expected block(128,128) or tensor)"


def test_pruned_tensors_of_equal_layers_together(model_registry):
    p = cases.planned(model_registry, "nvfp4", INT8, SMALL)
    pairs, down = grouping.pruned(p)
    assert (pairs.layers, pairs.roles, pairs.count) == (tuple(range(8)), ("ffn.gate", "ffn.up"), 48)
    assert pairs.fields == ("weight", "scale", "global_scale")
    assert down.reason == (
        "served by fake_int8_always, which reads none of it in place; freed after the build of int8_32 of ffn.down"
    )
    assert pairs.bytes + down.bytes == sum(x.tensor.bytes for x in p.load.pruned) == 8 * 3 * (512 * 256 * 9 // 16 + 4)
    report = p.load.report()
    assert {r.label for r in report.freed} == {"staged nvfp4"}
    assert {r.label for r in cases.planned(model_registry, "nvfp4", cases.HYBRID).load.report().not_built} == {
        "derived q4_k,through=bf16"
    }


def test_memory_is_shared_with_everything_beside_the_projections(model_registry):
    p = cases.planned(model_registry, "nvfp4", memory_budget=100 * 10**9)
    token = 2 * 16 * 4 * 256 * 2
    assert p.kv_tokens == p.kv_tokens_each == (100 * 10**9 - p.load.steady - p.states) // (token * 16) * 16
    more = replace(p, others=(Other("embedding", 2 * 10**9, 1, True), Other("vision tower, not used", 10**9, 9, False)))
    assert p.kv_tokens - more.kv_tokens == pytest.approx(2 * 10**9 / token, abs=16)
    several = replace(p, context=replace(p.context, sequences=100, kv_dtype="e4m3", reserve=10**9))
    left = 99 * 10**9 - p.load.steady - 100 * 153_944_064
    assert several.kv_tokens == left // (token // 2 * 16) * 16
    assert several.kv_tokens_each == several.kv_tokens // 16 // 100 * 16
    tight = replace(p, context=replace(p.context, memory_budget=p.load.peak - 1))
    assert (tight.over_budget, tight.kv_tokens) == (1, 0)
    assert replace(p, context=replace(p.context, memory_budget=0)).kv_tokens is None
    assert replace(p, whole=False).kv_tokens is None


def test_other_tensors_of_a_checkpoint(tmp_path, model_registry):
    write_checkpoint(tmp_path / "c", replace(SMALL, prediction=1), "fp8")
    held = checkpoint.open_checkpoint(tmp_path / "c")
    others = {o.meaning: o for o in others_of(held)}
    assert {m for m, o in others.items() if o.kept} == {"embedding", "norm", "convolution", "gates"}
    assert others["embedding"].bytes == 512 * 256 * 2
    assert others["gates"].bytes == 6 * 2 * 256
    assert not others["multi-token prediction, not used"].kept
    assert sum(o.count for o in others.values()) == len(held.unread)
    assert list(others)[-1] == "multi-token prediction, not used"
    # a family that describes no parameters says by its meanings what is not used
    plain = {o.meaning: o for o in others_of(replace(held, parameters=()))}
    assert {m for m, o in plain.items() if not o.kept} == {"multi-token prediction, not used"}


def test_an_embedding_in_blocks_is_kept_as_it_is_stored(tmp_path):
    write_headers(tmp_path / "m.gguf", replace(SMALL, value_head_dim=128), 128)
    held = checkpoint.open_checkpoint(tmp_path / "m.gguf")
    blocks = Tensor("u8", (512, 210), "model.embed_tokens.weight_q6_k")
    tensors = {t.name: t for t in held.unread if "embed" not in t.name} | {blocks.name: blocks}
    found = tuple(QWEN35.parameters(held.config, tensors))
    assert not QWEN35.missing(held.config, tensors | {"lm_head.weight": Tensor("bf16", (512, 256), "lm_head.weight")})
    others = others_of(replace(held, unread=tuple(tensors.values()), parameters=found))
    (embedding,) = (o for o in others if o.meaning == "embedding")
    assert (embedding.bytes, embedding.count, embedding.kept) == (512 * 210, 1, True)


def test_every_rank_holds_the_whole_of_an_embedding_that_is_the_output_head(tmp_path):
    write_checkpoint(tmp_path / "c", replace(SMALL, tied=True), "bf16")
    whole, rank = (checkpoint.open_checkpoint(tmp_path / "c", tensor_parallel=(0, size)) for size in (1, 2))
    assert not [o for o in others_of(whole) if o.meaning == "embedding"]
    (embedding,) = (o for o in others_of(rank) if o.meaning == "embedding")
    assert (embedding.bytes, embedding.count, embedding.kept) == (512 * 256 * 2, 1, True)
    assert rank.projections[-1].n == 256


def test_a_plan_is_read_back_as_it_was_written(tmp_path, model_registry):
    p = cases.planned(model_registry, "q2_0_g128", s=SMALL)
    made = result_of([p])
    path = tmp_path / "p.json"
    path.write_text(dumps(made))
    assert read_plan(path) == made
    assert made.plans[0].groups[0].served[0].arm is None
    assert len(made.plans[0].routes) == len(p.routes)
    path.write_text('{"schema": "atlas-lab.plan/2", "plans": []}')
    with pytest.raises(ConfigError, match=r"p.json: no result of schema atlas-lab.plan/1"):
        read_plan(path)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2 (3)"),
        ([0, 2, 3, 9], "0, 2-3, 9 (4)"),
        (range(0, 10, 2), "0, 2, ..., 8 (5)"),
        (range(0, 8, 2), "0, 2, 4, 6 (4)"),
        ([0, 2, 4, 6, 9], "0, 2, 4, 6, 9 (5)"),
        ([0, 1, 3, 5, 7, 9], "0-1, 3, 5, 7, 9 (6)"),
    ],
)
def test_spans(numbers, said: str):
    assert grouping.span(numbers) == said


def test_phases_cover_what_is_served():
    assert [str(r) for r in PHASES.values()] == ["1", "2 to 16", "17+"]
    assert len(qwen35.synthetic_sites(cases.SIZES, "bf16")) == 257
