"""docs/residency.md: every line multiplied out, every sum against the plan of the header-only 27B model."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import whole_model_cases as cases
from headers_gguf import write_headers

from atlas_lab.checkpoint import open_checkpoint
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.writer import write_model
from atlas_lab.core.registry import load_registry
from atlas_lab.experiments.plan_diff import compare
from atlas_lab.experiments.whole_model import ModelPlan, others_of, plan_model

DOC = Path(__file__).parents[2] / "docs" / "residency.md"
SPELLED = {"BF16": "bf16", "FP8 block": "fp8", "NVFP4 + FP8": "nvfp4+fp8", "Q2_0": "q2_0_g128"}


def number(text: str) -> int:
    return int(text.strip(" *").replace(",", ""))


def tables(heading: str) -> list[list[list[str]]]:
    """The tables under a heading, as rows of cells without the first two."""
    section = re.split(r"^## ", DOC.read_text(encoding="utf-8"), flags=re.M)
    (body,) = (s for s in section if s.startswith(f"{heading}\n"))
    blocks = [b for b in body.split("\n\n") if b.startswith("|")]
    return [[[c.strip() for c in line.strip("|").split("|")] for line in b.strip().splitlines()] for b in blocks]


def total(rows: list[list[str]]) -> int:
    """The sum of a table, each line of it checked."""
    added = 0
    for _, count, one, size, held, everything in rows[2:-1]:
        assert prod(int(x) for x in one.split(" x ")) == number(size), one
        assert -(-number(size) // 256) * 256 == number(held), one
        assert int(count) * number(held) == number(everything), one
        added += number(everything)
    assert number(rows[-1][-1]) == added
    return added


def headers(folder: Path, spelled: str) -> Path:
    if spelled.startswith("q2_0"):
        path = folder / f"{spelled}.gguf"
        write_headers(path, cases.SIZES, int(spelled.removeprefix("q2_0_g")))
    else:
        path = folder / spelled
        write_model(path, QWEN35, cases.SIZES.config(), spelled, headers_only=True)
    return path


@pytest.fixture(scope="module")
def plans(model_registry, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelPlan]:
    """Plans of header-only checkpoints."""
    folder = tmp_path_factory.mktemp("headers")
    out = {}
    for title, spelled in SPELLED.items():
        held = open_checkpoint(headers(folder, spelled))
        context = cases.context(model_registry, dims=held.dims)
        out[title] = plan_model(spelled, held.sites, context, model_registry, others_of(held))
    return out


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("BF16", "BF16"),
        ("FP8, one scale a 128 x 128 block", "FP8 block"),
        ("NVFP4 with FP8 attention and delta nets", "NVFP4 + FP8"),
        ("Q2_0", "Q2_0"),
    ],
)
def test_projections(plans: dict[str, ModelPlan], heading: str, title: str):
    plan = plans[title]
    added = total(tables(heading)[0])
    assert added == plan.load.steady == plan.load.peak == plan.stored


def test_what_is_stored_does_not_hang_on_the_arms(plans: dict[str, ModelPlan]):
    everything = load_registry()
    for plan in plans.values():
        context = cases.context(everything, dims=plan.context.dims)
        again = plan_model(plan.name, [r.site for r in plan.routes], context, everything)
        assert again.stored == plan.stored


def test_projections_in_groups_of_64(model_registry, tmp_path: Path):
    held = open_checkpoint(headers(tmp_path, "q2_0_g64"))
    plan = plan_model("q", held.sites, cases.context(model_registry, dims=held.dims), model_registry)
    assert total(tables("Q2_0")[1]) == plan.load.steady


def test_other_tensors(plans: dict[str, ModelPlan]):
    (table,) = tables("The other tensors")
    assert {p.kept_others for p in plans.values()} == {total(table)}
    kept = [o for o in plans["BF16"].others if o.kept]
    assert sum(o.count for o in kept) == sum(int(row[1]) for row in table[2:-1])


def test_tokens_of_kv_cache(plans: dict[str, ModelPlan]):
    (table,) = tables("Tokens of KV cache")
    lines = {row[0].strip("-* "): row[1:] for row in table}
    for i, title in enumerate(table[0][1:]):
        said = {
            name: number(cells[i]) for name, cells in lines.items() if name and cells[i] != title and name[0].isalpha()
        }
        plan = plans[title]
        context = replace(plan.context, memory_budget=said["budget"], reserve=said["reserve"])
        mine = replace(plan, context=context)
        assert said["projections"] == plan.load.steady
        assert said["other tensors"] == plan.kept_others
        assert said["states of one sequence"] == plan.states == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
        left = said["budget"] - sum(
            said[x] for x in ("reserve", "projections", "other tensors", "states of one sequence")
        )
        assert said["left for the cache"] == left
        assert said["tokens"] == left // (65536 * 16) * 16 == mine.kv_tokens
        assert plan.kv_bytes_per_token == 65536


def test_the_hybrid_of_q4_k_and_int8_holds_more_than_transposed_copies(model_registry):
    base = cases.planned(model_registry, "nvfp4", cases.BASE)
    hybrid = cases.planned(model_registry, "nvfp4", cases.HYBRID)
    copies = [total(t) for t in tables("Copies for prefill: the hybrid of Q4_K and int8")]
    plain = cases.planned(model_registry, "nvfp4")
    assert [p.load.steady - plain.load.steady for p in (base, hybrid)] == copies
    diff = compare(base, hybrid)
    assert diff.more == copies[1] - copies[0] == 3_208_593_408
    assert f"**{diff.more:,}** bytes: 3.21 GB more" in DOC.read_text(encoding="utf-8")
    down = {x.label: x.b for x in diff.labels}["derived int8_32"]
    assert diff.more == down // 2 - 192 * 256
