"""The ways in which an engine's loader, dispatch and pruning came to disagree, each as a test; and the arithmetic of a
27B model's finalize."""

from __future__ import annotations

from dataclasses import replace

import pytest
from copy_arms import ARMS, BATCH, FFN, INPLACE, QKV, CopyArm, bind, catalog, context, members, parts, site
from copy_cases import Files, projection

from atlas_lab.arms import copies
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import Alloc, Build, Free, LoadPlan, Upload, load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.route import Route
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.tensor import round_up
from atlas_lab.core.verdict import no
from atlas_lab.runtime.device import open_device
from atlas_lab.runtime.load import execute


def arm(name: str) -> CopyArm:
    return next(a for a in ARMS if a.name == name)


def routed(s: Site, *arms: CopyArm, **more) -> Route:
    return resolve(s, context(rows(1, 64), **more), catalog(*arms, INPLACE))


def names(plan: LoadPlan) -> list[str]:
    """Buffers that stay."""
    freed = {s.buffer for s in plan.steps if isinstance(s, Free)}
    return [s.buffer for s in plan.steps if isinstance(s, Alloc) and s.buffer not in freed]


def test_a_fused_grid_ends_on_a_boundary_of_its_blocks_or_is_not_made() -> None:
    fits, cuts = site(0, FFN, 128, 128, "fp8"), site(0, FFN, 192, 128, "fp8")
    assert routed(fits, arm("fused")).arms == ("fused",)
    route = routed(cuts, arm("fused"))
    assert route.arms == ("inplace",)
    assert "one scale would cover rows of two weights" in str(route.refusals()[0].verdict)
    plan = load_plan([route])
    assert names(plan) == [t.name for p in cuts.projections for t in p.weight.tensors.values()]
    assert not plan.not_built, "what is refused is nothing a careless loader could build"


def test_a_config_whose_width_disagrees_with_the_tensors_declines_fusion_and_frees_nothing() -> None:
    gate, up = site(0, FFN, 256, 128, "fp8").projections
    route = routed(Site((gate, replace(up, n=128))), arm("fused"))
    assert route.arms == ("inplace",)
    plan = load_plan([route])
    assert not plan.pruned
    assert not [s for s in plan.steps if isinstance(s, Free)]


def test_an_arm_ahead_of_the_fp8_arm_changes_what_is_pruned() -> None:
    """Orders decide, at one place: with the Q2 arm first nothing reads FP8, with FP8 first nothing builds Q2."""
    s = site(0, ("ffn.up",), 16, 64, "fp8")
    q2 = CopyArm("q2", lambda p, c: [copies.int8_32(p)], lossy=True)
    fp8 = CopyArm("fp8", bind)
    ahead = load_plan([routed(s, q2, fp8, orders=[(rows_from(1), ["q2", "fp8"])])])
    behind = load_plan([routed(s, q2, fp8, orders=[(rows_from(1), ["fp8", "q2"])])])
    assert {r.label for r in ahead.ledger()} == {"derived int8_32"}
    assert {x.tensor.name for x in ahead.pruned} == {"layers.0.ffn.up.weight", "layers.0.ffn.up.scale"}
    assert {r.label for r in behind.ledger()} == {"checkpoint fp8"}
    assert [r.label for r in behind.not_built] == ["derived int8_32"]
    assert not behind.pruned


def test_an_arm_for_some_rows_alone_frees_nothing_that_other_rows_read() -> None:
    s = site(0, ("ffn.up",), 16, 64, "nvfp4")
    for served, kept in ((rows(1, 64), True), (rows(32), False)):
        ctx = context(served, orders=[(BATCH, ["mmq"])])
        plan = load_plan([resolve(s, ctx, catalog(arm("mmq"), INPLACE))])
        assert (s.projections[0].weight["weight"].name in names(plan)) == kept
        assert [x.reason for x in plan.pruned] == [
            f"layers.0.ffn.up is served by mmq, which reads no {t.name} in place; freed after the build of block_nvfp4 "
            "of layers.0.ffn.up"
            for t in (() if kept else s.projections[0].weight.tensors.values())
        ]


def test_a_tensor_copied_into_a_fused_weight_is_released_and_one_bound_in_place_is_not() -> None:
    s = site(0, FFN, 128, 128, "fp8")
    released = load_plan([routed(s, arm("fused"))])
    assert len(released.pruned) == 4
    assert released.steady == 2 * 128 * 128 + 256
    assert released.peak == 2 * released.steady + 256, "the sources and the fused weight are there at once"
    decode = CopyArm("decode", bind, served=rows(1))
    held = load_plan([routed(s, decode, arm("fused"), orders=[(rows(1), ["decode"]), (rows_from(2), ["fused"])])])
    assert not held.pruned
    assert not [x for x in held.steps if isinstance(x, Free)]
    assert held.steady == held.peak == released.steady + 2 * (128 * 128 + 256)


