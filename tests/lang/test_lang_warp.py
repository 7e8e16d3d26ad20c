"""Warp-wide operations over 32 lanes."""

from __future__ import annotations

import numpy as np
from lang_threads import run_warp

from atlas_lab.kernels import lang as L

RNG = np.random.default_rng(11)


def test_identity():
    assert run_warp(lambda lane: (L.lane_id(), L.warp_id())) == [(i, 0) for i in range(32)]


def test_shuffles():
    values = RNG.integers(0, 2**32, 32).tolist()
    assert run_warp(lambda i: L.shfl_xor(values[i], 5)) == [values[i ^ 5] for i in range(32)]
    assert run_warp(lambda i: L.shfl_down(values[i], 3)) == [values[i + 3] if i < 29 else values[i] for i in range(32)]
    assert run_warp(lambda i: L.shfl_idx(values[i], i * 7)) == [values[i * 7 % 32] for i in range(32)]
    assert run_warp(lambda i: L.shfl_xor(-values[i], 0)) == [-v % 2**32 for v in values]


def test_float_shuffles():
    values = RNG.standard_normal(32).astype(np.float32)
    for op, source in (
        (L.shfl_xor_f32, lambda i: i ^ 16),
        (L.shfl_down_f32, lambda i: i + 16 if i < 16 else i),
        (L.shfl_idx_f32, lambda i: 16),
    ):
        found = run_warp(lambda i, op=op: op(values[i], 16))
        assert found == [values[source(i)] for i in range(32)]
        assert all(type(v) is np.float32 for v in found)


def test_votes():
    bits = [i % 3 == 0 for i in range(32)]
    assert run_warp(lambda i: L.ballot(bits[i])) == [sum(1 << i for i in range(32) if bits[i])] * 32
    assert run_warp(lambda i: L.any_sync(i == 7)) == [1] * 32
    assert run_warp(lambda i: L.any_sync(0)) == [0] * 32
    assert run_warp(lambda i: L.all_sync(i + 1)) == [1] * 32
    assert run_warp(lambda i: L.all_sync(i)) == [0] * 32


def test_the_sum_has_the_butterflys_order():
    x = (RNG.standard_normal(32) * np.exp(RNG.uniform(-20, 20, 32))).astype(np.float32)
    lanes = list(x)
    for n in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i ^ n] for i in range(32)]
    assert run_warp(lambda i: L.warp_sum(x[i])) == lanes
    assert len(set(lanes)) == 1


def test_maximum_and_integer_sum():
    x = RNG.standard_normal(32).astype(np.float32)
    assert run_warp(lambda i: L.warp_max(x[i])) == [x.max()] * 32
    x[3] = np.nan
    assert run_warp(lambda i: L.warp_max(x[i])) == [np.nanmax(x)] * 32
    v = RNG.integers(-(2**31), 2**31, 32)
    expected = int(v.sum().astype(np.int32))
    assert run_warp(lambda i: L.warp_sum_i32(int(v[i]))) == [expected] * 32
