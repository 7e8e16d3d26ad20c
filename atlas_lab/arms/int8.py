"""Arms over the int8 copy that is made of a weight of any format."""

from __future__ import annotations

from atlas_lab.arms.copies.int8 import can_int8, int8_32
from atlas_lab.arms.loads import CUTS, cuts_for, one_pass
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemv.int8 import SPAN, gemv_int8

WARPS, ROWS, UNROLL = 4, 2, 2


class Int8Gemv(Arm):
    """Weights of any format made int8 under a scale for 32 of a row, each byte read once for up to three rows of x,
    which stay BF16 (W8A16); FP32 sums on CUDA cores."""

    name = "int8_gemv"
    roles = ("*",)
    rows = rows(1, 3)
    kernels = tuple(gemv_int8(WARPS, ROWS, UNROLL, m, stream=s) for m in (1, 2, 3) for s in (True, False))
    # 16 products, their scale, one addition a load, then the butterfly
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + -(-k // SPAN) + 5, extra_roundings=1)
    # of weights that were BF16: what a coarser format lost before stays lost
    accuracy = Accuracy(min_snr_db=42)
    reduction_class = ReductionClass("fma.f32", f"lane 16 int8 of 512, then a butterfly, {CUTS}", promotion=16)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_int8(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [int8_32(p)]

    def lower(self, c: Call) -> list[Launch]:
        w = c.weights["int8_32"]
        kernel = gemv_int8(WARPS, ROWS, UNROLL, c.m, stream=c.context.levers.stream_weights)
        cuts = cuts_for(c, ROWS, SPAN)
        args = (w.q, w.scale, c.x, c.y, c.n, c.k, cuts)
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]