def test_whoever_reads_a_view_keeps_its_parent() -> None:
    s = site(0, FFN, 16, 64, "nvfp4")
    only = CopyArm("parts", parts, roles=["+".join(FFN)])
    plan = load_plan([routed(s, only)])
    whole = copies.fused(members(s))
    assert names(plan) == [t.name for t in whole.tensors.values()]
    assert [x.derived for x in plan.steps if isinstance(x, Build)] == [whole]
    both = load_plan([routed(s, only, CopyArm("fused", lambda p, c: [whole], roles=["+".join(FFN)], served=rows(1)))])
    assert (both.ledger(), both.peak) == (plan.ledger(), plan.peak)


def test_builds_come_before_frees_and_all_of_a_layer_before_the_next() -> None:
    ctx = context(rows(1, 64), orders=[(BATCH, ["mmq"]), (rows(1, 16), ["lanes"])])
    sites = [site(i, ("ffn.down",), 16, 128, "nvfp4") for i in (1, 0)]
    plan = load_plan([resolve(s, ctx, catalog()) for s in sites])
    steps = [s for s in plan.steps if isinstance(s, Build | Free)]
    owners = [s.owner if isinstance(s, Build) else s.buffer for s in steps]
    one = ["layers.{0}.ffn.down"] * 2 + [f"layers.{{0}}.ffn.down.{f}" for f in ("weight", "scale", "global_scale")]
    assert owners == [o.format(i) for i in (0, 1) for o in one]
    assert len([s for s in plan.steps if isinstance(s, Upload)]) == 6, "two copies of a weight, one upload"


def test_a_source_that_only_the_host_needs_never_reaches_the_device() -> None:
    plan = load_plan([routed(site(0, ("ffn.up",), 4, 256, "nvfp4"), arm("q4k"), orders=[(rows_from(17), ["q4k"])])])
    staged = load_plan(
        [resolve(site(0, ("ffn.up",), 4, 256, "nvfp4"), context(rows(32), orders=[(BATCH, ["q4k"])]), catalog())]
    )
    assert not [s for s in staged.steps if isinstance(s, Upload)]
    assert staged.peak == staged.steady == round_up(4 * 144)
    assert len(staged.pruned) == 3
    assert [r.label for r in plan.ledger()] == ["checkpoint nvfp4", "derived q4_k,through=bf16"]


def test_projections_with_different_tensor_scales_are_fused_with_one_a_segment() -> None:
    s = site(0, QKV, 16, 64, "nvfp4")
    files = Files(*s.projections)
    assert len({float(files.read(p.weight["global_scale"])) for p in s.projections}) == 3
    plan = load_plan([routed(s, arm("fused"))])
    device = open_device("interpreter")
    with execute(plan, files.read, lambda w, label: None, device, builds="device") as loaded:
        whole = copies.fused(s.projections)
        for p, (n, alpha) in zip(s.projections, copies.segments(s.projections, whole, "global_scale"), strict=True):
            found = device.download(loaded[alpha.name], "f32", (), alpha.offset)
            assert (n, found) == (16, files.read(p.weight["global_scale"]))


def test_views_into_one_stored_tensor_are_one_buffer() -> None:
    """A checkpoint, or a slice of one, may have two weights in one tensor: a buffer as long as the furthest reaches."""
    p = projection("attn.q", 32, 64, "bf16")
    t = p.weight["weight"]
    q, k = (
        replace(p, role=r, n=16, weight=replace(p.weight, fields=(("weight", t.view(at, (16, 64))),)))
        for r, at in (("attn.q", 0), ("attn.k", 16 * 64))
    )
    plan = load_plan([routed(Site((q, k)))])
    assert [(s.buffer, s.bytes) for s in plan.steps if isinstance(s, Alloc)] == [(t.name, 32 * 64 * 2)]
    files = Files(p)
    halves = {
        v.offset: files.read(t)[i * 16 : (i + 1) * 16] for i, v in enumerate((q.weight["weight"], k.weight["weight"]))
    }
    device = open_device("interpreter")
    with execute(plan, lambda v: halves[v.offset], lambda w, label: None, device) as loaded:
        assert device.download(loaded[t.name], "bf16", (32, 64)).tobytes() == files.read(t).tobytes()


