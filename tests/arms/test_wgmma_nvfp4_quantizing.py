"""What the arms on warpgroups have in common that quantize x and read the NVFP4 copy that decode reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import oracle
from atlas_lab.experiments.case import Case, base_context, entry_of, site_of, verdict_of
from atlas_lab.experiments.parity import run, run_case
from atlas_lab.runtime.interpreter import InterpreterDevice
from atlas_lab.simt import Options

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
EACH = pytest.mark.parametrize("name", ["nvfp4_wgmma_fp8", "nvfp4_wgmma_w4a8", "nvfp4_wgmma_int8"])


def case_of(name: str, m: int, n: int, k: int, form: str = "nvfp4") -> Case:
    return Case(name, ("ffn.up",), m, n, k, form)


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "m", "n", "k"),
    [
        *(("nvfp4", 17, 8, 128), ("nvfp4", 33, 96, 256), ("nvfp4", 129, 24, 128), ("nvfp4", 17, 136, 384)),
        *(("nvfp4", 129, 136, 128), ("nvfp4", 17, 136, 1408)),
        *(("nvfp4_ct", 64, 5, 128), ("nvfp4_ct", 65, 77, 256), ("nvfp4_ct", 17, 136, 128)),
    ],
)
@EACH
def test_awkward_shapes(name: str, form: str, m: int, n: int, k: int, device) -> None:
    result = run_case(case_of(name, m, n, k, form), ARMS[name], device, base_context(device.target))
    assert result.ok, result.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("m", [29, 61, 333, 1100])
@EACH
def test_every_tile_on_a_card(name: str, m: int, device, monkeypatch) -> None:
    """Rings that go around and blocks that take several tiles; all whole tiles give the same bits."""
    if device.name != "cuda":
        pytest.skip("the interpreter's cases are smaller")
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    arm, case = ARMS[name], case_of(name, m, 5000, 4224)
    few, more = arm.tiles()
    base, outputs = base_context(device.target), []
    for t in more if m > 64 else [t for t in few if m <= t.bm]:
        monkeypatch.setattr(arm, "tile", lambda c, t=t: t)
        result = run_case(case, arm, device, base)
        assert result.ok, f"{t}: {result.sentence}"
        outputs.append(run(case, arm, device, base).out)
    assert all(oracle.same_bits(outputs[0], out) for out in outputs)


@pytest.mark.full
@EACH
def test_bits_of_whole_tiles_depend_on_no_tile_no_rows_and_no_order(name: str) -> None:
    outputs = []
    for target, options, seed in (
        (HOPPER, Options(), 0),
        (HOPPER, Options(order="random", late_async="random"), 1),
        (replace(HOPPER, sms=2), Options(order="random", late_async="random"), 2),
    ):
        device = InterpreterDevice(target, seed=seed, options=options)
        for m in ((20, 33, 67), (67,), (33,))[seed]:
            outputs.append(run(case_of(name, m, 72, 128), ARMS[name], device, base_context(target)).out[:20])
    first, *rest = outputs
    assert all(oracle.same_bits(first, out) for out in rest)


@EACH
def test_they_read_the_copy_that_decode_reads(name: str) -> None:
    """Copies of one identity are one buffer, built once and charged once."""
    base = base_context(HOPPER)
    (p,) = site_of(case_of(name, 17, 40, 256)).projections
    (mine,), (decodes,) = (ARMS[arm].finalize(p, base) for arm in (name, "nvfp4_mma_repacked"))
    assert (mine.key, mine.identity) == (decodes.key, decodes.identity)


@EACH
def test_nothing_but_an_order_or_a_pin_chooses_them(name: str) -> None:
    ctx = replace(base_context(HOPPER), rows=(Rows(17, 300),))
    site, entries = site_of(case_of(name, 17, 40, 256)), [entry_of(a) for a in ARMS.values()]
    assert name not in {a.arm for a in resolve(site, ctx, entries).assignments}
    named = replace(ctx, preferences=Preferences((Pin("ffn.up", name),)))
    assert [a.arm for a in resolve(site, named, entries).assignments] == [name]


@EACH
def test_weights_that_are_not_whole_units_and_other_cards_are_refused(name: str) -> None:
    said = verdict_of(case_of(name, 17, 8, 192), ARMS[name], base_context(HOPPER))
    assert "K must be a multiple of 128" in str(said)
    elsewhere = base_context(next(t for t in shipped_targets() if t.arch != "sm_90a"))
    assert not verdict_of(case_of(name, 17, 8, 128), ARMS[name], elsewhere)
