"""Levers: precedence, origins, spellings, unknown names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.core.levers import NAMES, ORIGINS, LeverError, Levers, resolve_levers

SOURCES = {"target": "target", "yaml": "yaml", "environment": "environment", "sets": "--set", "variant": "variant"}


@given(st.dictionaries(st.sampled_from(list(SOURCES)), st.dictionaries(st.sampled_from(NAMES), st.booleans())))
def test_the_last_source_that_sets_a_lever_wins_and_is_its_origin(given: dict[str, dict[str, bool]]) -> None:
    spelled: dict[str, Any] = dict(given)
    if "sets" in spelled:
        spelled["sets"] = {name: str(int(v)) for name, v in spelled["sets"].items()}
    if "environment" in spelled:
        values = spelled["environment"]
        spelled["environment"] = {f"ATLAS_LAB_{n.upper()}": "on" if v else "off" for n, v in values.items()}
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


@pytest.mark.parametrize("source", ["target", "yaml", "sets", "variant"])
def test_an_unknown_name_is_an_error_with_the_nearest(source: str) -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(**{source: {"stream_weight": "1"}})
    assert str(e.value) == (
        "unknown lever 'stream_weight', expected one of stream_weights, graph, did you mean 'stream_weights'?"
    )


def test_an_unknown_name_in_the_environment_says_which_variable() -> None:
    with pytest.raises(LeverError) as e:
        resolve_levers(environment={"ATLAS_LAB_GRAF": "1", "GRAF": "1"})
    assert str(e.value).startswith("ATLAS_LAB_GRAF: unknown lever 'graf', expected one of stream_weights, graph, did")
    with pytest.raises(LeverError, match="ATLAS_LAB_GRAPH: lever graph: found 'yes', expected 0"):
        resolve_levers(environment={"ATLAS_LAB_GRAPH": "yes"})


def test_levers_that_came_from_elsewhere_are_equal_if_their_values_are() -> None:
    one, two = resolve_levers(yaml={"graph": 0}), resolve_levers(sets={"graph": "off"})
    assert one == two
    assert hash(one) == hash(two)
    assert one.items() == two.items() == (("stream_weights", False), ("graph", False))
