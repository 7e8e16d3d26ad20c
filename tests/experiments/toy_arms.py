"""Small arms for tests of experiments: an exact BF16 product for any M, one that quantizes to int8, a broken one."""

from __future__ import annotations

import numpy as np

from atlas_lab import Accuracy, Arm, Bind, Derived, Exact, Launch, Rounded, Tensor, hookimpl, no, rows, rows_from, yes
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.kernel(launch_bounds=(32, 1))
def toy(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
    row, m = cuda.blockIdx.x, cuda.blockIdx.y
    acc = L.f32(0)
    for c in range(L.lane_id() * 8, k, 256):
        q = L.ldg_v4_b32(w, row * k + c)
        v = L.ldg_v4_b32(x, m * k + c)
        for j in L.unroll(4):
            acc += L.bf16_lo(q[j]) * L.bf16_lo(v[j])
            acc += L.bf16_hi(q[j]) * L.bf16_hi(v[j])
    acc = L.warp_sum(acc)
    if L.lane_id() == 0:
        L.stg_bf16(y, m * n + row, acc)


@L.kernel(launch_bounds=(32, 1))
def toy_off(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
    """Forgets a third of K."""
    row, m = cuda.blockIdx.x, cuda.blockIdx.y
    acc = L.f32(0)
    for c in range(L.lane_id() * 2, k - k // 3, 64):
        q = L.ldg_b32(w, row * k + c)
        v = L.ldg_b32(x, m * k + c)
        acc += L.bf16_lo(q) * L.bf16_lo(v)
        acc += L.bf16_hi(q) * L.bf16_hi(v)
    acc = L.warp_sum(acc)
    if L.lane_id() == 0:
        L.stg_bf16(y, m * n + row, acc)


@L.kernel(launch_bounds=(32, 1))
def toy_reversed(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
    """Right within any bound, and another order of sums; a tiny bias makes sure that some bits differ."""
    row, m = cuda.blockIdx.x, cuda.blockIdx.y
    acc = L.f32(0)
    for c in range(L.lane_id() * 2, k, 64):
        q = L.ldg_b32(w, row * k + c)
        v = L.ldg_b32(x, m * k + c)
        acc += L.bf16_hi(q) * L.bf16_hi(v)
        acc += L.bf16_lo(q) * L.bf16_lo(v)
    acc = L.warp_sum(acc)
    if L.lane_id() == 0:
        L.stg_bf16(y, m * n + row, acc * L.f32(1.004))


@L.kernel(launch_bounds=(32, 1))
def toy_outside(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
    """Writes past the end of y."""
    if L.lane_id() == 0:
        L.stg_bf16(y, cuda.blockIdx.y * n + cuda.blockIdx.x + 1, L.f32(0))


@L.kernel(launch_bounds=(32, 1))
def toy_double(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
    """Right, in float64."""
    row, m = cuda.blockIdx.x, cuda.blockIdx.y
    if L.lane_id() == 0:
        acc = 0.0
        for c in range(k):
            acc += L.ldg_bf16(w, row * k + c) * L.ldg_bf16(x, m * k + c) * 1.0
        L.stg_bf16(y, m * n + row, L.f32(acc))


class Toy(Arm):
    roles = ("*",)
    rows = rows_from(1)
    source = "bf16"
    tolerance = Rounded(accumulate="f32", out="bf16")

    def __init__(self, name, kernel=toy, served=None):
        self.name, self.kernels, self.rows = name, (kernel,), served or type(self).rows

    def eligible(self, p, ctx):
        if p.k % 8:
            return no("k-multiple", "K must be a multiple of 8", found=p.k, allowed="8, 16, ...")
        return yes()

    def finalize(self, p, ctx):
        return [Bind(p.weight)]

    def weight(self, c):
        return c.weights["weight"].weight

    def lower(self, c):
        args = (self.weight(c), c.x, c.y, c.n, c.k)
        return [Launch(self.kernels[0], grid=(c.n, c.m), block=32, args=args, flops=2 * c.m * c.n * c.k)]


def rounded(w):
    """Weights on a grid of 1/16 of the row's largest, as BF16."""
    import ml_dtypes

    step = np.abs(w).max(axis=1, keepdims=True) / 16
    step[step == 0] = 1
    return {"w": (np.rint(w / step) * step).astype(ml_dtypes.bfloat16)}


class ToyExact(Toy):
    """Promises the bits of `toy`; keeps the promise unless its kernel is another."""

    tolerance = Exact("toy")


class ToyGrid(Toy):
    """Changes numbers: weights on a coarse grid, made at load."""

    accuracy = Accuracy(min_snr_db=15)

    def finalize(self, p, ctx):
        made = Tensor("bf16", (p.n, p.k))
        dequantize = lambda t: t["w"].astype(np.float64)  # noqa: E731
        return [Derived("toy_grid", source=p.weight, build=rounded, dequantize=dequantize, w=made)]

    def weight(self, c):
        return c.weights["toy_grid"].w


@hookimpl
def atlas_arms():
    return [
        Toy("toy"),
        Toy("toy_same"),
        Toy("toy_one", served=rows(1)),
        Toy("toy_wrong", toy_off),
        Toy("toy_outside", toy_outside),
        Toy("toy_double", toy_double),
        ToyExact("toy_exact"),
        ToyExact("toy_not_exact", toy_reversed),
        ToyGrid("toy_grid"),
    ]
