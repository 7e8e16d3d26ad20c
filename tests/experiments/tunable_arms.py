"""Arms with settings, for tests of `tune`: the built-in BF16 kernel in several shapes, and arms that get it wrong."""

from __future__ import annotations

import numpy as np

from atlas_lab import Arm, Bind, Derived, Exact, Launch, Rounded, Tensor, hookimpl, no, rows, yes
from atlas_lab.core.chip import Work, ranked
from atlas_lab.core.tuning import chosen
from atlas_lab.core.tuning import setting as made
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.family
def product(lanes: int = 32, wrong: bool = False):
    """A block a row of W and of x; `lanes` of its threads sum."""

    @L.kernel(launch_bounds=(32, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], y: L.Out[L.bf16], n: L.i32, k: L.i32):
        row, m = cuda.blockIdx.x, cuda.blockIdx.y
        acc = L.f32(0)
        if L.lane_id() < lanes:
            for c in range(L.lane_id() * 2, k - (k // 4 if wrong else 0), 2 * lanes):
                q = L.ldg_b32(w, row * k + c)
                v = L.ldg_b32(x, m * k + c)
                acc += L.bf16_lo(q) * L.bf16_lo(v)
                acc += L.bf16_hi(q) * L.bf16_hi(v)
        acc = L.warp_sum(acc)
        if L.lane_id() == 0:
            L.stg_bf16(y, m * n + row, acc)

    return kernel


LANES = (32, 16, 8)


class Tunable(Arm):
    """`lanes` of a warp; the model's first is 32."""

    name = "tunable"
    roles = ("*",)
    rows = rows(1, 16)
    source = "bf16"
    kernels = tuple(product(lanes) for lanes in LANES)
    tolerance = Rounded(accumulate="f32", out="bf16")

    def eligible(self, p, ctx):
        return no("k-multiple", "K must be a multiple of 8", found=p.k, allowed="8, 16, ...") if p.k % 8 else yes()

    def finalize(self, p, ctx):
        return [Bind(p.weight)]

    def settings(self, n, k, target):
        work = [(made(lanes=x), Work(2 * n * k, n, 32, 32, 4 * x / 32, 0.5)) for x in reversed(LANES)]
        return ranked(work, target)

    def kernel(self, lanes):
        return product(lanes)

    def lower(self, c):
        (w,) = (fields.weight for fields in c.weights.values())
        lanes = dict(chosen(self, c.n, c.k, c.context))["lanes"]
        flops = 2 * c.m * c.n * c.k
        return [Launch(self.kernel(lanes), grid=(c.n, c.m), block=32, args=(w, c.x, c.y, c.n, c.k), flops=flops)]


class Copied(Tunable):
    """Reads a copy of its weights, another for each setting."""

    name = "copied"

    def finalize(self, p, ctx):
        lanes = dict(chosen(self, p.n, p.k, ctx))["lanes"]
        copy = Derived(
            "copy",
            source=p.weight.packed,
            build=lambda t: {"weight": t["weight"]},
            dequantize=lambda t: t["weight"].astype(np.float64),
            parameters={"lanes": lanes},
            weight=Tensor("bf16", (p.n, p.k)),
        )
        return [copy]


class Faulty(Tunable):
    """Forgets a quarter of K with 16 lanes."""

    name = "faulty"
    kernels = tuple(product(lanes, lanes == 16) for lanes in LANES)

    def kernel(self, lanes):
        return product(lanes, lanes == 16)


class FaultyFirst(Faulty):
    name = "faulty_first"

    def settings(self, n, k, target):
        return (made(lanes=16), made(lanes=32))


class ExactToPlain(Faulty):
    name = "exact"
    tolerance = Exact("plain")


class ExactToFaulty(ExactToPlain):
    name = "not_exact"

    def settings(self, n, k, target):
        return (made(lanes=16),)


class Plain(Tunable):
    """Nothing to tune."""

    name = "plain"
    settings = Arm.settings

    def lower(self, c):
        args = (c.weights["weight"].weight, c.x, c.y, c.n, c.k)
        return [Launch(product(32), grid=(c.n, c.m), block=32, args=args, flops=2 * c.m * c.n * c.k)]


class Pair(Tunable):
    """Gate and up in one call, of a copy with the rows of both."""

    name = "pair"
    roles = ("ffn.gate+ffn.up",)
    order, off = (0, 1), 0

    def eligible(self, p, ctx):
        return yes()

    def finalize(self, p, ctx):
        n, k = sum(q.n for q in p.projections), p.projections[0].k
        return [
            Derived(
                "both",
                source=tuple(q.weight.packed for q in p.projections),
                build=lambda *t: {"weight": np.concatenate([t[i]["weight"] for i in self.order])},
                dequantize=lambda t: np.roll(t["weight"].astype(np.float64), self.off * p.projections[0].n, axis=0),
                weight=Tensor("bf16", (n, k)),
            )
        ]


class PairSwapped(Pair):
    """Takes up for gate."""

    name = "pair_swapped"
    order, off = (1, 0), 1


class Broken(Tunable):
    """Its settings raise."""

    name = "broken"

    def settings(self, n, k, target):
        raise ZeroDivisionError("no")


class Fixed(Tunable):
    """One setting."""

    name = "fixed"

    def settings(self, n, k, target):
        return (made(lanes=32),)


@hookimpl
def atlas_arms():
    wrong = (Faulty(), FaultyFirst(), ExactToPlain(), ExactToFaulty(), PairSwapped(), Broken())
    return [Tunable(), Copied(), Fixed(), Plain(), Pair(), *wrong]
