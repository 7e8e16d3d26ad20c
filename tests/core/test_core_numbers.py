"""Tolerances: what arithmetic keeps within, and what they must not let pass."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.core.numbers import ACCUMULATORS, OUTPUTS, ReductionClass, Rounded, snr_db


def summed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x·Wᵀ in float32, one product after the other."""
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for i in range(x.shape[1]):
        acc += x[:, i : i + 1].astype(np.float32) * w[:, i].astype(np.float32)
    return acc


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([0.0, 3.0, 12.0]))
def test_float32_sums_rounded_to_bf16_are_within_it(seed: int, k: int, tail: float) -> None:
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((m, k)) * 2.0 ** (tail * rng.standard_normal((m, k))) for m in (2, 5))
    x, w = (a.astype(ml_dtypes.bfloat16) for a in (x, w))
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    ref = wide_x @ wide_w.T
    bound = Rounded("f32", "bf16").bound(ref, np.abs(wide_x) @ np.abs(wide_w).T, k)
    with np.errstate(over="ignore"):
        out = summed(x, w).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert (np.abs(out - ref) <= bound)[np.isfinite(out)].all()


def test_the_terms() -> None:
    ref, magnitude = np.array([[2.0]]), np.array([[8.0]])
    tiny = np.finfo(np.float32).tiny
    u, v = 2.0**-24, 2.0**-8
    assert Rounded("f32", "bf16").bound(ref, magnitude, 10)[0, 0] == 10 * u * 8 * (1 + v) + v * 2 + tiny
    fewer = Rounded("f32", "f32", depth=lambda k: k // 5, extra_roundings=3)
    assert fewer.bound(ref, magnitude, 10)[0, 0] == pytest.approx(5 * u * 8 * (1 + u) + u * 2 + tiny, rel=1e-15)
    assert set(ACCUMULATORS) >= {"f32", "mma_bf16", "mma_f16", "mma_e4m3"}
    assert set(OUTPUTS) == {"f32", "bf16", "f16"}
    assert all(0 < u <= 2**-12 for u in ACCUMULATORS.values())


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="tolerance: found 'fp32', expected one of f32, mma_bf16, mma_f16"):
        Rounded("fp32", "bf16")
    with pytest.raises(ValueError, match="tolerance: found 'e4m3', expected one of f32, bf16, f16"):
        Rounded("f32", "e4m3")


def test_snr() -> None:
    a = np.array([3.0, 4.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert snr_db(a, a) == float("inf")
        assert snr_db(a + [0.5, 0], a) == pytest.approx(20)
        assert snr_db(a, a * 0) == float("-inf")
        assert snr_db(a * 0, a * 0) == float("inf")


def test_equal_parameters_are_one_reduction_class() -> None:
    assert ReductionClass("fma", "strided").id == ReductionClass("fma", "strided", splits=1).id
    assert len({ReductionClass("fma", "strided", **d).id for d in ({}, {"splits": 2}, {"promotion": 4})}) == 3
