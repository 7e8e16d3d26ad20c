"""Arms over BF16 weights, read in place."""

from __future__ import annotations

from atlas_lab.arms.loads import CUTS, cuts_for, k_in_loads, one_pass
from atlas_lab.arms.tiling import LARGE_PLAIN, RAGGED, TILES_PLAIN, tile_for
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.gemm.bf16 import gemm_bf16
from atlas_lab.kernels.gemm.tile import BK
from atlas_lab.kernels.gemv.bf16 import SPAN, gemv_bf16

WARPS, ROWS, UNROLL = 4, 2, 4


class Bf16Gemv(Arm):
    """Weights BF16 `[N, K]` as stored; FP32 sums on CUDA cores; one pass over the weight for up to three rows of x, a
    warp for two rows of it."""

    name = "bf16_gemv"
    roles = ("*",)
    rows = rows(1, 3)
    source = "bf16"
    kernels = tuple(gemv_bf16(WARPS, ROWS, UNROLL, m, stream=s) for m in (1, 2, 3) for s in (True, False))
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 8 * -(-k // SPAN) + 5)
    reduction_class = ReductionClass("fma.f32", f"lane 8 of 256, then a butterfly, {CUTS}")

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return k_in_loads(p, 8)

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def lower(self, c: Call) -> list[Launch]:
        kernel = gemv_bf16(WARPS, ROWS, UNROLL, c.m, stream=c.context.levers.stream_weights)
        cuts = cuts_for(c, ROWS, SPAN)
        args = (c.weights["weight"].weight, c.x, c.y, c.n, c.k, cuts)
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]


class Bf16Gemm(Arm):
    """Weights BF16 `[N, K]` as stored; tensor cores (mma.sync), FP32 sums in ascending K; any M, N and K."""

    name = "bf16_gemm"
    roles = ("*",)
    rows = rows_from(1)
    source = "bf16"
    kernels = (
        *(gemm_bf16(**t.parameters) for t in TILES_PLAIN),
        gemm_bf16(**RAGGED.parameters, x_vector=2, w_vector=2, pairs=False),
    )
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16))
    reduction_class = ReductionClass("mma.m16n8k16.bf16", "ascending K")

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def lower(self, c: Call) -> list[Launch]:
        ragged = c.k % 8 != 0 or c.n % 2 != 0
        tile = RAGGED if ragged else tile_for(c.m, c.n, c.context.target.sms, LARGE_PLAIN)
        vectors = {"x_vector": 2, "w_vector": 2, "pairs": False} if ragged else {}
        return [
            Launch(
                gemm_bf16(**tile.parameters, **vectors),
                grid=tile.count(c.m, c.n),
                block=tile.threads,
                shared=tile.stages * (tile.bm + tile.bn) * 2 * BK,
                args=(c.x, c.weights["weight"].weight, c.y, c.m, c.n, c.k),
                flops=2 * c.m * c.n * c.k,
                pipe="mma_bf16",
                label=self.name,
            )
        ]
