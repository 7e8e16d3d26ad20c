"""Integer operations against other ways of saying them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.kernels import lang as L

words = st.integers(0, 2**32 - 1)
M32 = 2**32 - 1


def test_lop3_is_its_table_for_every_immediate():
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    for imm in range(256):
        assert L.lop3(a, b, c, imm) == imm * 0x01010101


@given(words, words, words)
def test_lop3_of_common_functions(a, b, c):
    assert L.lop3(a, b, c, 0xEA) == (a & b) | c
    assert L.lop3(a, b, c, 0x96) == a ^ b ^ c
    assert L.lop3(a, b, c, 0xCA) == (a & b) | (~a & c & M32)
    assert L.lop3(a, b, c, 0x80) == a & b & c


@given(words, words, words)
def test_prmt_picks_bytes_and_signs(a, b, selector):
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    expected = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both[nibble & 7]
        expected.append((0xFF if byte >= 128 else 0) if nibble >= 8 else byte)
    assert L.prmt(a, b, selector) == int.from_bytes(bytes(expected), "little")


def four(v: int, dtype: type) -> np.ndarray:
    return np.frombuffer(v.to_bytes(4, "little"), dtype).astype(np.int64)


@given(words, words, st.integers(-(2**31), 2**31 - 1))
def test_dp4a(a, b, c):
    signed = int((four(a, np.int8) * four(b, np.int8)).sum()) + c
    assert L.dp4a(a, b, c) == int(np.int64(signed).astype(np.int32))
    unsigned = int((four(a, np.uint8) * four(b, np.uint8)).sum()) + (c & M32)
    assert L.dp4a_u32(a, b, c & M32) == unsigned & M32


@given(words, words, st.integers(0, 100))
def test_funnel_shifts(lo, hi, n):
    both = hi << 32 | lo
    assert L.shf_l(lo, hi, n) == (both << n % 32 >> 32) & M32
    assert L.shf_r(lo, hi, n) == (both >> n % 32) & M32


@given(words)
def test_bytes_and_counts(q):
    assert [L.byte(q, i) for i in range(4)] == list(q.to_bytes(4, "little"))
    assert [L.s8(q, i) for i in range(4)] == four(q, np.int8).tolist()
    assert L.popc(q) == bin(q).count("1")


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_unsigned_operands_are_masked(a, b):
    x, y = a & M32, b & M32
    assert L.lop3(a, b, 0, 0x3C) == x ^ y
    assert L.prmt(a, b, 0x3210) == x
    assert L.shf_l(a, b, 0) == y
    assert L.shf_r(a, b, 0) == x
    assert L.popc(a) == bin(x).count("1")
    assert L.byte(a, 3) == x >> 24
