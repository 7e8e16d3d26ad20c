"""Kernels of one intrinsic each, run by a device, against the intrinsic's NumPy meaning.

On the interpreter this shows that kernels reach the meaning; with `--device=cuda`, that the meaning is the card's:
bit for bit for integers, conversions and correctly rounded arithmetic, within the stated bound for approximations
and matrix products.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lang_threads import run_warp

from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.multiply import U_MMA, U_MMA_NARROW

RNG = np.random.default_rng(17)


def run(device, kernel: L.Kernel, x: np.ndarray, results: int, threads: int, shared: int = 0) -> np.ndarray:
    """u32 `results` that `kernel(x, y, n)` stores, n threads in blocks of 64 or less."""
    given, out = Tensor("u32", (x.size,), "x"), Tensor("u32", (results,), "y")
    block = min(threads, 64)
    launch = Launch(kernel, grid=-(-threads // block), block=block, args=(given, out, threads), shared=shared)
    program = Program("one intrinsic", (launch,), inputs=(given,), outputs=(out,))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in (given, out)}
    device.upload(buffers["x"], x)
    device.bind(program, buffers).run()
    found = device.download(buffers["y"], "u32", (results,))
    for b in buffers.values():
        b.free()
    return found


@L.device
def load_u32(x, i):
    return L.ldg_b32(x, i)


@L.device
def load_f32(x, i):
    return L.bits_f32(L.ldg_b32(x, i))


@L.device
def store_u32(y, i, v):
    L.stg_b32(y, i, v)


@L.device
def store_f32(y, i, v):
    L.stg_b32(y, i, L.f32_bits(v))


def applying(op, imm: int | None = None) -> L.Kernel:
    """y[i] = op(x[arity·i], …) on registers of 32 bits."""
    kinds = [k for k in op.operands if isinstance(k, L.Scalar)]
    arity = len(kinds)
    loads = [load_f32 if k is L.f32 else load_u32 for k in kinds] + [load_u32] * (3 - arity)
    first, second, third = loads
    count = op.result.count if isinstance(op.result, L.Vec) else 1
    kind = op.result.dtype if isinstance(op.result, L.Vec) else op.result
    store = store_f32 if kind is L.f32 else store_u32
    one, two, immediate = arity == 1, arity == 2, imm is not None

    @L.kernel
    def kernel(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < n:
            a = first(x, arity * i)
            if one:
                r = op(a)
            elif two:
                r = op(a, second(x, arity * i + 1))
            elif immediate:
                r = op(a, second(x, arity * i + 1), third(x, arity * i + 2), imm)
            else:
                r = op(a, second(x, arity * i + 1), third(x, arity * i + 2))
            if count == 1:
                store(y, i, r)
            else:
                for j in L.unroll(count):
                    store(y, count * i + j, r[j])

    return kernel


def meaning(op, row: list[int], imm: int | None) -> list[int]:
    kinds = [k for k in op.operands if isinstance(k, L.Scalar)]
    args = [L.bits_f32(v) if k is L.f32 else k(v) for k, v in zip(kinds, row, strict=True)]
    value = op(*args) if imm is None else op(*args, imm)
    values = value if isinstance(op.result, L.Vec) else (value,)
    kind = op.result.dtype if isinstance(op.result, L.Vec) else op.result
    return [L.f32_bits(v) if kind is L.f32 else L.u32(v) for v in values]


def patterns(n: int, kind: L.Scalar) -> np.ndarray:
    """Random words; for f32 half of them ordinary numbers, and the awkward ones."""
    words = RNG.integers(0, 2**32, n, dtype=np.uint32)
    if kind is L.f32:
        words[::2] = RNG.standard_normal(len(words[::2])).astype(np.float32).view(np.uint32)
        edges = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x7F7FFFFF, 0x00800000, 0x477FF000]
        words[1 : 2 * len(edges) + 1 : 2] = edges
        words[2 : 2 * len(edges) + 2 : 2] = np.roll(np.array(edges, np.uint32), 3)
    return words


EXACT = [
    L.bits_f32, L.f32_bits, L.bf16_lo, L.bf16_hi, L.bf16x2, L.f16_lo, L.f16_hi, L.f16x2, L.f32_i32, L.i32_f32, L.rint,
    L.e4m3x2_f16x2, L.e5m2x2_f16x2, L.e4m3x2, L.e4m3x4_bf16x2, L.e4m3x4_f16x2, L.e4m3_f32, L.e2m1x8_bf16x2,
    L.e4m3x4_f16x2_cvt, L.e2m1x8_f16x2, L.e2m1x16_small, L.e2m1x16_pack, L.bf16x4_e4m3_small, L.hadd2, L.hmul2,
    L.hfma2, L.badd2, L.bmul2, L.bfma2, L.prmt, L.dp4a, L.dp4a_u32, L.shf_l,
    L.shf_r, L.popc, L.add_rn, L.mul_rn, L.fma_rn, L.div_rn, L.sqrt_rn, L.min_f32, L.max_f32, L.abs_f32,
    L.min_nan_f32, L.max_nan_f32,
]  # fmt: skip


def check(device, op, imm: int | None = None) -> None:
    kinds = [k for k in op.operands if isinstance(k, L.Scalar)]
    n = 64 if device.name == "interpreter" else 16384
    x = np.stack([patterns(n, k) for k in kinds], axis=1)
    count = op.result.count if isinstance(op.result, L.Vec) else 1
    found = run(device, applying(op, imm), np.ascontiguousarray(x).ravel(), n * count, n).reshape(n, count)
    with np.errstate(all="ignore"):
        expected = np.array([meaning(op, row, imm) for row in x.tolist()], np.uint32)
    same = found == expected
    kind = op.result.dtype if isinstance(op.result, L.Vec) else op.result
    if kind is L.f32:
        same |= np.isnan(found.view(np.float32)) & np.isnan(expected.view(np.float32))
    wrong = np.flatnonzero(~same.all(axis=1))
    assert not wrong.size, (
        f"{op.name}: {wrong.size} of {n} differ, first {[hex(v) for v in x[wrong[0]].tolist()]}: "
        f"{[hex(v) for v in found[wrong[0]].tolist()]}, expected {[hex(v) for v in expected[wrong[0]].tolist()]}"
    )


@pytest.mark.parametrize("op", EXACT, ids=lambda op: op.name)
def test_exact(device, op):
    check(device, op)


@pytest.mark.parametrize("imm", [0x00, 0x1E, 0x96, 0xCA, 0xE8, 0xEA, 0xFF])
def test_lop3(device, imm):
    check(device, L.lop3, imm)


@pytest.mark.parametrize(
    ("op", "bound", "low", "high"),
    [
        (L.rcp_approx, 2.0**-23, 1e-30, 1e30),
        (L.exp2_approx, 2.0**-21, -120, 120),
        (L.rsqrt_approx, 2.0**-22, 1e-30, 1e30),
        (L.tanh_approx, 2.0**-10, -8, 8),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_approximate(device, op, bound, low, high):
    n = 64 if device.name == "interpreter" else 16384
    x = RNG.uniform(low, high, n).astype(np.float32)
    if low > 0:
        x = np.exp(RNG.uniform(np.log(low), np.log(high), n)).astype(np.float32)
    found = run(device, applying(op), x.view(np.uint32), n, n).view(np.float32)
    expected = np.array([op(v) for v in x], np.float32)
    error = np.abs(found - expected) / np.maximum(np.abs(expected), np.float32(1e-38))
    assert error.max() <= bound, f"{op.name}: relative error {error.max():.3g} at {x[error.argmax()]!r}"


def warp_values(function) -> L.Kernel:
    """y[lane] of a function of (word, float, lane) that returns words."""
    call = L.device(function)

    @L.kernel
    def kernel(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
        lane = L.lane_id()
        L.stg_b32(y, lane, call(L.ldg_b32(x, lane), L.i32_f32(L.ldg_b32(x, lane)), lane))

    return kernel


WARP = {
    "shfl_xor": lambda w, f, lane: L.shfl_xor(w, 5),
    "shfl_down": lambda w, f, lane: L.shfl_down(w, 7),
    "shfl_idx": lambda w, f, lane: L.shfl_idx(w, lane * 3),
    "shfl_xor_f32": lambda w, f, lane: L.f32_bits(L.shfl_xor_f32(f, 17)),
    "shfl_down_f32": lambda w, f, lane: L.f32_bits(L.shfl_down_f32(f, 31)),
    "shfl_idx_f32": lambda w, f, lane: L.f32_bits(L.shfl_idx_f32(f, 31 - lane)),
    "ballot": lambda w, f, lane: L.ballot(f > L.f32(0)),
    "any_sync": lambda w, f, lane: L.any_sync(w & 1),
    "all_sync": lambda w, f, lane: L.all_sync(w | 1),
    "warp_sum": lambda w, f, lane: L.f32_bits(L.warp_sum(f)),
    "warp_max": lambda w, f, lane: L.f32_bits(L.warp_max(f)),
    "warp_sum_i32": lambda w, f, lane: L.warp_sum_i32(L.i32(w)),
}


@pytest.mark.parametrize("name", WARP)
def test_warp(device, name):
    x = RNG.integers(0, 2**32, 32, dtype=np.uint32)
    found = run(device, warp_values(WARP[name]), x, 32, 32)
    expected = run_warp(lambda lane: L.u32(WARP[name](int(x[lane]), L.i32_f32(int(x[lane])), lane)))
    assert found.tolist() == expected


@L.family
def product(dtype: L.Scalar):
    """C fragments of one product of 32 bytes of K: x holds a 16 rows, b 8 rows, then c 16x8 in 32 bits."""
    op = L.mma_tile(dtype, 1, 1)
    load, word = (L.i32, L.u32) if dtype is L.i8 else (L.bits_f32, L.f32_bits)

    @L.kernel
    def kernel(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
        lane = L.lane_id()
        s = L.shared(L.u16, 24 * 16)
        for i in range(lane, 24 * 8, 32):
            L.sts_b32(s, 2 * i, L.ldg_b32(x, i))
        cuda.syncthreads()
        a = L.ldmatrix_x4(s, 16 * (lane & 15) + 8 * (lane >> 4))
        b = L.ldmatrix_x2(s, 256 + 16 * (lane & 7) + 8 * ((lane >> 3) & 1))
        acc = ()
        for j in L.unroll(4):
            at = 192 + 8 * ((lane >> 2) + 8 * (j >> 1)) + 2 * (lane & 3) + (j & 1)
            acc = acc + (load(L.ldg_b32(x, at)),)
        acc = op(acc, a, b)
        for j in L.unroll(4):
            at = 8 * ((lane >> 2) + 8 * (j >> 1)) + 2 * (lane & 3) + (j & 1)
            L.stg_b32(y, at, word(acc[j]))

    return kernel


@pytest.mark.parametrize(
    ("dtype", "numpy", "unit"),
    [
        (L.bf16, ml_dtypes.bfloat16, U_MMA),
        (L.f16, np.float16, U_MMA),
        (L.e4m3, ml_dtypes.float8_e4m3fn, U_MMA_NARROW),
    ],
    ids=str,
)
def test_a_matrix_product(device, dtype, numpy, unit):
    worst, k = 0.0, 256 // dtype.bits
    for trial in range(2 if device.name == "interpreter" else 200):
        spread = np.exp(RNG.uniform(-4, 4, (24, k)))
        ab = np.clip(RNG.standard_normal((24, k)) * spread, -400, 400).astype(numpy)
        c = RNG.standard_normal((16, 8)).astype(np.float32) * np.float32(trial % 3)
        x = np.concatenate([ab.view(np.uint32).ravel(), c.view(np.uint32).ravel()])
        found = run(device, product(dtype), x, 128, 32).view(np.float32).reshape(16, 8)
        a, b = ab[:16].astype(np.float64), ab[16:].astype(np.float64)
        exact = c + a @ b.T
        error = np.abs(found - exact) - 2.0**-24 * np.abs(exact)
        worst = max(worst, float((error / (np.abs(c) + np.abs(a) @ np.abs(b).T)).max()))
    print(f"mma m16n8k{k} {dtype} on {device.name}: error {worst:.3g} of |a||b| + |c|, its unit is {unit:.3g}")
    assert worst <= (k + 1) * unit


def test_an_integer_matrix_product(device):
    ab = RNG.integers(-128, 128, (24, 32), np.int8)
    c = RNG.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    x = np.concatenate([ab.view(np.uint32).ravel(), c.view(np.uint32).ravel()])
    found = run(device, product(L.i8), x, 128, 32).view(np.int32).reshape(16, 8)
    a, b = ab[:16].astype(np.int64), ab[16:].astype(np.int64)
    assert np.array_equal(found, (c + a @ b.T).astype(np.int32))


@L.kernel(launch_bounds=(32, 1))
def stored_matrices(x: L.In[L.u32], y: L.Out[L.u32], n: L.i32):
    """Four matrices by rows, the same by columns, and which lane is elected."""
    lane = L.lane_id()
    s = L.shared(L.u16, 512)
    q = L.ldg_v4_b32(x, 4 * lane)
    L.stmatrix_x4(s, 8 * lane, q)
    L.stmatrix_x4_trans(s, 256 + 8 * lane, q)
    cuda.syncwarp()
    for i in range(lane, 256, 32):
        L.stg_b32(y, i, L.lds_b32(s, 2 * i))
    L.stg_b32(y, 256 + lane, L.elect_sync())


def test_matrices_stored_and_one_lane_elected(device):
    x = RNG.integers(0, 2**32, 128, dtype=np.uint32)
    found = run(device, stored_matrices, x, 288, 32)
    registers = x.reshape(32, 4).T.reshape(4, 8, 4)  # matrix, row, four words of a row
    halves = np.ascontiguousarray(registers).view(np.uint16)
    assert np.array_equal(found[:128], registers.ravel())
    assert np.array_equal(found[128:256].view(np.uint16), halves.transpose(0, 2, 1).ravel())
    assert sorted(found[256:].tolist()) == [0] * 31 + [1]
