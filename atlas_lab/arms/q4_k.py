"""Arms over Q4_K blocks of ggml, read in place."""

from __future__ import annotations

from atlas_lab.arms.loads import CUTS, cuts_for, k_in_loads, one_pass
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemv.q4_k import BLOCK, SPAN, gemv_q4_k

WARPS, ROWS = 4, 4


class Q4KGemv(Arm):
    """Blocks of 256 weights as stored, each byte read once for up to three rows of x, which stay BF16 (W4A16); FP32
    sums on CUDA cores."""

    name = "q4k_gemv"
    roles = ("*",)
    rows = rows(1, 3)
    source = "q4_k"
    kernels = tuple(gemv_q4_k(WARPS, ROWS, m, stream=s) for m in (1, 2, 3) for s in (True, False))
    # 16 products, two additions a load, the butterfly; a weight is rounded, and 16·d·sc + dmin·m before it, which is 34
    # times the mean weight of a group that has one large weight alone
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + 2 * -(-k // SPAN) + 5, extra_roundings=35)
    reduction_class = ReductionClass("fma.f32", f"lane 16 + 16 of 1024, then a butterfly, {CUTS}", promotion=16)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return k_in_loads(p, BLOCK)

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def lower(self, c: Call) -> list[Launch]:
        kernel = gemv_q4_k(WARPS, ROWS, c.m, stream=c.context.levers.stream_weights)
        cuts = cuts_for(c, ROWS, SPAN)
        args = (c.weights["weight"].blocks, c.x, c.y, c.n, c.k, cuts)
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]
