"""Two and three projections of one x in one launch on warpgroups: segments that end inside tiles, a scale for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from atlas_lab import simt
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.mma.base import JOINED
from atlas_lab.arms.wgmma import tiles
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Operand
from atlas_lab.core.context import Pin, Preferences
from atlas_lab.core.launch import Program
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.projection import Site
from atlas_lab.core.residency import held_bytes, load_plan
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tuning import Choice, Table, setting
from atlas_lab.experiments import oracle, trial
from atlas_lab.experiments.case import Case, base_context, entry_of, verdict_of
from atlas_lab.experiments.tune_weights import site_of
from atlas_lab.formats import get
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.gemv.mma_lanes import RUN
from atlas_lab.kernels.quantize.lanes_order import order_for_lanes
from atlas_lab.runtime import load
from atlas_lab.runtime.device import Device, open_device

ARMS = {a.name: a for a in atlas_arms()}
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
FORMS = {"bf16_wgmma_joined": "bf16", "nvfp4_wgmma_joined": "nvfp4"}
FFN, QKV, GDN = (tuple(group.split("+")) for group in JOINED)
BOTH = pytest.mark.parametrize("name", FORMS)
FULL = pytest.mark.full
TIMES = (1, 23, 0.3)  # how large weights are, so that tensor scales differ


@dataclass(frozen=True)
class Ran:
    arm: Arm
    call: Call
    program: Program
    out: np.ndarray
    ref: oracle.Reference

    @property
    def ok(self) -> bool:
        return self.compared.ok

    @property
    def compared(self) -> oracle.Comparison:
        return oracle.compare(self.out, self.ref, self.arm.tolerance, self.call.k)


def ran(
    name: str, roles: Sequence[str], ns: Sequence[int], m: int, k: int, device: Device, form: str = "", columns: int = 0
) -> Ran:
    """An arm on projections of `ns` rows, whose values depend on their place among `roles` alone."""
    arm, stored = ARMS[name], get(form or FORMS[name])
    site, arrays = site_of("w", roles, stored, ns, k), {}
    for p in site.projections:
        place = next(group.index(p.role) for group in (FFN, QKV, GDN) if p.role in group)
        rng = np.random.default_rng([place, p.n, k])
        w = (rng.standard_normal((p.n, k)) * TIMES[place]).astype(ml_dtypes.bfloat16)
        made = stored.quantize(w.astype(np.float32))
        arrays |= {t.name: np.asarray(made[f]).reshape(t.shape) for f, t in p.weight.fields}
    table = Table.of([Choice(name, sum(ns), k, setting(columns=columns))] if columns else [])
    pins = Preferences(tuple(Pin(role, name) for role in roles))
    ctx = replace(base_context(device.target), rows=(Rows(m, m),), preferences=pins, table=table)
    route = resolve(site, ctx, [entry_of(arm)])
    (a,) = route.assignments
    call = projection_call(site.projections, a, m, ctx)
    program = program_of(arm, call)
    x = np.random.default_rng(k).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    host = oracle.declared(a.declarations, lambda t: arrays[t.name])
    with load.execute(load_plan([route]), lambda t: arrays[t.name], lambda w, label: None, device) as loaded:
        out = trial.run_program(program, call, loaded, device, {call.x.data.name: x}, host)
    ref = oracle.reference(arm, call, a.declarations, host, x.astype(np.float64))[0]
    return Ran(arm, call, program, out, ref)


def tile_of(r: Ran) -> tuple[int, int]:
    """Rows of x and of W of a tile."""
    parameters = dict(r.program.launches[-1].kernel.spec.parameters)
    return parameters["bm"], parameters["bn"]


ROWS = [
    (FFN, (8, 8), 17, 128),  # a tile for each
    (QKV, (130, 5, 9), 20, 128),  # none begins at a multiple of 8
    (GDN, (16, 20), 35, 128),  # y's rows are no multiple of 8 apart
    (FFN, (136, 136), 65, 256),  # each ends inside its second tile
    (QKV, (256, 128, 128), 66, 128),  # all end where tiles do
    (FFN, (77, 77), 33, 128),
    (QKV, (264, 8, 136), 40, 256),
    (GDN, (200, 24), 129, 128),
    (GDN, (7, 260), 67, 128),
]


@pytest.mark.parametrize(
    ("name", "roles", "ns", "m", "k"),
    [
        pytest.param(name, *r, marks=() if i < (5 if name == "bf16_wgmma_joined" else 3) else FULL)
        for name in FORMS
        for i, r in enumerate(ROWS)
    ],
)
def test_projections_of_any_rows(name: str, roles, ns, m: int, k: int, device) -> None:
    result = ran(name, roles, ns, m, k, device)
    assert result.ok, str(result.compared)


@pytest.mark.parametrize(
    ("m", "ns"),
    [
        (64, (136, 24, 8)),
        *(pytest.param(*p, marks=FULL) for p in ((64, (296, 24, 136)), (33, (77, 270, 3)), (67, (136, 3, 24)))),
    ],
)
@BOTH
def test_a_card_of_two_blocks(name: str, m: int, ns) -> None:
    """Each block takes tiles of several projections one after the other, its ring goes around."""
    with open_device("interpreter", replace(HOPPER, sms=2)) as device:
        result = ran(name, QKV, ns, m, 384, device)
    assert result.ok, str(result.compared)


TILES = [
    pytest.param(name, m, t, marks=FULL if t.bm > 128 or t.bn > 136 else ())
    for name in FORMS
    for few, more in [ARMS[name].tiles()]
    for m, t in (*((t.bm - 3, t) for t in few), *((67, t) for t in more))
]


@pytest.mark.parametrize(("name", "m", "t"), TILES, ids=str)
def test_every_tile(name: str, m: int, t: Tile, monkeypatch) -> None:
    monkeypatch.setattr(ARMS[name], "tile", lambda c: t)
    with open_device("interpreter", replace(HOPPER, sms=3)) as device:
        result = ran(name, GDN, (t.bn + 8, 24), m, 256, device)
    assert tile_of(result) == (t.bm, t.bn)
    assert result.ok, str(result.compared)


@pytest.mark.parametrize(("roles", "ns"), [(GDN, (72, 72)), pytest.param(QKV, (72, 8, 200), marks=FULL)])
def test_blocks_of_a_cluster_take_tiles_of_one_projection(roles, ns, monkeypatch) -> None:
    """Where it has columns for one of them alone, the other stores nothing."""
    arm, tile = ARMS["bf16_wgmma_joined"], Tile(128, 64, 2)
    monkeypatch.setattr(arm, "tile", lambda c: tile)
    monkeypatch.setattr(arm, "kernels", (clear_flags, arm.kernel(tile)))
    with open_device("interpreter", replace(HOPPER, sms=2)) as device:
        result = ran(arm.name, roles, ns, 131, 128, device)
    assert result.program.launches[-1].cluster == (2, 1, 1)
    assert result.ok, str(result.compared)


@pytest.mark.parametrize("form", ["nvfp4", "nvfp4_ct"])
def test_each_projection_has_its_own_tensor_scale(form: str, device, monkeypatch) -> None:
    name = "nvfp4_wgmma_joined"
    assert ran(name, QKV, (40, 24, 8), 17, 128, device, form).ok
    lower = ARMS[name].lower

    def exchanged(c: Call) -> list:
        *first, last = lower(c)
        args = list(last.args)
        args[4], args[5] = args[5], args[4]
        return [*first, replace(last, args=tuple(args))]

    monkeypatch.setattr(ARMS[name], "lower", exchanged)
    assert not ran(name, QKV, (40, 24, 8), 17, 128, device, form).ok


SHARES = [
    (QKV, (72, 64, 8), 3, 3),  # four tiles, two of one projection
    (FFN, (64, 64), 12, 3),  # the middle share lies on both projections
    (QKV, (130, 5, 70), 5, 4),
    (GDN, (200, 24), 5, 2),  # whole tiles after the shares
]


@pytest.mark.parametrize(
    ("name", "roles", "ns", "steps", "blocks"),
    [
        pytest.param(name, *s, marks=() if s == SHARES[0] or (name == "bf16_wgmma_joined" and s == SHARES[3]) else FULL)
        for name in FORMS
        for s in SHARES
    ],
)
def test_tiles_that_are_cut(name: str, roles, ns, steps: int, blocks: int, monkeypatch) -> None:
    monkeypatch.setattr(Tile, "cut", lambda *a: True)
    monkeypatch.setattr(tiles, "LEAST", 4)
    k = steps * (64 if name == "bf16_wgmma_joined" else 128)
    with open_device("interpreter", replace(HOPPER, sms=blocks)) as device:
        result = ran(name, roles, ns, 33, k, device)
    first, last = result.program.launches
    assert first.kernel is (clear_flags if name == "bf16_wgmma_joined" else order_for_lanes(RUN))
    assert int(last.args[-(6 if name == "bf16_wgmma_joined" else 7)]) == 1
    assert result.ok, str(result.compared)


@pytest.mark.parametrize(
    ("m", "ns"), [(20, (130, 5, 9)), *(pytest.param(*p, marks=FULL) for p in ((40, (72, 8, 136)), (67, (130, 5, 9))))]
)
@BOTH
def test_whole_tiles_have_the_bits_of_projections_alone(name: str, m: int, ns, device, monkeypatch) -> None:
    monkeypatch.setattr(Tile, "cut", lambda *a: False)
    together = ran(name, QKV, ns, m, 128, device).out
    alone = [
        ran(name.removesuffix("_joined"), (role,), (n,), m, 128, device, FORMS[name]).out
        for role, n in zip(QKV, ns, strict=True)
    ]
    assert oracle.same_bits(together, np.concatenate(alone, axis=1))


def test_a_store_that_runs_into_the_next_projection_is_reported(monkeypatch) -> None:
    """As it does where the first has more columns than its part of y."""
    arm, borders = ARMS["bf16_wgmma_joined"], ARMS["bf16_wgmma_joined"].borders

    def spoiled(c: Call, t: Tile) -> tuple[int, ...]:
        one, two, columns, first, second = borders(c, t)
        return one, two, columns, first + 8, second

    monkeypatch.setattr(arm, "borders", spoiled)
    with open_device("interpreter", HOPPER) as device, pytest.raises(simt.SimtError, match="y"):
        ran(arm.name, FFN, (40, 40), 17, 128, device)


def test_a_border_inside_a_tile_is_found(monkeypatch) -> None:
    """A walk that lets the second projection begin where the first ends takes rows of one weight for the other's."""
    arm, borders = ARMS["bf16_wgmma_joined"], ARMS["bf16_wgmma_joined"].borders
    monkeypatch.setattr(arm, "borders", lambda c, t: (c.counts[0] + 8, *borders(c, t)[1:]))
    with open_device("interpreter", HOPPER) as device:
        assert not ran(arm.name, FFN, (136, 136), 17, 128, device).ok


