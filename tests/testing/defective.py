"""Arms that are wrong in one way each. `DEFECTS` says which check finds it and with which words."""

from __future__ import annotations

import sys
from dataclasses import replace

import ml_dtypes
import numpy as np

from atlas_lab import (
    Accuracy,
    Arm,
    Bind,
    Derived,
    Exact,
    Launch,
    ReductionClass,
    Rounded,
    Tensor,
    hookimpl,
    no,
    rows,
    yes,
)
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.kernel(launch_bounds=(32, 1))
def divides(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, m: L.i32):
    L.stg_bf16(y, 0, L.f32(n // (k - k)))


@L.family
def product(defect: str = ""):
    """y = x·Wᵀ, BF16, a warp an output, lanes over K in steps of 8."""

    @L.kernel(launch_bounds=(32, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, m: L.i32):
        row, token = cuda.blockIdx.x, cuda.blockIdx.y
        acc = L.f32(0)
        for c in range(L.lane_id() * 8, k, 256):
            q = L.ldg_v4_b32(w, row * k + c)
            v = L.ldg_v4_b32(x, token * k + c)
            for j in L.unroll(4):
                acc += L.bf16_lo(q[j]) * L.bf16_lo(v[j])
                acc += L.bf16_hi(q[j]) * L.bf16_hi(v[j])
        acc = L.warp_sum(acc)
        if defect == "last row" and row == n - 1 and n % 2 == 1:
            acc = L.f32(0)
        if defect == "by m":
            acc = acc * L.f32(1 + (m - 1) * 0.0045)
        if defect == "one in many" and row == n // 2 and k > 200:
            acc = acc * L.f32(1.02)
        if L.lane_id() == 0 and not (defect == "unwritten" and row == n - 1):
            L.stg_bf16(y, token * n + row, acc)

    return kernel


@L.kernel(launch_bounds=(32, 1))
def scribble(w: L.InOut[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, m: L.i32):
    """Correct, and leaves a weight changed."""
    row = cuda.blockIdx.x
    acc = L.f32(0)
    for c in range(L.lane_id(), k, 32):
        acc += L.ld_bf16(w, row * k + c) * L.ldg_bf16(x, c)
    acc = L.warp_sum(acc)
    if L.lane_id() == 0:
        L.stg_bf16(y, row, acc)
        L.stg_bf16(w, row * k, acc)


@L.kernel(launch_bounds=(32, 1))
def doubles(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32, m: L.i32):
    """Computes in float64, by a literal."""
    row, token = cuda.blockIdx.x, cuda.blockIdx.y
    if L.lane_id() == 0:
        acc = 0.0
        for c in range(k):
            acc += L.ldg_bf16(w, row * k + c) * L.ldg_bf16(x, token * k + c) * 1.0
        L.stg_bf16(y, token * n + row, L.f32(acc))


class Sound(Arm):
    """Nothing is wrong with it."""

    name = "sound"
    roles = ("ffn.*",)
    rows = rows(1, 3)
    source = "bf16"
    kernels = (product(),)
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: k // 32 + 16)
    reduction_class = ReductionClass("fma.f32", "lane 8 of 256, then a butterfly")

    def eligible(self, p, ctx):
        return no("k-multiple", "K must be a multiple of 8", found=p.k, allowed="8, 16") if p.k % 8 else yes()

    def finalize(self, p, ctx):
        return [Bind(p.weight)]

    def weight(self, c):
        return c.weights["weight"].weight

    def arguments(self, c):
        return (self.weight(c), c.x, c.y, c.n, c.k, c.m)

    def lower(self, c):
        flops = 2 * c.m * c.n * c.k
        return [Launch(self.kernels[0], grid=(c.n, c.m), block=32, args=self.arguments(c), flops=flops)]


def half_the_flops(self, c):
    (launch,) = Sound.lower(self, c)
    return [replace(launch, flops=launch.flops // 2)]


def coarse(w):
    step = np.maximum(np.abs(w).max(axis=1, keepdims=True), np.float32(1e-30)) / 4
    return {"w": (np.rint(w / step) * step).astype(ml_dtypes.bfloat16)}


class Coarse(Sound):
    """Changes numbers, and says so."""

    name = "coarse"
    accuracy = Accuracy(min_snr_db=8)
    key, build = "coarse", staticmethod(coarse)

    def finalize(self, p, ctx):
        made = Tensor("bf16", (p.n, p.k))
        dequantize = lambda t: t["w"].astype(np.float64)  # noqa: E731
        return [Derived(self.key, source=p.weight, build=self.build, dequantize=dequantize, w=made)]

    def weight(self, c):
        return c.weights[self.key].w


class Pair(Sound):
    """Serves two projections in one call of one row."""

    name = "pair"
    roles = ("ffn.gate+ffn.up",)
    rows = rows(1)
    swapped = False

    def finalize(self, site, ctx):
        return [Bind(p.weight, key=p.role) for p in site.projections]

    def lower(self, c):
        half = c.n // 2
        parts = [c.y.data.view(i * half, (1, half)) for i in (0, 1)]
        weights = [c.weights[role].weight for role in (c.roles[::-1] if self.swapped else c.roles)]
        args = [(w, c.x, part, half, c.k, c.m) for w, part in zip(weights, parts, strict=True)]
        return [Launch(self.kernels[0], half, 32, a, flops=2 * c.m * half * c.k) for a in args]


def noisy(w):
    return {"w": (w * np.random.default_rng().uniform(0.99, 1.01, w.shape)).astype(ml_dtypes.bfloat16)}


def half(w):
    return {"w": np.zeros(w.shape, ml_dtypes.bfloat16)}


def raises(self, p, ctx):
    raise LookupError("no table")


def variant(name: str, base: type[Arm] = Sound, **attributes: object) -> Arm:
    return type(name, (base,), {"name": name, **attributes})()


def with_kernel(name: str, kernel: L.Kernel, **attributes: object) -> Arm:
    return variant(name, kernels=(kernel,), **attributes)


OTHER = product("one in many")
# arm, {kind of the checks that fail: words of the first one's sentence}
DEFECTS: list[tuple[Arm, dict[str, str]]] = [
    (Sound(), {}),
    (Coarse(), {}),
    (Pair(), {}),
    (variant("swapped_pair", Pair, swapped=True), {"parity": "outputs are outside the tolerance"}),
    (variant("forgets_a_group", roles=("ffn.down", "ffn.gate+ffn.up")),
     {"cases": "says yes to none of the shapes tried for ffn.gate+ffn.up; of N=256, K=256 in bf16 it says: finalize"}),
    (variant("exact_to_sound", tolerance=Exact(to="sound")), {}),
    (with_kernel("drops_the_last_row", product("last row"), reduction_class=None),
     {"parity": "are outside the tolerance, worst y[", "teeth": "the output is wrong as it is"}),
    (with_kernel("one_wrong_in_many", product("one in many")), {"parity": "1 of 31 outputs are outside the"}),
    (with_kernel("forgets_an_output", product("unwritten"), reduction_class=None),
     {"parity": "found nan", "teeth": "the output is wrong as it is"}),
    (with_kernel("sums_by_m", product("by m"), tolerance=Rounded("f32", "bf16", depth=lambda k: 1 << 15)),
     {"parity": "outside the tolerance", "reduction": "reduction class fma.f32/lane 8 of 256, then a butterfly"}),
    (with_kernel("changes_a_weight", scribble, rows=rows(1), reduction_class=None),
     {"parity": "the program changed model.layers.0.ffn.gate.weight: bf16[31, 248], which it only reads"}),
    (variant("tolerates_anything", tolerance=Rounded("f32", "bf16", depth=lambda k: 1 << 24)),
     {"teeth": "the tolerance takes an output with a row of zeros for right"}),
    (variant("tolerates_much", tolerance=Rounded("f32", "bf16", depth=lambda k: 1 << 19)),
     {"teeth": "the tolerance has no teeth: doubling one weight was noticed in"}),
    (with_kernel("claims_to_be_exact", product("by m"), tolerance=Exact(), reduction_class=None),
     {"parity": "within 0"}),
    (variant("builds_at_random", Coarse, key="noisy", build=staticmethod(noisy)),
     {"build": "noisy.w: built twice, it differs", "parity": "what was loaded is not what building it again"}),
    (variant("hides_that_it_changes", Coarse, accuracy=None), {"build": "weights differ from their source"}),
    (variant("keeps_nothing", Coarse, key="half", build=staticmethod(half)),
     {"build": "half: found 0.0 dB against its source", "parity": "accuracy: found 0.0 dB", "teeth": "a row of zeros"}),
    (variant("promises_accuracy", Coarse, accuracy=Accuracy(min_snr_db=60)), {"parity": "expected its declared 60 dB"}),
    (variant("refuses_nothing", source="", eligible=lambda self, p, ctx: yes()),
     {"refusal": "takes every shape, format and card", "parity": "Misaligned"}),
    (variant("refuses_everything", eligible=lambda self, p, ctx: no("k", "never", found=p.k, allowed="nothing")),
     {"cases": "shapes tried for ffn.gate; of N=256, K=256 in bf16 it says: never (found 256"}),
    (variant("raises", eligible=raises), {"cases": "eligible of arm raises raised LookupError: no table"}),
    (variant("starts_from_nothing", source="q9"), {"cases": "starts from 'q9' weights, expected a family of bf16"}),
    (variant("launches_another", lower=lambda self, c: [Launch(OTHER, c.n, 32, self.arguments(c))]),
     {"parity": "PlanError: layers.0.ffn.gate/y: arm launches_another launches product(defect=one in many), which"}),
    (variant("counts_half", lower=half_the_flops), {"parity": "flops: found"}),
    (variant("lowers_wrongly", lower=lambda self, c: 1 // 0), {"parity": "ZeroDivisionError"}),
    (variant("leaves", lower=lambda self, c: sys.exit(7)), {"parity": "SystemExit: 7"}),
    (with_kernel("divides_by_zero", divides, rows=rows(1), reduction_class=None), {"parity": "thread (0, 0, 0), "}),
    (with_kernel("computes_in_f64", doubles, rows=rows(1), reduction_class=None), {"compile": "uses 64-bit float"}),
]  # fmt: skip


@hookimpl
def atlas_arms():
    return [arm for arm, _ in DEFECTS]
