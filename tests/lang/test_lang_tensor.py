"""Matrix fragments: loads and products against plain matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lang_threads import pointer, run_warp

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.fragments import Fragment

RNG = np.random.default_rng(13)
BF16 = ml_dtypes.bfloat16


def halves(registers) -> np.ndarray:
    """[lanes, registers] of u32 to [lanes, registers, 2] of 16-bit codes."""
    return np.array([list(r) for r in registers], np.uint32).view(np.uint16).reshape(32, -1, 2)


def test_ldmatrix_gives_lane_4g_t_row_g_columns_2t():
    codes = RNG.integers(0, 65536, (32, 8), dtype=np.uint16)  # four matrices of 8 rows
    p = pointer(codes, L.bf16, "shared")
    for count, op in ((1, L.ldmatrix_x1), (2, L.ldmatrix_x2), (4, L.ldmatrix_x4)):
        found = run_warp(lambda lane, op=op: op(p, 8 * lane))
        found = halves([[f] if count == 1 else f for f in found])
        for lane in range(32):
            for m in range(count):
                expected = codes[8 * m + lane // 4, 2 * (lane % 4) :][:2]
                assert found[lane, m].tolist() == expected.tolist()


def test_ldmatrix_trans_gives_the_columns():
    codes = RNG.integers(0, 65536, (32, 8), dtype=np.uint16)
    p = pointer(codes, L.bf16, "shared")
    for count, op in ((1, L.ldmatrix_x1_trans), (2, L.ldmatrix_x2_trans), (4, L.ldmatrix_x4_trans)):
        found = run_warp(lambda lane, op=op: op(p, 8 * lane))
        found = halves([[f] if count == 1 else f for f in found])
        for lane in range(32):
            for m in range(count):
                g, t = divmod(lane, 4)
                expected = codes[8 * m + 2 * t : 8 * m + 2 * t + 2, g]
                assert found[lane, m].tolist() == expected.tolist()


def swizzled(rows: np.ndarray) -> tuple[np.ndarray, object]:
    """Rows of 64 16-bit codes with their 16-byte chunks permuted by XOR, and the element index of (row, k)."""
    out = np.empty_like(rows)
    for r in range(len(rows)):
        for chunk in range(8):
            out[r, 8 * (chunk ^ r % 8) :][:8] = rows[r, 8 * chunk :][:8]
    return out, lambda r, k: 64 * r + 8 * (k // 8 ^ r % 8)


@pytest.mark.parametrize(("dtype", "numpy"), [(L.bf16, BF16), (L.f16, np.float16)], ids=str)
@pytest.mark.parametrize(("mt", "nt"), [(1, 2), (2, 4), (4, 2)])
def test_a_tile_product_through_swizzled_shared_memory(dtype, numpy, mt, nt):
    m, n, k = 16 * mt, 8 * nt, 64
    a = RNG.standard_normal((m, k)).astype(numpy)
    w = RNG.standard_normal((n, k)).astype(numpy)
    c = RNG.standard_normal((m, n)).astype(np.float32)
    a_mem, at = swizzled(a.view(np.uint16))
    w_mem, _ = swizzled(w.view(np.uint16))
    pa, pw = pointer(a_mem, dtype, "shared"), pointer(w_mem, dtype, "shared")
    load_a, load_b = L.ldmatrix_tile(mt, 16 * 128), L.ldmatrix_tile(nt // 2, 16 * 128)
    multiply = L.mma_tile(dtype, mt, nt)

    def body(lane):
        g, t = divmod(lane, 4)
        acc = ()
        for i in range(mt):
            for j in range(nt):
                for h in range(2):
                    acc += tuple(c[16 * i + 8 * h + g, 8 * j + 2 * t :][:2])
        for kk in range(0, k, 16):
            fa = load_a(pa, at(lane % 16, kk + 8 * (lane // 16)))
            fb = load_b(pw, at(lane % 8 + 8 * (lane // 16), kk + 8 * (lane // 8 % 2)))
            acc = multiply(acc, fa, fb)
        return tuple(acc)

    found = np.array(run_warp(body)).reshape(8, 4, mt, nt, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(m, n)
    exact = c.astype(np.float64) + a.astype(np.float64) @ w.astype(np.float64).T
    bound = np.abs(c) + np.abs(a.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    assert (np.abs(found - exact) <= 5 * 2.0**-24 * bound).all()
    assert found.dtype == np.float32


def test_one_tile_from_plain_tuples():
    a = RNG.integers(-4, 5, (16, 16)).astype(BF16)
    b = RNG.integers(-4, 5, (16, 8)).astype(BF16)

    def pack(x, y):
        return int(np.array([x, y], BF16).view(np.uint32)[0])

    def body(lane):
        g, t = divmod(lane, 4)
        fa = tuple(
            pack(a[g + 8 * (r % 2), 2 * t + 8 * (r // 2)], a[g + 8 * (r % 2), 2 * t + 8 * (r // 2) + 1])
            for r in range(4)
        )
        fb = tuple(pack(b[2 * t + 8 * r, g], b[2 * t + 8 * r + 1, g]) for r in range(2))
        return tuple(L.mma_m16n8k16_bf16(L.zeros(4), fa, fb))

    exact = a.astype(np.float64) @ b.astype(np.float64)
    for lane, (c0, c1, c2, c3) in enumerate(run_warp(body)):
        g, t = divmod(lane, 4)
        assert (c0, c1) == tuple(exact[g, 2 * t :][:2])
        assert (c2, c3) == tuple(exact[g + 8, 2 * t :][:2])


def test_fragments_are_tuples_to_a_kernel():
    array = np.arange(64, dtype=np.uint32).reshape(32, 2)
    f = Fragment(array, 3)
    assert (len(f), f[0], f[-1], f[:1], tuple(f)) == (2, 6, 7, (6,), (6, 7))
    assert type(f[0]) is int
    assert f + (1,) == (6, 7, 1)
    assert (1,) + f == (1, 6, 7)
    assert f + f == (6, 7, 6, 7)
    assert type(Fragment(array.astype(np.float32), 0)[1]) is np.float32
    with pytest.raises(IndexError):
        f[2]


def test_units_and_refusals():
    assert L.mma_m16n8k16_bf16.unit_roundoff > L.fma_rn.unit_roundoff == 2.0**-24
    assert L.ldg_b32.unit_roundoff is None
    assert L.mma_tile(L.bf16, 2, 2) is L.mma_tile(L.bf16, 2, 2)
    with pytest.raises(ValueError, match="found e5m2, expected bf16, f16, e4m3 or i8"):
        L.mma_tile(L.e5m2, 1, 1)
    with pytest.raises(ValueError, match="found k 16, expected 32 for e4m3"):
        L.mma_tile(L.e4m3, 1, 1, 16)
    with pytest.raises(ValueError, match="found 0 tiles"):
        L.ldmatrix_tile(0, 16)
    with pytest.raises(ValueError, match="step 24"):
        L.ldmatrix_tile(1, 24)