def test_x_is_put_into_order_once() -> None:
    with open_device("interpreter", HOPPER) as device:
        result = ran("nvfp4_wgmma_joined", QKV, (40, 24, 8), 17, 128, device)
    assert [x.kernel is order_for_lanes(RUN) for x in result.program.launches] == [True, False]


def test_the_tile_is_the_one_that_was_chosen() -> None:
    name = "bf16_wgmma_joined"
    with open_device("interpreter", HOPPER) as device:
        assert tile_of(ran(name, FFN, (36, 36), 17, 128, device, columns=256)) == (64, 256)
        with pytest.raises(ValueError, match="columns=64, expected one of the arm's"):
            ran(name, FFN, (36, 36), 17, 128, device, columns=64)


def test_projections_are_counted_from_tiles_of_their_own() -> None:
    assert Tile(64, 128).begins((100, 5, 300)) == (0, 128, 256, 556)
    assert Tile(64, 128).begins((300,)) == (0, 300)


def call_of(name: str, roles: Sequence[str], ns: Sequence[int], m: int, k: int) -> Call:
    """A call of a model's size, with its scratch."""
    arm, site = ARMS[name], site_of("w", roles, get(FORMS[name]), ns, k)
    pins = Preferences(tuple(Pin(role, name) for role in roles))
    ctx = replace(base_context(HOPPER), rows=(Rows(m, m),), preferences=pins)
    (a,) = resolve(site, ctx, [entry_of(arm)]).assignments
    call = projection_call(site.projections, a, m, ctx)
    return replace(call, x=Operand(Tensor("bf16", (m, k), "x")), scratch=arm.scratch(call))


