"""Packed half arithmetic: one rounding, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.kernels import lang as L

codes = st.integers(0, 65535)
words = st.integers(0, 2**32 - 1)


def exact_round(value: Fraction, dtype: object) -> int:
    """The code of `value` in a 16-bit format: nearest, ties to even; overflow gives infinity."""
    info = ml_dtypes.finfo(dtype)
    mantissa, smallest = int(info.nmant), int(info.minexp)
    sign = 0x8000 if value < 0 else 0
    value = abs(value)
    if value == 0:
        return sign
    exponent = max((value.numerator.bit_length() - value.denominator.bit_length()), smallest - 1)
    while Fraction(2) ** exponent > value and exponent > smallest:
        exponent -= 1
    exponent = max(exponent, smallest)
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = round(value / Fraction(2) ** (exponent - mantissa))  # Fraction rounds halves to even
    bias = 1 - smallest
    code = ((exponent + bias - 1) << mantissa) + steps
    top = 0x7C00 if mantissa == 10 else 0x7F80
    return sign | min(code, top)


def value(code: int, dtype: object) -> float:
    return float(np.uint16(code).view(dtype).astype(np.float32))


OPS = [
    (L.hadd2, np.float16, 2, lambda a, b: a + b),
    (L.hmul2, np.float16, 2, lambda a, b: a * b),
    (L.hfma2, np.float16, 3, lambda a, b, c: a * b + c),
    (L.badd2, ml_dtypes.bfloat16, 2, lambda a, b: a + b),
    (L.bmul2, ml_dtypes.bfloat16, 2, lambda a, b: a * b),
    (L.bfma2, ml_dtypes.bfloat16, 3, lambda a, b, c: a * b + c),
]


@pytest.mark.parametrize(("op", "dtype", "arity", "exact"), OPS, ids=[o[0].name for o in OPS])
@given(data=st.data())
def test_rounded_once(op, dtype, arity, exact, data):
    packed = [data.draw(words) for _ in range(arity)]
    result = op(*packed)
    for shift in (0, 16):
        operands = [value(p >> shift & 0xFFFF, dtype) for p in packed]
        found = result >> shift & 0xFFFF
        with np.errstate(all="ignore"):
            special = exact(*(np.float64(x) for x in operands))
        if not np.isfinite(operands).all():
            got = value(found, dtype)
            assert (np.isnan(got) and np.isnan(special)) or got == special
            continue
        true = exact(*map(Fraction, operands))
        if true == 0:  # the sign of zero is IEEE's
            assert found == int(np.array(special, np.float32).astype(dtype).view(np.uint16))
        else:
            assert found == exact_round(true, dtype)


@pytest.mark.parametrize(("op", "dtype"), [(L.hfma2, np.float16), (L.bfma2, ml_dtypes.bfloat16)])
def test_fused_where_two_roundings_differ(op, dtype):
    rng = np.random.default_rng(3)
    differs = 0
    for a, b, c in rng.integers(0, 65536, (4000, 3)):
        operands = [value(int(x), dtype) for x in (a, b, c)]
        if not np.isfinite(operands).all():
            continue
        true = Fraction(operands[0]) * Fraction(operands[1]) + Fraction(operands[2])
        if true == 0:
            continue
        found = op(int(a), int(b), int(c)) & 0xFFFF
        assert found == exact_round(true, dtype)
        with np.errstate(all="ignore"):
            twice = np.float32(np.array(operands[0] * operands[1]).astype(dtype)) + np.float32(operands[2])
            differs += int(np.array(twice).astype(dtype).view(np.uint16)) != found
    assert differs > 0


def test_the_reference_rounds_as_the_libraries():
    rng = np.random.default_rng(5)
    for x in rng.standard_normal(200).astype(np.float32) * np.float32(2.0) ** rng.integers(-30, 14, 200):
        assert exact_round(Fraction(float(x)), np.float16) == int(x.astype(np.float16).view(np.uint16))
        wanted = int(np.array(x).astype(ml_dtypes.bfloat16).view(np.uint16))
        assert exact_round(Fraction(float(x)), ml_dtypes.bfloat16) == wanted
