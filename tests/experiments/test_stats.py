"""Ratios against known cases: exact, drifting together, indistinguishable."""

from __future__ import annotations

import numpy as np
import pytest

from atlas_lab.experiments.stats import Ratio, interval, ratio, ratio_of_sums


def test_constant_blocks_have_no_width():
    assert ratio([10.0] * 8, [6.5] * 8, 0) == Ratio(0.65, 0.65, 0.65)


def test_the_interval_covers_and_is_seeded():
    rng = np.random.default_rng(3)
    a, b = rng.normal(10, 0.2, 40), rng.normal(8, 0.2, 40)
    r = ratio(list(a), list(b), 7)
    assert r.low < 0.8 < r.high
    assert r.high - r.low < 0.05
    assert r.verdict == "faster"
    assert ratio(list(b), list(a), 7).verdict == "slower"
    assert ratio(list(a), list(b), 7) == r
    assert ratio(list(a), list(b), 8) != r


def test_coverage_of_the_interval():
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        r = ratio(list(rng.normal(10, 0.5, 25)), list(rng.normal(10, 0.5, 25)), seed)
        hits += r.low <= 1 <= r.high
    assert hits >= 53  # 95 % of 60 is 57


def test_what_slows_both_cancels():
    drift = np.linspace(1, 2, 20)
    r = ratio(list(10 * drift), list(5 * drift), 0)
    assert (r.low, r.high) == pytest.approx((0.5, 0.5))
    assert r.verdict == "faster"


def test_same_within_noise():
    rng = np.random.default_rng(5)
    noise = list(rng.normal(10, 1, 30))
    assert ratio(noise, list(rng.permutation(noise)), 0).verdict == "same"


def test_sums():
    r = ratio_of_sums([[1.0] * 6, [3.0] * 6], [[1.0] * 6, [1.0] * 6], 0)
    assert r.value == 0.5


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ([1.0] * 4, [1.0] * 4, "ratio: found 4 blocks, expected 5 or more"),
        ([1.0] * 6, [1.0] * 7, r"ratio: found \[6, 7\] blocks, expected one count for every program"),
    ],
)
def test_too_little_to_compare(a, b, sentence):
    with pytest.raises(ValueError, match=sentence):
        ratio(a, b, 0)


def test_interval_of_one():
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0], 0)
    assert 1 <= low <= 3 <= high <= 5
