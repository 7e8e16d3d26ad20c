"""Arms that do what must cost their own check and nothing else. Each has a sound twin beside it: `hostile_none`."""

from __future__ import annotations

from atlas_lab import Arm, Bind, Call, Launch, Rounded, Tensor, hookimpl, no, rows, yes
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda


@L.family
def hostile(misdeed: str):
    """A BF16 row product, one thread a row, that does something wrong from K = 16 on."""

    @L.kernel(launch_bounds=(32, 1))
    def kernel(w: L.In[L.bf16], x: L.In[L.bf16], flag: L.InOut[L.u32], y: L.Out[L.bf16], n: L.i32, k: L.i32):
        row = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        if row < n:
            acc = L.f32(0)
            for c in range(k):
                acc += L.ldg_bf16(w, row * k + c) * L.ldg_bf16(x, c)
            L.stg_bf16(y, row, acc)
            if k >= 16:
                if misdeed == "write":
                    L.stg_bf16(y, (n + row) << 24, acc)
                if misdeed == "guard":
                    L.stg_bf16(y, n + row, acc)
                if misdeed == "spin":
                    while L.ld_acquire_b32(flag, 0) != 1:
                        L.nanosleep(100)
                if misdeed == "loop":
                    while n > 0:
                        n = n + 0

    return kernel


class Hostile(Arm):
    roles = ("ffn.*",)
    rows = rows(1)
    source = "bf16"
    tolerance = Rounded(accumulate="f32", out="bf16")

    def __init__(self, misdeed: str) -> None:
        self.name = f"hostile_{misdeed}"
        self.kernels = (hostile(misdeed),)

    def eligible(self, p, ctx):
        return no("k", "K is odd", found=p.k, allowed="2, 4, 6") if p.k % 2 else yes()

    def finalize(self, p, ctx):
        return [Bind(p.weight)]

    def scratch(self, c: Call):
        return {"flag": Tensor("u32", (64,))}

    def lower(self, c: Call):
        args = (c.weights["weight"].weight, c.x, c.scratch["flag"], c.y, c.n, c.k)
        return [Launch(self.kernels[0], grid=-(-c.n // 32), block=32, args=args, flops=2 * c.m * c.n * c.k)]


class Dies(Hostile):
    """Takes the process down while it is planned for K = 16 and more."""

    def lower(self, c: Call):
        if c.k >= 16 and c.m == 1:
            import os

            os.abort()
        return super().lower(c)


@hookimpl
def atlas_arms():
    return [*(Hostile(misdeed) for misdeed in ("none", "write", "guard", "spin", "loop")), Dies("abort")]
