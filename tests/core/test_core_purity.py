"""`resolve` is a function of its arguments, and its answer is frozen to the bottom."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import os
import socket
import subprocess
from typing import Any

import numpy as np
import pytest
from core_fakes import DIMS, H200, Fake, catalog, context, site

from atlas_lab.core.context import Context, Order, Pin
from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.levers import Levers
from atlas_lab.core.projection import Site
from atlas_lab.core.resolve import Entry, resolve
from atlas_lab.core.route import Route
from atlas_lab.core.rows import rows
from atlas_lab.core.target import parse_target
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tuning import Choice, Table, setting


def derives(parameters: dict[str, Any]) -> Any:
    def finalize(p: Any, c: Context) -> list[Derived]:
        return [
            Derived(
                "copy",
                source=p.weight,
                build=lambda w: {"a": w, "b": w},
                dequantize=lambda t: t["a"].astype(np.float64),
                parameters=parameters,
                a=Tensor("f32", (p.n, p.k)),
                b=Tensor("f32", (p.n, p.k)),
            )
        ]

    return finalize


def world(flip: bool = False) -> tuple[Site, Context, list[Entry]]:
    """The same question, asked with every dict the other way round when `flip`."""
    items = {"tile": 64, "stages": 3}
    values = {"graph": False, "stream_weights": "off"}
    if flip:
        items, values = dict(reversed(items.items())), dict(reversed(values.items()))
    arms = catalog(
        Fake("derived", ["ffn.*"], rows(1), finalize=derives(items)),
        Fake("pair", ["ffn.gate+ffn.up"], rows(2, 16)),
        Fake("any"),
    )
    ctx = context(
        rows(1, 64),
        pins=[Pin("ffn.down", "any")],
        orders=[Order("ffn.*", rows(1), ("derived",), "base")],
        levers=Levers().with_values(values, "yaml"),
        table=Table.of([Choice("any", 32, 64, setting(warps=4))]),
    )
    return site("ffn.gate", "ffn.up", "ffn.down"), ctx, arms


def test_the_same_question_has_the_same_answer_and_hash() -> None:
    one, two = resolve(*world()), resolve(*world())
    assert one == two
    assert hash(one) == hash(two)
    assert one.hash == two.hash
    flipped = resolve(*world(flip=True))
    assert (flipped, flipped.hash) == (one, one.hash)


def test_what_the_hash_covers() -> None:
    s, ctx, arms = world()
    base = resolve(s, ctx, arms).hash
    newer = world()[2]
    newer[2].arm.version = "2"
    other_levers = dataclasses.replace(ctx, levers=Levers())
    slower = dataclasses.replace(ctx, target=dataclasses.replace(H200, sms=100))
    wider = site("ffn.gate", "ffn.up", "ffn.down", n=64)
    changed = {
        "versions": resolve(s, ctx, newer),
        "levers": resolve(s, other_levers, arms),
        "target": resolve(s, slower, arms),
        "tuned table": resolve(s, dataclasses.replace(ctx, table=Table()), arms),
        "declarations": resolve(wider, ctx, arms),
        "arms": resolve(s, dataclasses.replace(ctx, preferences=type(ctx.preferences)()), arms),
        "rows": resolve(s, dataclasses.replace(ctx, rows=(rows(1, 32),)), arms),
    }
    hashes = {what: route.hash for what, route in changed.items()}
    assert len({base, *hashes.values()}) == 1 + len(changed), hashes


def test_the_hash_tells_stored_formats_apart() -> None:
    direct, reciprocal = (
        resolve(site("ffn.up", fmt=f), context(rows(1)), catalog(Fake("any", source="nvfp4")))
        for f in ("nvfp4", "nvfp4_ct")
    )
    assert direct.hash != reciprocal.hash
    block, row = (
        resolve(
            site("ffn.up", n=1, k=64, fmt=f),
            context(rows(1)),
            catalog(Fake("any", source="fp8", finalize=derives({}))),
        )
        for f in ("fp8", "fp8_row")
    )
    assert block.site["ffn.up"].weight["scale"] == row.site["ffn.up"].weight["scale"]
    assert block.hash != row.hash


def test_a_route_serialises() -> None:
    route = resolve(*world())
    assert json.loads(json.dumps(route.to_json())) == route.to_json()
    assert route.to_json()["assignments"][0]["rows"] == [1, 1]


def test_it_does_no_input_and_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    question = world()

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("resolve did I/O")

    for module, name in (
        (builtins, "open"),
        (builtins, "print"),
        (io, "open"),
        (os, "open"),
        (os, "stat"),
        (os, "listdir"),
        (socket, "socket"),
        (subprocess, "Popen"),
    ):
        monkeypatch.setattr(module, name, forbidden)
    route = resolve(*question)
    digest = route.hash
    monkeypatch.undo()
    assert digest == resolve(*world()).hash


def frozen(value: Any, seen: set[int]) -> None:
    """Every dataclass reachable is frozen, every container a tuple."""
    if id(value) in seen or callable(value):
        return
    seen.add(id(value))
    assert not isinstance(value, list | dict | set | bytearray | np.ndarray), value
    if dataclasses.is_dataclass(value):
        assert value.__dataclass_params__.frozen, type(value)  # type: ignore[attr-defined]
        for f in dataclasses.fields(value):
            frozen(getattr(value, f.name), seen)
    elif isinstance(value, tuple):
        for v in value:
            frozen(v, seen)


@pytest.mark.parametrize("part", ["route", "context", "site"])
def test_everything_is_frozen_to_the_bottom(part: str) -> None:
    s, ctx, arms = world()
    frozen({"route": resolve(s, ctx, arms), "context": ctx, "site": s}[part], set())


def test_a_target_with_levers_is_frozen_too() -> None:
    entry = {
        **dict.fromkeys(("sms", "shared_per_block", "shared_per_sm", "threads_per_sm", "registers_per_sm", "l2"), 1),
        "title": "t", "arch": "sm_90a", "capability": [9, 0], "rates": {"fma": {"value": 1, "source": "s"}},
        "memory": {"value": 1, "source": "s"}, "read_rate": {"value": 1, "source": "s"}, "levers": {"graph": False},
    }  # fmt: skip
    target = parse_target("mine", entry)
    frozen(target, set())
    assert hash(Context(target, DIMS))


def test_declarations_are_listed_once_in_order_of_need() -> None:
    route: Route = resolve(*world())
    keys = [(type(d).__name__, d.key) for d in route.declarations]
    assert keys == [
        ("Derived", "copy"), ("Bind", "ffn.gate"), ("Bind", "ffn.up"), ("Derived", "copy"), ("Bind", "ffn.down"),
    ]  # fmt: skip
    assert isinstance(route.declarations[1], Bind)
