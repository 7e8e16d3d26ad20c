"""Conversions: exhaustive over 8- and 4-bit codes and 16-bit patterns, against ml_dtypes and NumPy elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.formats import e2m1
from atlas_lab.formats import e4m3 as e4m3_format
from atlas_lab.kernels import lang as L

words = st.integers(0, 2**32 - 1)
singles = st.floats(width=32, allow_nan=False)
CODES = np.arange(256, dtype=np.uint8)
RNG = np.random.default_rng(7)
# every exponent, with mantissas that are random, all ones, zero, and just around the halves that rounding meets
PATTERNS = np.concatenate(
    [
        RNG.integers(0, 2**32, 20000, dtype=np.uint32),
        (np.arange(512, dtype=np.uint32)[:, None] << 23 | np.uint32(0x7FFF) + np.arange(4, dtype=np.uint32)).ravel(),
        (np.arange(512, dtype=np.uint32)[:, None] << 23 | np.uint32(0x7FFFF) + np.arange(4, dtype=np.uint32)).ravel(),
        (np.arange(512, dtype=np.uint32)[:, None] << 23 | np.uint32(0x7FFFFE) + np.arange(2, dtype=np.uint32)).ravel(),
    ]
)
VALUES = PATTERNS.view(np.float32)


def bits(values: np.ndarray, dtype: object = np.uint32) -> list[int]:
    return np.asarray(values).view(dtype).tolist()


def test_bits_of_every_kind_of_float_survive():
    for pattern in PATTERNS[::7].tolist() + [0, 0x80000000, 0x7F800000, 1, 0x7F800001, 0xFFC01234]:
        value = L.bits_f32(pattern)
        assert type(value) is np.float32
        assert L.f32_bits(value) == pattern


def test_every_bf16_and_f16_pattern_widens():
    codes = np.arange(65536, dtype=np.uint32)
    expected = (codes << 16).view(np.float32)
    halves = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    for code in range(65536):
        packed = code | (65535 - code) << 16
        assert L.f32_bits(L.bf16_lo(packed)) == int(expected[code].view(np.uint32))
        assert L.f32_bits(L.bf16_hi(packed)) == int(expected[65535 - code].view(np.uint32))
        a, b = L.f16_lo(packed), halves[code]
        assert a == b or (a != a and b != b)
        a, b = L.f16_hi(packed), halves[65535 - code]
        assert a == b or (a != a and b != b)


def test_bf16_rounds_as_ml_dtypes():
    with np.errstate(all="ignore"):
        expected = VALUES.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(VALUES)
    expected[nan] = 0x7FFF  # the one NaN that cvt makes
    found = [L.bf16x2(v, np.float32(0)) for v in VALUES]
    assert found == expected.tolist()
    assert [L.bf16x2(np.float32(0), v) >> 16 for v in VALUES[:100]] == expected[:100].tolist()


def test_f16_rounds_as_numpy():
    with np.errstate(all="ignore"):
        expected = VALUES.astype(np.float16).view(np.uint16)
    expected[np.isnan(VALUES)] = 0x7FFF
    assert [L.f16x2(v, np.float32(0)) for v in VALUES] == expected.tolist()
    assert L.f16x2(np.float32(65520), np.float32(-65519.99)) == 0xFBFF7C00


def test_e4m3_rounds_and_saturates_as_formats():
    finite = VALUES[~np.isnan(VALUES)]
    with np.errstate(all="ignore"):
        expected = e4m3_format.encode(finite).view(np.uint8)
    assert [L.e4m3x2(v, np.float32(1)) & 0xFF for v in finite] == expected.tolist()
    ties = np.arange(-2000, 2000, dtype=np.float32) / np.float32(4096)  # subnormals and halves between them
    assert [L.e4m3x2(np.float32(1), v) >> 8 for v in ties] == e4m3_format.encode(ties).view(np.uint8).tolist()
    assert L.e4m3x2(np.float32("nan"), np.float32("inf")) == 0x7E7F


@pytest.mark.parametrize(
    ("op", "dtype"), [(L.e4m3x2_f16x2, ml_dtypes.float8_e4m3fn), (L.e5m2x2_f16x2, ml_dtypes.float8_e5m2)]
)
def test_every_fp8_code_widens_to_f16(op, dtype):
    exact = CODES.view(dtype).astype(np.float32)
    expected = exact.astype(np.float16).view(np.uint16)
    expected[np.isnan(exact)] = 0x7FFF
    for c in range(256):
        packed = op(c | (255 - c) << 8)
        assert (packed & 0xFFFF, packed >> 16) == (expected[c], expected[255 - c])


def test_four_e4m3_widen_as_two_and_two():
    for c in range(256):
        low, high = c | (255 - c) << 8, c * 7 % 256 | (c + 128) % 256 << 8
        assert L.e4m3x4_f16x2_cvt(low | high << 16) == (L.e4m3x2_f16x2(low), L.e4m3x2_f16x2(high))


def four(codes: list[int]) -> int:
    return sum(c << 8 * i for i, c in enumerate(codes))


def by_bits_e4m3() -> np.ndarray:
    exact = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact[0x7F], exact[0xFF] = 480, -480  # NaN codes, which loaders refuse
    return exact


def test_every_e4m3_code_widens_by_bits():
    exact = by_bits_e4m3()
    for c in range(256):
        group = [c, 255 - c, (c * 7) % 256, (c + 128) % 256]
        q = four(group)
        wide = exact[group]
        assert L.e4m3x4_bf16x2(q) == tuple(bits(wide.astype(ml_dtypes.bfloat16), np.uint32))
        assert L.e4m3x4_f16x2(q) == tuple(bits(wide.astype(np.float16), np.uint32))
        assert L.f32_bits(L.e4m3_f32(c)) == bits(exact)[c]


def test_small_bf16_round_to_e4m3_as_formats():
    """2**-120 of every bf16 that is at most 448 and has no bit below 2**-13: those of subnormals lie there."""
    values = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    values = values[np.abs(values) <= 448].astype(np.float64)
    values = values[values * 8192 % 1 == 0]
    small = (values * 2.0**-120).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert np.array_equal(small.astype(np.float64), values * 2.0**-120)
    expected = e4m3_format.encode(values.astype(np.float32)).view(np.uint8).tolist()
    codes = small.view(np.uint16).tolist()
    assert len(codes) > 4000
    for i in range(len(codes)):
        a, b, c = (i + 7) % len(codes), (i * 5) % len(codes), -1 - i
        made = L.bf16x4_e4m3_small(codes[i] | codes[a] << 16, codes[b] | codes[c] << 16)
        assert made == four([expected[i], expected[a], expected[b], expected[c]])


@given(words)
def test_e2m1_nibbles_widen_in_order(q):
    codes = [q >> 4 * i & 15 for i in range(8)]
    wide = e2m1.VALUES[codes].astype(np.float32)
    assert L.e2m1x8_bf16x2(q) == tuple(bits(wide.astype(ml_dtypes.bfloat16)))
    assert L.e2m1x8_f16x2(q) == tuple(bits(wide.astype(np.float16)))


def test_every_e2m1_code_widens():
    for c in range(16):
        q = c * 0x11111111
        wide = np.full(8, e2m1.VALUES[c], np.float32)
        assert L.e2m1x8_bf16x2(q) == tuple(bits(wide.astype(ml_dtypes.bfloat16)))
        assert L.e2m1x8_f16x2(q) == tuple(bits(wide.astype(np.float16)))


@given(singles)
def test_integers_from_floats_round_to_even_and_saturate(x):
    expected = int(np.clip(np.rint(np.float64(x)), -(2.0**31), 2.0**31 - 1))
    assert L.f32_i32(np.float32(x)) == expected
    assert L.rint(np.float32(x)) == np.rint(np.float32(x))


def test_integers_from_floats_at_the_edges():
    assert [L.f32_i32(np.float32(x)) for x in (0.5, 1.5, -2.5, "nan", "inf", "-inf")] == [
        0, 2, -2, 0, 2**31 - 1, -(2**31),
    ]  # fmt: skip


@given(st.integers(-(2**40), 2**40))
def test_floats_from_integers(v):
    wrapped = np.int64(v).astype(np.int32)
    assert L.i32_f32(v) == np.float32(wrapped)
