"""E2M1 and E4M3 against ml_dtypes and against rounding written out: nearest value, ties to even code, saturation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atlas_lab.formats import e2m1, e4m3

FLOATS = hnp.arrays(np.float32, st.integers(1, 64), elements=st.floats(width=32, allow_nan=False))
E4M3_MAGNITUDES = [m * 2.0**-9 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
]
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "e4m3": E4M3_MAGNITUDES[:-1]}  # the last is the NaN code
SIGN = {"e2m1": 8, "e4m3": 128}


def encode(name: str, x: np.ndarray) -> np.ndarray:
    return e2m1.encode(x) if name == "e2m1" else e4m3.encode(x).view(np.uint8)


def nearest_even(name: str, x: np.ndarray) -> np.ndarray:
    """Codes by search among the midpoints, which float64 holds exactly."""
    magnitudes = np.array(MAGNITUDES[name])
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    low, high = (np.searchsorted(middles, np.abs(x.astype(np.float64)), side) for side in ("left", "right"))
    return np.where(low % 2 == 0, low, high) + SIGN[name] * np.signbit(x)


def edge_cases(name: str) -> np.ndarray:
    """Every value and midpoint with both float32 neighbours, subnormals and values far out of range, either sign."""
    m = np.array(MAGNITUDES[name])
    exact = np.concatenate([m, (m[1:] + m[:-1]) / 2, [2**-149, 2**-127, 464, 465, 480, 3.4e38, np.inf]])
    x = exact.astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("name", MAGNITUDES)
def test_encode_rounds_to_nearest_even_and_saturates_at_every_edge(name: str) -> None:
    x = edge_cases(name)
    np.testing.assert_array_equal(encode(name, x), nearest_even(name, x))


@pytest.mark.parametrize("name", MAGNITUDES)
@settings(deadline=None)
@given(x=FLOATS)
def test_encode_rounds_random_floats_to_nearest_even(name: str, x: np.ndarray) -> None:
    np.testing.assert_array_equal(encode(name, x), nearest_even(name, x))


@settings(deadline=None)
@given(x=FLOATS)
def test_e2m1_encodes_as_ml_dtypes(x: np.ndarray) -> None:
    np.testing.assert_array_equal(e2m1.encode(x), x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


@settings(deadline=None)
@given(x=FLOATS)
def test_e4m3_encodes_as_ml_dtypes_up_to_its_overflow_and_then_saturates(x: np.ndarray) -> None:
    theirs = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    large = np.abs(x) > 464
    np.testing.assert_array_equal(e4m3.encode(x).view(np.uint8)[~large], theirs[~large])
    assert (theirs[large] & 0x7F == 0x7F).all()
    assert (e4m3.encode(x).astype(np.float32)[large] == np.copysign(448, x[large])).all()


def test_e4m3_keeps_nan() -> None:
    assert e4m3.is_nan(e4m3.encode(np.array([np.nan], np.float32))).all()


def test_e4m3_decodes_all_codes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.array(E4M3_MAGNITUDES[:-1] + [np.nan])
    expected = np.concatenate([values, -values])
    np.testing.assert_array_equal(e4m3.decode(codes), expected)
    np.testing.assert_array_equal(np.signbit(e4m3.decode(codes))[128:255], True)
    np.testing.assert_array_equal(e4m3.decode(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    np.testing.assert_array_equal(e4m3.is_nan(codes), np.isnan(expected))
    np.testing.assert_array_equal(e4m3.is_no_magnitude(codes), ~np.isin(codes, np.arange(0x7F)))


def test_every_finite_code_survives_decode_and_encode() -> None:
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[~e4m3.is_nan(codes)]
    np.testing.assert_array_equal(e4m3.encode(e4m3.decode(finite).astype(np.float32)).view(np.uint8), finite)
    nibbles = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(e2m1.encode(e2m1.VALUES.astype(np.float32)), nibbles)


def test_e2m1_packs_the_even_element_in_the_low_nibble() -> None:
    assert e2m1.pack(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]
    assert e2m1.unpack(np.array([[0x21, 0x0F]], np.uint8)).tolist() == [[1, 2, 15, 0]]


@settings(deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 20)), elements=st.integers(0, 255)))
def test_e2m1_bytes_decode_to_what_their_nibbles_stand_for(packed: np.ndarray) -> None:
    codes = e2m1.unpack(packed)
    np.testing.assert_array_equal(e2m1.pack(codes), packed)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(e2m1.decode(packed), expected)
    np.testing.assert_array_equal(np.signbit(e2m1.decode(packed)), np.signbit(expected))
