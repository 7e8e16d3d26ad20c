"""Arms over Q2_0 blocks of ggml, read in place."""

from __future__ import annotations

from atlas_lab.arms.loads import CUTS, cuts_for, one_pass
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.kernels.gemv.q2_0 import SPAN, gemv_q2_0

WARPS, ROWS, UNROLL = 4, 4, 2
# Weights a block. The kernels' parameter follows from the key the weight is bound under.
GROUPS = {"groups of 64": 64, "groups of 128": 128}


class OverQ2(Arm):
    """Over blocks of 64 or 128 weights as stored."""

    source = "q2_0"

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        group = p.weight.geometry.group
        if group not in GROUPS.values():
            return no("scale-geometry", "reads groups of 64 or 128", found=p.weight.geometry, allowed="64 or 128")
        if p.k % group:
            allowed = f"{group}, {2 * group}, {3 * group}, ..."
            return no("k-multiple", f"K must be a multiple of {group}", found=p.k, allowed=allowed)
        return yes()

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight, key=f"groups of {p.weight.geometry.group}")]


class Q2Gemv(OverQ2):
    """Blocks of 64 or 128 two-bit weights as stored, each byte read once for up to three rows of x, which stay BF16;
    FP32 sums on CUDA cores."""

    name = "q2_gemv"
    roles = ("*",)
    rows = rows(1, 3)
    kernels = tuple(gemv_q2_0(WARPS, ROWS, UNROLL, g, m) for g in GROUPS.values() for m in (1, 2, 3))
    # 16 products, their scale, one addition a load, then the butterfly
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + -(-k // SPAN) + 5, extra_roundings=1)
    reduction_class = ReductionClass("fma.f32", f"lane 16 codes of 512, then a butterfly, {CUTS}", promotion=16)

    def lower(self, c: Call) -> list[Launch]:
        ((key, w),) = c.weights.items()
        cuts = cuts_for(c, ROWS, SPAN)
        args = (w.blocks, c.x, c.y, c.n, c.k, cuts)
        return [one_pass(c, gemv_q2_0(WARPS, ROWS, UNROLL, GROUPS[key], c.m), WARPS, ROWS, cuts, args, self.name)]