def test_a_weight_that_two_layers_share_is_built_once_and_staged_again_where_another_copy_needs_it() -> None:
    first = site(0, ("ffn.up",), 16, 64, "nvfp4")
    second = Site((replace(first.projections[0], layer=1),))
    ctx = context(rows(32), orders=[(BATCH, ["mmq"])])
    same = load_plan([resolve(s, ctx, catalog()) for s in (first, second)])
    assert len([s for s in same.steps if isinstance(s, Build)]) == 1
    assert len([s for s in same.steps if isinstance(s, Upload)]) == 3
    other = context(rows(32), orders=[(BATCH, ["int8"])])
    both = load_plan([resolve(first, ctx, catalog()), resolve(second, other, catalog())])
    for kind, count in ((Build, 2), (Upload, 6), (Free, 6)):
        assert len([s for s in both.steps if isinstance(s, kind)]) == count


LAYERS, HIDDEN, INTER = 64, 5120, 17408
SHAPES = {"ffn.gate": (INTER, HIDDEN), "ffn.up": (INTER, HIDDEN), "ffn.down": (HIDDEN, INTER)}


def ffn_of_27b(*orders: tuple) -> LoadPlan:
    """64 layers' FFN in NVFP4, 26.5 M handles' worth of weights, prefill alone."""
    ctx = context(rows(512), orders=orders)
    sites = [
        Site(tuple(projection(r, *SHAPES[r], "nvfp4", layer) for r in roles))
        for layer in range(LAYERS)
        for roles in (FFN, ("ffn.down",))
    ]
    gate_up = [replace(o, pattern="ffn.gate") for o in ctx.preferences.orders[:1]]
    gate_up += [replace(o, pattern="ffn.up") for o in ctx.preferences.orders[:1]]
    down = [replace(o, pattern="ffn.down") for o in ctx.preferences.orders[-1:]]
    ctx = replace(ctx, preferences=replace(ctx.preferences, orders=(*gate_up, *down)))
    return load_plan([resolve(s, ctx, catalog()) for s in sites])


def test_q4_k_with_int8_down_is_not_memory_neutral() -> None:
    weights = LAYERS * HIDDEN * INTER  # of one role
    scales = LAYERS * 256  # one tensor scale a weight, in a buffer of its own
    flipped = ffn_of_27b((BATCH, ["flip"]))
    assert flipped.steady == 3 * (weights * 9 // 16 + scales)  # 0.5625 bytes a weight: 9.63 GB
    hybrid = ffn_of_27b((BATCH, ["q4k"]), (BATCH, ["int8"]))
    assert hybrid.steady == 2 * (weights * 9 // 16) + weights * 9 // 8  # Q4_K has 4.5 bits too, int8 twice as many
    more = hybrid.steady - flipped.steady
    assert more == weights * 9 // 16 - 3 * scales
    assert round(more / 1e9, 2) == 3.21
    neutral = ffn_of_27b((BATCH, ["q4k"]))
    assert neutral.steady - flipped.steady == -3 * scales
    mmq = ffn_of_27b((BATCH, ["mmq"]))
    assert mmq.steady == flipped.steady
    one = HIDDEN * INTER * 9 // 16 + 256
    assert flipped.peak == flipped.steady + one, "one weight at a time is there twice"
    assert hybrid.peak == hybrid.steady + one, "down alone is built on the device"
    assert {r.label: round(r.bytes / 1e9, 2) for r in hybrid.ledger()} == {
        "derived q4_k,through=bf16": 6.42,
        "derived int8_32": 6.42,
    }


def test_an_arm_that_says_no_builds_nothing_and_is_not_counted_as_spared() -> None:
    refuses = CopyArm("refuses", lambda p, c: [copies.int8_32(p)], lambda p: no("x", "never"))
    plan = load_plan([routed(site(0, ("ffn.up",), 16, 64, "bf16"), refuses)])
    assert not plan.not_built
    s = site(0, ("ffn.up",), 16, 64, "bf16")
    behind = CopyArm("behind", lambda p, c: [copies.int8_32(p)])
    ahead = load_plan([routed(s, CopyArm("first", bind), behind)])
    assert [(r.label, r.bytes, r.count) for r in ahead.not_built] == [("derived int8_32", 16 * 64 + 256, 2)]


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8", "bf16"])
def test_fusing_is_neutral_once_loaded(fmt: str) -> None:
    s = site(0, FFN, 256, 256, fmt)
    inplace, fused = load_plan([routed(s)]), load_plan([routed(s, arm("fused"))])
    spared = {"nvfp4": 256, "fp8": 256, "bf16": 0}[fmt]  # small scales share a buffer
    assert inplace.steady - fused.steady == spared
