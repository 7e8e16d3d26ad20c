"""The chip model: what makes a launch slower never makes it faster in the model, and its three limits are met."""

from __future__ import annotations

import dataclasses
from math import inf

import pytest
from core_fakes import A100, H200
from hypothesis import assume, given
from hypothesis import strategies as st

from atlas_lab.core.chip import LATENCY, LAUNCH, Work, clock, ranked, seconds
from atlas_lab.core.target import Figure, Target, shipped_targets
from atlas_lab.core.tuning import setting

works = st.builds(
    Work,
    bytes=st.integers(1 << 16, 1 << 30),
    blocks=st.integers(1, 20000),
    threads=st.integers(1, 32).map(lambda w: 32 * w),
    registers=st.integers(16, 255),
    in_flight=st.sampled_from([4, 16, 32, 64, 128, 256]),
    issue=st.floats(0, 2),
    shared=st.integers(0, 200_000),
)
FIXED = LAUNCH + LATENCY
WIDE = Work(bytes=50_000_000, blocks=132 * 8, threads=256, registers=32, in_flight=64, issue=0.01)


@given(works, st.sampled_from(["registers", "shared", "issue", "bytes"]), st.floats(1, 4))
def test_more_of_what_costs_is_never_faster(w: Work, name: str, by: float) -> None:
    value = getattr(w, name) * by
    more = dataclasses.replace(w, **{name: value if name == "issue" else int(value)})
    assert seconds(more, H200) >= seconds(w, H200) * (1 - 1e-12)


@given(works, st.floats(1, 4))
def test_more_in_flight_and_a_faster_card_are_never_slower(w: Work, by: float) -> None:
    limit = seconds(w, H200) * (1 + 1e-12)
    assert seconds(dataclasses.replace(w, in_flight=w.in_flight * by), H200) <= limit
    faster = dataclasses.replace(H200, read_rate=Figure(H200.read_rate.value * by, "test"))
    assert seconds(w, faster) <= limit
    assert seconds(w, dataclasses.replace(H200, threads_per_sm=4096, registers_per_sm=1 << 18)) <= limit


@given(works)
def test_it_is_never_below_the_floor(w: Work) -> None:
    assert seconds(w, H200) >= FIXED + H200.floor(w.bytes, 0, "")


@given(works)
def test_infinite_is_what_does_not_fit(w: Work) -> None:
    fits = w.threads * w.registers <= 50_000 and w.shared <= 200_000
    assume(not fits or seconds(w, H200) < inf)
    assert fits or seconds(w, H200) > 0


def test_bandwidth() -> None:
    assert seconds(WIDE, H200) == pytest.approx(FIXED + 50e6 / 4.26e12)
    few = dataclasses.replace(WIDE, blocks=33, threads=1024, in_flight=1024)
    assert seconds(few, H200) == pytest.approx(FIXED + 2 * 50e6 / 4.26e12)  # a quarter of the SMs at twice their share


def test_latency_is_littles_law_in_whole_waves() -> None:
    thin = dataclasses.replace(WIDE, in_flight=4)
    a_block = thin.bytes / thin.blocks
    assert seconds(thin, H200) == pytest.approx(FIXED + LATENCY * a_block / (256 * 4))  # all resident: 8 a SM
    over = dataclasses.replace(thin, blocks=thin.blocks + 1)
    assert seconds(over, H200) == pytest.approx(FIXED + 2 * LATENCY * over.bytes / over.blocks / (256 * 4))
    halved = dataclasses.replace(thin, registers=64)  # 4 a SM: as if as many bytes were half in flight
    assert seconds(halved, H200) - FIXED == pytest.approx(2 * (seconds(thin, H200) - FIXED))


def test_issue() -> None:
    busy = dataclasses.replace(WIDE, issue=1.0)
    assert seconds(busy, H200) == pytest.approx(FIXED + 50e6 / 132 / (4 * clock(H200)))


def test_clocks_are_those_of_the_cards() -> None:
    assert clock(H200) == pytest.approx(1.98e9, rel=0.01)
    assert clock(A100) == pytest.approx(1.41e9, rel=0.01)
    assert all(0.9e9 < clock(t) < 3e9 for t in shipped_targets())


def test_ranked() -> None:
    work = {
        1: dataclasses.replace(WIDE, in_flight=4),
        2: WIDE,
        3: dataclasses.replace(WIDE, shared=H200.shared_per_sm),
        4: dataclasses.replace(WIDE, in_flight=8),
        5: WIDE,
    }
    order = ranked([(setting(warps=i), w) for i, w in work.items()], H200)
    assert [dict(s)["warps"] for s in order] == [2, 5, 4, 1]


@pytest.mark.parametrize("target", shipped_targets(), ids=lambda t: t.name)
def test_every_target_has_what_the_model_needs(target: Target) -> None:
    assert FIXED < seconds(dataclasses.replace(WIDE, registers=40), target) < 1


def test_facts_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"^chip model: found blocks 0, expected more than 0"):
        dataclasses.replace(WIDE, blocks=0)
    with pytest.raises(ValueError, match=r"^chip model: found issue -1, shared 0, expected 0 or more"):
        dataclasses.replace(WIDE, issue=-1)
