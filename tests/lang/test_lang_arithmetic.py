"""float32 arithmetic: exactly rounded forms against rationals and NumPy, approximations within their bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.kernels import lang as L

singles = st.floats(width=32)
patterns = st.integers(0, 2**32 - 1)


def f32(x: float) -> np.float32:
    return np.float32(x)


def same(a: np.float32, b: np.float32) -> bool:
    return type(a) is np.float32 and (bool(np.isnan(a) and np.isnan(b)) or L.f32_bits(a) == L.f32_bits(b))


@given(singles, singles)
def test_add_multiply_divide_as_numpy(a, b):
    x, y = f32(a), f32(b)
    with np.errstate(all="ignore"):
        assert same(L.add_rn(x, y), x + y)
        assert same(L.mul_rn(x, y), x * y)
        assert same(L.div_rn(x, y), x / y)
        assert same(L.sqrt_rn(x), np.sqrt(x))


def nearest(value: Fraction) -> np.float32:
    """The float32 nearest to a rational, ties to even, found among the neighbours of a first guess."""
    try:
        guess = f32(float(value))
    except OverflowError:
        return f32(math.copysign(math.inf, value))
    if not np.isfinite(guess):
        limit = Fraction(2) ** 128 - Fraction(2) ** 103
        return guess if abs(value) >= limit else f32(math.copysign(3.4028234663852886e38, value))
    near = [np.nextafter(guess, f32(-math.inf)), guess, np.nextafter(guess, f32(math.inf))]
    near = [n for n in near if np.isfinite(n)]
    return min(near, key=lambda n: (abs(Fraction(float(n)) - value), L.f32_bits(n) & 1))


@given(patterns, patterns, patterns)
def test_fma_is_rounded_once(i, j, k):
    a, b, c = (L.bits_f32(v) for v in (i, j, k))
    if not all(np.isfinite(v) for v in (a, b, c)):
        return
    true = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    with np.errstate(all="ignore"):
        if true:
            assert L.fma_rn(a, b, c) == nearest(true)
        else:
            assert same(L.fma_rn(a, b, c), f32(float(a) * float(b) + float(c)))


@given(patterns, st.integers(-60, 60), st.booleans())
def test_fma_near_the_halves(i, shift, up):
    """c just above or below half of the last place of a·b: where a double rounding would go wrong."""
    a = L.bits_f32(0x3F800000 | i & 0x7FFFFF)
    half = f32(2.0**-24)
    c = f32(float(half) * (1 + (2.0**-23 if up else -(2.0**-24))))
    tiny = f32(2.0**-shift) if shift else f32(1)
    for x, y, z in ((a, f32(1), c), (a, tiny, f32(float(c) * float(tiny)))):
        true = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert L.fma_rn(x, y, z) == nearest(true)


def test_fma_specials():
    inf, nan = f32("inf"), f32("nan")
    assert np.isnan(L.fma_rn(inf, f32(0), f32(1)))
    assert np.isnan(L.fma_rn(inf, f32(1), -inf))
    assert L.fma_rn(f32(3e38), f32(3e38), -inf) == -inf
    assert np.isnan(L.fma_rn(nan, f32(1), f32(1)))
    assert math.copysign(1, L.fma_rn(f32(-0.0), f32(1), f32(-0.0))) == -1


@given(singles, singles)
def test_minimum_and_maximum_prefer_numbers_and_order_zeros(a, b):
    x, y = f32(a), f32(b)
    for op, np_op in ((L.min_f32, np.fmin), (L.max_f32, np.fmax)):
        assert np.array_equal(op(x, y), np_op(x, y), equal_nan=True)
    assert same(L.abs_f32(x), np.abs(x))


@given(singles, singles)
def test_minimum_and_maximum_that_keep_a_nan(a, b):
    x, y = f32(a), f32(b)
    for op, np_op in ((L.min_nan_f32, np.minimum), (L.max_nan_f32, np.maximum)):
        assert np.array_equal(op(x, y), np_op(x, y), equal_nan=True)
        for p, q in ((x, L.bits_f32(0xFFC00001)), (L.bits_f32(0xFFC00001), y)):
            assert L.f32_bits(op(p, q)) == 0x7FFFFFFF


def test_signed_zeros():
    plus, minus = f32(0.0), f32(-0.0)
    for x, y in ((plus, minus), (minus, plus)):
        for low, high in ((L.min_f32, L.max_f32), (L.min_nan_f32, L.max_nan_f32)):
            assert math.copysign(1, low(x, y)) == -1
            assert math.copysign(1, high(x, y)) == 1


@pytest.mark.parametrize(
    ("op", "exact", "bound", "low", "high"),
    [
        (L.rcp_approx, lambda x: 1 / x, 2.0**-23, 1e-30, 1e30),
        (L.exp2_approx, lambda x: 2.0**x, 2.0**-22, -120, 120),
        (L.rsqrt_approx, lambda x: 1 / math.sqrt(x), 2.0**-22, 1e-30, 1e30),
        (L.tanh_approx, math.tanh, 2.0**-10, -10, 10),
    ],
    ids=["rcp", "exp2", "rsqrt", "tanh"],
)
def test_approximations_on_the_interpreter_are_within_the_bound(op, exact, bound, low, high):
    for x in np.linspace(low, high, 500).astype(np.float32):
        value = op(x)
        true = exact(float(x))
        assert type(value) is np.float32
        assert abs(float(value) - true) <= bound * abs(true)


def test_approximations_at_the_edges():
    inf = f32("inf")
    assert L.exp2_approx(f32(200)) == inf
    assert L.exp2_approx(-inf) == 0
    assert np.isnan(L.exp2_approx(f32("nan")))
    assert L.rcp_approx(f32(-0.0)) == -inf
    assert L.rsqrt_approx(f32(0)) == inf
    assert np.isnan(L.rsqrt_approx(f32(-1)))
    assert L.tanh_approx(inf) == 1


def test_python_floats_are_rounded_first():
    assert L.add_rn(0.1, 0.2) == f32(0.1) + f32(0.2)
    assert L.fma_rn(0.1, 3, 1) == nearest(Fraction(float(f32(0.1))) * 3 + 1)
