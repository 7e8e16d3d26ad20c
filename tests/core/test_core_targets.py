"""The shipped targets: complete, sourced, and a floor that no kernel beats."""

from __future__ import annotations

import pytest

from atlas_lab.core.context import Context
from atlas_lab.core.target import Figure, Target, parse_target, shipped_targets
from atlas_lab.kernels.lang import Needs

from core_fakes import DIMS, H200  # isort: skip

TARGETS = {t.name: t for t in shipped_targets()}


def test_which_cards_are_shipped() -> None:
    assert list(TARGETS) == ["h200", "h100", "a100", "gb10", "rtx5090", "b200"]


@pytest.mark.parametrize("name", TARGETS)
def test_every_figure_has_a_source_and_is_plausible(name: str) -> None:
    t = TARGETS[name]
    for what, figure in (("memory", t.memory), ("read_rate", t.read_rate), *t.rates):
        assert figure.value > 0, what
        assert len(figure.source) > 5, what
    assert 2**30 < t.memory.value < 2**40
    assert 1e11 < t.read_rate.value < 1e13
    assert {"fma", "mma_bf16", "mma_f16"} <= set(t.math)
    assert t.math["fma"].value < t.math["mma_bf16"].value
    assert t.shared_per_block < t.shared_per_sm
    assert t.arch.removeprefix("sm_").rstrip("a") == "{}{}".format(*t.capability)
    assert hash(Context(t, DIMS))


@pytest.mark.parametrize("name", TARGETS)
def test_the_floor_is_the_slower_of_bytes_and_operations(name: str) -> None:
    t = TARGETS[name]
    assert t.floor(10**9, 0, "nothing") == 10**9 / t.read_rate.value
    assert t.floor(0, 10**12, "mma_bf16") == 10**12 / t.math["mma_bf16"].value
    assert t.floor(10**9, 1, "fma") == 10**9 / t.read_rate.value
    assert t.floor(1, 10**15, "fma") == 10**15 / t.math["fma"].value
    with pytest.raises(KeyError, match=f"target {name}: no rate of pipe 'mma_i1', expected one of fma, "):
        t.floor(1, 1, "mma_i1")


def test_the_h200_floor_of_a_27b_projection() -> None:
    assert H200.floor(17408 * 5120 * 2, 2 * 17408 * 5120, "fma") == pytest.approx(41.8e-6, rel=0.01)


def test_what_hardware_meets() -> None:
    met = {name: [n for n in TARGETS if TARGETS[n].meets(need)] for name, need in NEEDS.items()}
    assert met == {
        "any": list(TARGETS),
        "sm_89": ["h200", "h100", "gb10", "rtx5090", "b200"],
        "sm_90a": ["h200", "h100"],
        "sm_120a": ["rtx5090"],
    }


NEEDS = {"any": Needs((8, 0)), "sm_89": Needs((8, 9)), "sm_90a": Needs((9, 0), "a"), "sm_120a": Needs((12, 0), "a")}


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(KeyError, match="title"):
        parse_target("mine", {"capability": [9, 0]})
    assert isinstance(H200, Target)
    assert isinstance(H200.memory, Figure)
