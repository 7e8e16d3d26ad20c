"""Levers: precedence, origins, spellings, unknown names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.core.levers import CHOICES, NAMES, ORIGINS, LeverError, Levers, others, resolve_levers

SOURCES = {"target": "target", "yaml": "yaml", "environment": "environment", "sets": "--set", "variant": "variant"}
SPELLED = {True: "on", False: "off"}
VALUES = st.fixed_dictionaries({}, optional={n: st.sampled_from(CHOICES.get(n, (False, True))) for n in NAMES})


@given(st.dictionaries(st.sampled_from(list(SOURCES)), VALUES))
def test_the_last_source_that_sets_a_lever_wins_and_is_its_origin(given: dict[str, dict[str, Any]]) -> None:
    spelled: dict[str, Any] = dict(given)
    if "sets" in spelled:
        spelled["sets"] = {name: v if name in CHOICES else str(int(v)) for name, v in spelled["sets"].items()}
    if "environment" in spelled:
        values = spelled["environment"]
        spelled["environment"] = {f"ATLAS_LAB_{n.upper()}": SPELLED.get(v, v) for n, v in values.items()}
        spelled["environment"] |= {"PATH": "/bin", "ATLAS_LAB_CACHE": "/tmp/x"}
    levers = resolve_levers(**spelled)
    for name in NAMES:
        value, origin = getattr(Levers(), name), "default"
        for source, said in SOURCES.items():
            if name in given.get(source, {}):
                value, origin = given[source][name], said
        assert (getattr(levers, name), levers.origin(name)) == (value, origin)
        assert origin in ORIGINS


@pytest.mark.parametrize("text", ["0", "false", "off", "False", " OFF ", False, 0])
def test_off(text: Any) -> None:
    assert resolve_levers(yaml={"graph": text}).graph is False


@pytest.mark.parametrize("text", ["1", "true", "on", "True", True, 1])
def test_on(text: Any) -> None:
    assert resolve_levers(target={"graph": False}, variant={"graph": text}).graph is True


@pytest.mark.parametrize("text", ["", "no", "2", "offf", None, 1.5, [], "none"])
def test_other_spellings_are_errors(text: Any) -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(yaml={"graph": text})
    assert str(e.value) == f"lever graph: found {text!r}, expected 0, false, off, 1, true or on"


@pytest.mark.parametrize("text", ["launch", " Launch ", "LAUNCH"])
def test_a_choice(text: str) -> None:
    assert resolve_levers(yaml={"gated": text}).gated == "launch"
    assert resolve_levers(environment={"ATLAS_LAB_GATED": text}).gated == "launch"


@pytest.mark.parametrize("text", ["", "launches", "on", True, None, 0])
def test_what_is_no_choice(text: Any) -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(sets={"gated": text})
    assert str(e.value) == f"lever gated: found {text!r}, expected epilogue, launch or input"


def test_the_other_values_of_a_lever() -> None:
    assert others("pdl", True) == (False,)
    assert others("gated", "launch") == ("epilogue", "input")


@pytest.mark.parametrize("source", ["target", "yaml", "sets", "variant"])
def test_an_unknown_name_is_an_error_with_the_nearest(source: str) -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(**{source: {"stream_weight": "1"}})
    assert str(e.value) == (
        "unknown lever 'stream_weight', expected one of stream_weights, graph, row_invariant, gated, pdl, lora, did "
        "you mean 'stream_weights'?"
    )


def test_an_unknown_name_in_the_environment_says_which_variable() -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(environment={"ATLAS_LAB_GRAF": "1", "GRAF": "1"})
    assert str(e.value).startswith("ATLAS_LAB_GRAF: unknown lever 'graf', expected one of stream_weights, graph, row")
    with pytest.raises(LeverError, match="ATLAS_LAB_GRAPH: lever graph: found 'yes', expected 0"):
        resolve_levers(environment={"ATLAS_LAB_GRAPH": "yes"})


def test_levers_that_came_from_elsewhere_are_equal_if_their_values_are() -> None:
    one, two = resolve_levers(yaml={"graph": 0}), resolve_levers(sets={"graph": "off"})
    assert one == two
    assert hash(one) == hash(two)
    values = {"stream_weights": False, "graph": False, "row_invariant": True, "gated": "epilogue", "pdl": True}
    values |= {"lora": True}
    assert dict(one.items()) == dict(two.items()) == values
