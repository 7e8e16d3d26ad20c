"""Two configurations against each other: rows that other arms serve, bytes by label, tokens."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import whole_model_cases as cases
from rich.console import Console

from atlas_lab import checkpoint
from atlas_lab.cli.plan_tables import print_diff
from atlas_lab.core.context import Order
from atlas_lab.core.rows import rows
from atlas_lab.experiments.grouping import span
from atlas_lab.experiments.plan_diff import Diff, compare
from atlas_lab.experiments.plan_results import result_of
from atlas_lab.experiments.whole_model import Other

SMALL = checkpoint.sizes("tiny", layers=8)


def changed(d: Diff) -> list[tuple[str, str, str, str, str]]:
    return [(span(c.layers), " ".join(c.roles), ", ".join(map(str, c.rows)), c.a[0], c.b[0]) for c in d.changed]


def test_equal_plans_have_no_difference(model_registry):
    d = compare(*(cases.planned(model_registry, "nvfp4", s=SMALL) for _ in range(2)))
    assert d.same
    assert changed(d) == []


def test_other_tensors_that_differ(model_registry):
    a = replace(cases.planned(model_registry, "nvfp4", s=SMALL), others=(Other("norm", 256, 1, True),))
    b = replace(a, others=(Other("norm", 512, 1, True), Other("unknown", 8, 1, False)))
    d = compare(a, b)
    assert (d.same, d.more, d.more_others) == (False, 0, 256)
    out = StringIO()
    print_diff(d, Console(file=out, width=120))
    assert "tensors that no projection reads" in out.getvalue()
    assert compare(a, replace(a, others=(*a.others, Other("unknown", 8, 1, False)))).same


def test_only_the_rows_that_differ(model_registry):
    a = cases.planned(model_registry, "nvfp4", cases.BASE, SMALL)
    b = cases.planned(model_registry, "nvfp4", (Order("ffn.down", rows(8, 64), ("fake_int8_always",), "x"),), SMALL)
    d = compare(a, b)
    assert changed(d) == [
        ("0-7 (8)", "ffn.gate ffn.up", "17 to 16384", "fake_w4a16_t", "nvfp4_gemm"),
        ("0-7 (8)", "ffn.down", "8 to 16", "nvfp4_gemm", "fake_int8_always"),
        ("0-7 (8)", "ffn.down", "17 to 64", "fake_w4a16_t", "fake_int8_always"),
        ("0-7 (8)", "ffn.down", "65 to 16384", "fake_w4a16_t", "nvfp4_gemm"),
    ]
    assert d.more == b.load.steady - a.load.steady
    assert sum(x.b - x.a for x in d.labels) == d.more
    assert d.more_tokens == b.kv_tokens - a.kv_tokens


def test_layers_that_one_has_alone_and_gaps(model_registry):
    a = cases.planned(model_registry, "fp8_row", s=SMALL)
    b = cases.planned(model_registry, "fp8", s=checkpoint.sizes("tiny", layers=4))
    d = compare(a, b)
    down = [c for c in changed(d) if "ffn.down" in c[1]]
    assert down == [
        ("0-3 (4)", "ffn.gate ffn.up ffn.down", "1 to 3", "no arm", "fp8_gemv"),
        ("0-3 (4)", "ffn.gate ffn.up ffn.down", "4 to 16384", "no arm", "fp8_gemm"),
        ("4-7 (4)", "ffn.gate ffn.up ffn.down", "1 to 16384", "no arm", "not there"),
    ]
    assert not d.same


def test_of_part_of_a_model_nothing_is_said_of_tokens(model_registry):
    a = cases.planned(model_registry, "bf16", s=SMALL)
    d = compare(a, replace(a, whole=False))
    assert d.more_tokens is None
    assert d.same
    (made,) = result_of([], [d]).diffs
    assert (made.same, made.more_tokens, made.labels) == (True, None, {"checkpoint bf16": (a.load.steady,) * 2})