def test_tiles_are_chosen_for_all_projections_together() -> None:
    """q, k and v of a 27B model fill the card as one, as k and v alone would not."""
    name = "bf16_wgmma_joined"
    call = call_of(name, QKV, (12288, 1024, 1024), 512, 5120)
    (*_, product) = ARMS[name].lower(call)
    assert product.grid[0] > 120
    assert product.flops == 2 * 512 * 14336 * 5120
    assert product.args[-5:] == (12288, 13312, 14336, 12288, 13312)


def test_they_read_the_copies_that_decode_and_single_projections_read() -> None:
    base, site = base_context(HOPPER), site_of("w", QKV, get("nvfp4"), (64, 32, 32), 128)
    joined, decodes = (ARMS[n].finalize(site, base) for n in ("nvfp4_wgmma_joined", "nvfp4_mma_repacked_joined"))
    assert [(d.key, d.identity) for d in joined] == [(d.key, d.identity) for d in decodes]
    alone = [d for p in site.projections for d in ARMS["nvfp4_wgmma"].finalize(p, base)]
    assert held_bytes((*joined, *alone)) == held_bytes(tuple(alone))


@BOTH
def test_nothing_but_an_order_or_a_pin_chooses_them(name: str) -> None:
    site = site_of("w", QKV, get(FORMS[name]), (40, 24, 8), 128)
    ctx = replace(base_context(HOPPER), rows=(Rows(17, 300),))
    entries = [entry_of(a) for a in ARMS.values()]
    assert name not in {a.arm for a in resolve(site, ctx, entries).assignments}
    named = replace(ctx, preferences=Preferences(tuple(Pin(role, name) for role in QKV)))
    assert [(a.arm, a.roles) for a in resolve(site, named, entries).assignments] == [(name, QKV)]


def test_what_cannot_be_joined_is_refused() -> None:
    base = base_context(HOPPER)
    wrong = Case("bf16_wgmma_joined", FFN, 17, 8, 36, "bf16")
    assert "K must be a multiple of 8" in str(verdict_of(wrong, ARMS[wrong.arm], base))
    wrong = Case("nvfp4_wgmma_joined", FFN, 17, 8, 192, "nvfp4")
    assert "K must be a multiple of 128" in str(verdict_of(wrong, ARMS[wrong.arm], base))
    gate, up = site_of("w", FFN, get("nvfp4"), (8, 8), 128).projections
    (other,) = site_of("w", ("ffn.up",), get("nvfp4_ct"), (8,), 128).projections
    arm = ARMS["nvfp4_wgmma_joined"]
    assert arm.eligible(Site((gate, up)), base)
    assert "its weights differ in kind" in str(arm.eligible(Site((gate, other)), base))
