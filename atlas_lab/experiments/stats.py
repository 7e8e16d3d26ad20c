"""From block times to a ratio with an interval, and from that to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SAMPLES = 2000
LEAST_BLOCKS = 5

Verdict = Literal["faster", "slower", "same", "not compared"]


@dataclass(frozen=True)
class Ratio:
    """Time of one side over the other's, with the 2.5 % and 97.5 % points of its bootstrap distribution."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """`faster` or `slower` where the interval lies on one side of 1, else `same`."""
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "same"


def _medians(blocks: Sequence[float], picks: np.ndarray) -> np.ndarray:
    medians: np.ndarray = np.median(np.asarray(blocks, np.float64)[picks], axis=1)
    return medians


def ratio_of_sums(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]], seed: int) -> Ratio:
    """Sum of the medians of `other` over that of `base`: each entry is one program's block times.

    Blocks of one index were measured in one round, so a round is drawn whole: what slowed both cancels. Raises
    ValueError for fewer than 5 rounds, or entries of different lengths.
    """
    rounds = {len(b) for b in (*base, *other)}
    if len(rounds) != 1 or not base or not other:
        raise ValueError(f"ratio: found {sorted(rounds)} blocks, expected one count for every program")
    count = rounds.pop()
    if count < LEAST_BLOCKS:
        raise ValueError(f"ratio: found {count} blocks, expected {LEAST_BLOCKS} or more")
    picks = np.random.default_rng(seed).integers(0, count, (SAMPLES, count))
    below = sum(_medians(b, picks) for b in base)
    above = sum(_medians(b, picks) for b in other)
    low, high = np.percentile(above / below, [2.5, 97.5])
    value = sum(float(np.median(b)) for b in other) / sum(float(np.median(b)) for b in base)
    return Ratio(value, float(low), float(high))


def ratio(base: Sequence[float], other: Sequence[float], seed: int) -> Ratio:
    """Median of `other` over the median of `base`."""
    return ratio_of_sums([base], [other], seed)


def interval(blocks: Sequence[float], seed: int) -> tuple[float, float]:
    """The bootstrap interval of one program's median."""
    picks = np.random.default_rng(seed).integers(0, len(blocks), (SAMPLES, len(blocks)))
    low, high = np.percentile(_medians(blocks, picks), [2.5, 97.5])
    return float(low), float(high)
