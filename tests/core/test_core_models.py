"""`resolve_all`: what `resolve` says of each site, with every arm asked about every site, in little time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from core_fakes import Fake, catalog, context, site

from atlas_lab.core.context import Context, Order, Pin
from atlas_lab.core.resolve import resolve, resolve_all
from atlas_lab.core.route import Gap, GapError
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.verdict import Verdict, no, yes


def only_layer_2(p: Any, c: Context) -> Verdict:
    return yes() if p.layer == 2 else no("layer", "serves layer 2", found=p.layer, allowed=2)


SITES = [
    site(*roles, layer=layer, fmt="nvfp4" if layer == 3 else "bf16")
    for layer in range(5)
    for roles in (("ffn.gate", "ffn.up"), ("ffn.down",))
]


def test_all_sites_at_once_are_as_each_alone() -> None:
    asked: list[tuple[int, str]] = []

    def even(p: Any, c: Context) -> Verdict:
        asked.append((p.layer, p.role))
        return yes() if p.layer % 2 == 0 else no("odd", "serves even layers", found=p.layer)

    arms = catalog(
        Fake("even", rows=rows(1), verdict=even),
        Fake("second", verdict=only_layer_2),
        Fake("pair", ["ffn.gate+ffn.up"], rows(4, 8)),
        Fake("any"),
        Fake("nvfp4", source="nvfp4"),
    )
    ctx = context(
        pins=[Pin("ffn.down", "any", layer=1, rows=rows(2, 3))],
        orders=[Order("ffn.*", rows_from(17), ("second", "any"), "base")],
    )
    routes = resolve_all(SITES, ctx, arms)
    # no answer of one layer stands for another's: an arm may look at names and layers
    assert asked == [(s.layer, r) for s in SITES for r in s.roles if s.layer != 3]
    assert routes == tuple(resolve(s, ctx, arms) for s in SITES)
    assert len({tuple((a.arm, a.rows) for a in r.assignments) for r in routes}) > 4


def test_gaps_are_collected_or_raised_with_the_rest_of_the_route() -> None:
    arms = catalog(Fake("decode", rows=rows(1)), Fake("prefill", rows=rows_from(17), verdict=only_layer_2))
    gaps: list[Gap] = []
    routes = resolve_all(SITES[2:6], context(), arms, gaps=gaps)
    assert [(g.layer, g.role, str(g.rows)) for g in gaps] == [
        (1, "ffn.gate", "2 to 16384"),
        (1, "ffn.up", "2 to 16384"),
        (1, "ffn.down", "2 to 16384"),
        (2, "ffn.gate", "2 to 16"),
        (2, "ffn.up", "2 to 16"),
        (2, "ffn.down", "2 to 16"),
    ]
    assert [[str(a.rows) for a in r.of("ffn.down")] for r in routes] == [[], ["1"], [], ["1", "17 to 16384"]]
    with pytest.raises(GapError) as e:
        resolve_all(SITES[4:], context(), arms)
    assert str(e.value) == (
        "layers.2.ffn.gate: no arm serves M 2 to 16 of its bf16 weight (decode: serves M 1; prefill: serves M 17+)"
    )
    assert e.value.route == routes[2]
    assert [g.role for g in e.value.gaps] == ["ffn.gate", "ffn.up"]


def test_many_arms_over_many_sites_in_little_time() -> None:
    """Seventy arms over 64 layers; a loop over arms inside one over offers took ten times the bar."""
    tiers = [rows(1), rows(2), rows(3), rows(4, 8), rows(5, 16), rows(1, 64), rows_from(1), rows_from(17)]
    arms = catalog(*(Fake(f"arm{i}", rows=tiers[i % len(tiers)]) for i in range(70)))
    names = tuple(f"arm{i}" for i in range(40))
    orders = [Order(r, tier, names, "base") for r in ("ffn.*", "attn.*", "gdn.*") for tier in (rows(1), rows_from(2))]
    groups = (("gdn.qkv", "gdn.z", "gdn.b", "gdn.a"), ("gdn.out",), ("ffn.gate", "ffn.up"), ("ffn.down",))
    sites = [site(*roles, layer=layer) for layer in range(64) for roles in groups]
    started = time.process_time()
    routes = resolve_all(sites, context(orders=orders), arms)
    assert time.process_time() - started < 1.0
    assert len(routes) == 256
