"""Matrix products of 8- and 4-bit elements, `stmatrix`, the elected lane: against the PTX ISA's fragment formulas.

A formula maps a register's element to its place: `(group, thread in group, element of the fragment) -> (row, column)`.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from lang_threads import pointer, run_warp

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.fragments import Fragment

RNG = np.random.default_rng(29)
Formula = Callable[[int, int, int], tuple[int, int]]


def fragments(m: np.ndarray, per: int, formula: Formula, registers: int, bits: int) -> list[tuple[int, ...]]:
    """What each lane holds of a matrix of codes: `registers` of `per` elements of `bits` bits."""
    out = []
    for lane in range(32):
        g, t = divmod(lane, 4)
        codes = [int(m[formula(g, t, i)]) for i in range(registers * per)]
        out.append(
            tuple(sum(c << bits * e for e, c in enumerate(codes[r * per : r * per + per])) for r in range(registers))
        )
    return out


def a_8bit(g: int, t: int, i: int) -> tuple[int, int]:
    return g if i % 8 < 4 else g + 8, 4 * t + i % 4 + (16 if i >= 8 else 0)


def b_8bit(g: int, t: int, i: int) -> tuple[int, int]:
    return 4 * t + i % 4 + (16 if i >= 4 else 0), g


def a_4bit(g: int, t: int, i: int) -> tuple[int, int]:
    return g if i < 8 or 16 <= i < 24 else g + 8, 8 * t + i % 8 + (32 if i >= 16 else 0)


def b_4bit(g: int, t: int, i: int) -> tuple[int, int]:
    return 8 * t + i % 8 + (32 if i >= 8 else 0), g


def accumulators(c: np.ndarray) -> list[tuple]:
    return [tuple(c[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] for i in range(4)) for lane in range(32)]


@pytest.mark.parametrize(
    ("op", "k", "dtype"),
    [
        (L.mma_m16n8k32_e4m3, 32, ml_dtypes.float8_e4m3fn),
        (L.mma_m16n8k32_s8, 32, np.int8),
        (L.mma_m16n8k16_s8, 16, np.int8),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_products_of_bytes(op, k, dtype):
    if dtype is np.int8:
        a, b = RNG.integers(-128, 128, (16, k), np.int8), RNG.integers(-128, 128, (k, 8), np.int8)
        c = RNG.integers(-(2**20), 2**20, (16, 8)).astype(np.int32)
    else:
        a, b = RNG.standard_normal((16, k)).astype(dtype), RNG.standard_normal((k, 8)).astype(dtype)
        c = RNG.standard_normal((16, 8)).astype(np.float32)
    fa = fragments(a.view(np.uint8), 4, a_8bit, k // 8, 8)
    fb = fragments(b.view(np.uint8), 4, b_8bit, k // 16, 8)
    start = [tuple(int(v) if dtype is np.int8 else v for v in f) for f in accumulators(c)]
    found = [tuple(f) for f in run_warp(lambda lane: op(start[lane], fa[lane], fb[lane]))]
    exact = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    expected = exact.astype(c.dtype)
    assert found == [tuple(f) for f in accumulators(expected)]
    kind = int if dtype is np.int8 else np.float32
    assert all(type(v) is kind for v in found[0])


def test_sums_of_s8_wrap():
    top = [(2**31 - 1,) * 4] * 32
    found = run_warp(lambda lane: L.mma_m16n8k16_s8(top[lane], (0x01010101,) * 2, (0x01010101,)))
    assert tuple(found[0]) == (-(2**31) + 15,) * 4
    assert L.mma_tile(L.i8, 1, 1).unit_roundoff is None
    assert L.mma_tile(L.i8, 1, 1, 16) is not L.mma_tile(L.i8, 1, 1)
    assert L.mma_m16n8k32_e4m3.needs == L.Needs((8, 9))


@pytest.mark.parametrize(("dtype", "host"), [(L.e4m3, ml_dtypes.float8_e4m3fn), (L.i8, np.int8)], ids=str)
def test_tiles_of_bytes_load_as_tiles_of_words(dtype, host):
    """`ldmatrix_tile` gives m16n8k32 its operands: rows of 32 bytes are rows of 16 words of 16 bits."""
    a, w = (RNG.integers(-8, 8, (rows, 32)).astype(host) for rows in (32, 32))
    pa, pw = pointer(a, dtype, "shared"), pointer(w, dtype, "shared")
    load = L.ldmatrix_tile(2, 16 * 32)
    multiply = L.mma_tile(dtype, 2, 4)

    def body(lane):
        fa = load(pa, 32 * (lane % 16) + 16 * (lane // 16))
        fb = load(pw, 32 * (lane % 8 + 8 * (lane // 16)) + 16 * (lane // 8 % 2))
        return tuple(multiply((L.zeros_i32 if dtype is L.i8 else L.zeros)(32), fa, fb))

    found = np.array(run_warp(body)).reshape(8, 4, 2, 4, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, 32)
    assert np.array_equal(found, a.astype(np.float64) @ w.astype(np.float64).T)


def test_block_scaled_products():
    a, b = RNG.integers(0, 16, (16, 64)), RNG.integers(0, 16, (64, 8))
    scale_a, scale_b = RNG.integers(0, 0x7F, (16, 4)), RNG.integers(0, 0x7F, (8, 4))
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    e4m3 = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    fa, fb = fragments(a, 8, a_4bit, 4, 4), fragments(b, 8, b_4bit, 2, 4)
    fc = accumulators(c)
    junk = 0x12345678  # of lanes whose scales are not read

    def packed(bytes_: np.ndarray) -> int:
        return int(sum(int(v) << 8 * i for i, v in enumerate(bytes_)))

    def body(lane):
        g, t = divmod(lane, 4)
        sa = packed(scale_a[g + 8 * t]) if t < 2 else junk
        sb = packed(scale_b[g]) if t == 0 else junk
        return tuple(L.mma_m16n8k64_nvfp4(fc[lane], fa[lane], fb[lane], sa, sb))

    left = values[a] * e4m3[scale_a].repeat(16, axis=1)
    right = values[b] * e4m3[scale_b].repeat(16, axis=1).T
    assert run_warp(body) == accumulators((c + left @ right).astype(np.float32))


def test_tiles_of_block_scaled_products_loaded_from_memory():
    """2 x 4 tiles as a GEMM loads them: ldmatrix for codes, for each row the word of its scales."""
    a, w = (RNG.integers(0, 256, (32, 32), dtype=np.uint8) for _ in range(2))
    scale_a, scale_w = (RNG.integers(0, 0x7F, (32, 4), dtype=np.uint8) for _ in range(2))
    pa, pw = pointer(a, L.u8, "shared"), pointer(w, L.u8, "shared")
    words_a, words_w = (s.view(np.uint32)[:, 0] for s in (scale_a, scale_w))
    load, multiply = L.ldmatrix_tile(2, 16 * 32), L.mma_nvfp4_tile(2, 4)

    def body(lane):
        g, t = divmod(lane, 4)
        fa = load(pa, 32 * (lane % 16) + 16 * (lane // 16))
        fb = load(pw, 32 * (lane % 8 + 8 * (lane // 16)) + 16 * (lane // 8 % 2))
        sa = tuple(int(words_a[16 * i + g + 8 * (t % 2)]) for i in range(2))
        sb = tuple(int(words_w[8 * i + g]) for i in range(4))
        return tuple(multiply(L.zeros(32), fa, fb, sa, sb))

    found = np.array(run_warp(body)).reshape(8, 4, 2, 4, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, 32)
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    e4m3 = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    left, right = (
        np.stack([e2m1[v & 15], e2m1[v >> 4]], axis=2).reshape(32, 64) * e4m3[s].repeat(16, axis=1)
        for v, s in ((a, scale_a), (w, scale_w))
    )
    assert np.array_equal(found.astype(np.float32), (left @ right.T).astype(np.float32))


def test_a_scale_with_a_sign_is_refused():
    with pytest.raises(ValueError, match="found scale byte 0x81, expected an unsigned e4m3 number"):
        run_warp(lambda lane: L.mma_m16n8k64_nvfp4((0.0,) * 4, (0,) * 4, (0,) * 2, 0x81, 0))


@pytest.mark.parametrize("trans", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_writes_what_ldmatrix_reads(count, trans):
    op = getattr(L, f"stmatrix_x{count}" + "_trans" * trans)
    codes = RNG.integers(0, 65536, (count, 8, 8), dtype=np.uint16)
    memory = bytearray(count * 128)
    p = pointer(memory, L.bf16, "shared")

    def body(lane):
        g, t = divmod(lane, 4)
        held = [m.T if trans else m for m in codes]
        values = tuple(int(m[g, 2 * t]) | int(m[g, 2 * t + 1]) << 16 for m in held)
        # matrix 8·m + row r at row 8·(count - 1 - m) + r: addresses are the lanes'
        at = 8 * (8 * (count - 1 - lane // 8) + lane % 8) if lane < 8 * count else 0
        op(p, at, values[0] if count == 1 else values)

    run_warp(body)
    assert np.array_equal(np.frombuffer(memory, np.uint16).reshape(count, 8, 8)[::-1], codes)


@pytest.mark.parametrize(("dtype", "host"), [(L.bf16, ml_dtypes.bfloat16), (L.f16, np.float16)], ids=str)
def test_accumulators_packed_and_stored(dtype, host):
    """C [16, 32] of four column tiles through registers to rows of 16-bit elements."""
    c = (RNG.standard_normal((16, 32)) * np.exp(RNG.uniform(-9, 9, (16, 32)))).astype(np.float32)
    memory = bytearray(16 * 64)
    p = pointer(memory, dtype, "shared")
    pack, store = L.pack_tile(dtype, 16), L.stmatrix_tile(2, 32)

    def body(lane):
        g, t = divmod(lane, 4)
        acc = tuple(c[g + 8 * h, 8 * j + 2 * t + e] for j in range(4) for h in range(2) for e in range(2))
        store(p, 32 * (lane % 16) + 8 * (lane // 16), pack(acc))

    run_warp(body)
    with np.errstate(over="ignore"):
        assert np.array_equal(np.frombuffer(memory, np.uint16), c.astype(host).view(np.uint16).ravel())


def test_packing_is_that_of_pairs():
    values = [np.float32(v) for v in (1e9, -1e9, np.inf, np.nan, -0.0, 1e-40, 65519.9, 65520.0)]
    for dtype, pair in ((L.bf16, L.bf16x2), (L.f16, L.f16x2)):
        found = L.pack_tile(dtype, 8)(values)
        assert found == tuple(pair(a, b) for a, b in zip(values[::2], values[1::2], strict=True))
        array = np.tile(np.array(values, np.float32), (32, 1))
        assert L.pack_tile(dtype, 8)(Fragment(array, 5)) == found
    with pytest.raises(ValueError, match="found 3 of bf16, expected an even number of bf16 or f16"):
        L.pack_tile(L.bf16, 3)
    with pytest.raises(ValueError, match="step 24"):
        L.stmatrix_tile(1, 24)


def test_one_lane_is_elected():
    assert sorted(run_warp(lambda lane: L.elect_sync())) == [0] * 31 + [1]
    assert run_warp(lambda lane: (L.warpgroup_id(), L.warpgroup_thread())) == [(0, i) for i in range(32)]
