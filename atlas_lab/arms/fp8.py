"""Arms over FP8 E4M3 weights with one scale for every 128x128 block or for the whole tensor, read in place."""

from __future__ import annotations

from atlas_lab.arms.loads import k_in_loads
from atlas_lab.arms.tiling import RAGGED, TILES, tile_for
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats.base import BLOCK_128, PER_TENSOR
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.fp8 import W_ROW, X_ROW, gemm_fp8_block
from atlas_lab.kernels.gemv.columns import TILE
from atlas_lab.kernels.gemv.few import few_fp8_block
from atlas_lab.kernels.gemv.fp8 import SPAN, gemv_fp8_block

WARPS, ROWS, UNROLL = 4, 2, 2
SCALES = {"f32": L.f32, "bf16": L.bf16}
FEW_WARPS = 8
# Spans in flight by columns of 8 rows of x: what the registers of every architecture hold.
DEPTHS = {1: 5, 2: 2}


# How the scales lie. The kernels' steps between them follow from the key the weight is bound under.
KEYS = {BLOCK_128: "blocks", PER_TENSOR: "tensor"}


def _weight(c: Call) -> tuple[Fields, tuple[int, int]]:
    """The stored tensors, and how many scales lie between blocks of 128 rows and of 128 K."""
    ((key, w),) = c.weights.items()
    return w, (-(-c.k // 128), 1) if key == "blocks" else (0, 0)


class _OverFp8(Arm):
    """What the arms share: any role, a grid of scales, nothing copied."""

    roles = ("*",)
    source = "fp8"
    k_multiple = 1
    """What K must be a multiple of: the weights of one 16-byte load, or 1 where there is a kernel for any K."""

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        whole = k_in_loads(p, self.k_multiple)
        if not whole:
            return whole
        if p.weight.geometry not in KEYS:
            # a per-row scale of [N, 1] is long enough to be read as a grid, in bounds and wrong
            allowed = " or ".join(map(str, KEYS))
            return no("scale-geometry", "reads a grid of block scales", found=p.weight.geometry, allowed=allowed)
        return yes()

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight, key=KEYS[p.weight.geometry])]


class Fp8Gemv(_OverFp8):
    """Weights E4M3 `[N, K]` and their block scales as stored; x stays BF16 (W8A16); FP32 sums on CUDA cores."""

    name = "fp8_gemv"
    rows = rows(1)
    k_multiple = 16
    kernels = tuple(
        gemv_fp8_block(WARPS, ROWS, UNROLL, scale=d, stream=s) for d in SCALES.values() for s in (True, False)
    )
    # 16 products, the block's scale, one addition a load, then the butterfly
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + -(-k // SPAN) + 5, extra_roundings=1)
    reduction_class = ReductionClass("fma.f32", "lane 16 of 512, then a butterfly", promotion=16)

    def lower(self, c: Call) -> list[Launch]:
        w, steps = _weight(c)
        kernel = gemv_fp8_block(
            WARPS, ROWS, UNROLL, scale=SCALES[w.scale.dtype], stream=c.context.levers.stream_weights
        )
        grid = -(-c.n // (WARPS * ROWS))
        args = (w.weight, w.scale, c.x, c.y, c.n, c.k, *steps)
        return [Launch(kernel, grid=grid, block=32 * WARPS, args=args, flops=2 * c.n * c.k, label=self.name)]


class Fp8Few(_OverFp8):
    """Weights E4M3 `[N, K]` and their block scales as stored, each byte read once for up to 16 rows of x; tensor cores
    (mma.sync) with the weights as the operand of 16 rows, made BF16 in registers, exactly (W8A16)."""

    name = "fp8_few"
    rows = rows(2, 16)
    k_multiple = 16
    kernels = tuple(
        few_fp8_block(FEW_WARPS, depth=n, columns=c, scale=d) for c, n in DEPTHS.items() for d in SCALES.values()
    )
    # a warp's spans of 64 K: four products, the block's scale and one addition each; then the warps
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: 4 + -(-k // 512) + 8, extra_roundings=1)
    reduction_class = ReductionClass("mma.m16n8k16.bf16", "spans of 64 over 8 warps", splits=8, promotion=64)

    def lower(self, c: Call) -> list[Launch]:
        w, steps = _weight(c)
        columns = 1 if c.m <= 8 else 2
        return [
            Launch(
                few_fp8_block(FEW_WARPS, depth=DEPTHS[columns], columns=columns, scale=SCALES[w.scale.dtype]),
                grid=-(-c.n // TILE),
                block=32 * FEW_WARPS,
                args=(w.weight, w.scale, c.x, c.y, c.m, c.n, c.k, *steps),
                flops=2 * c.m * c.n * c.k,
                pipe="mma_bf16",
                label=self.name,
            )
        ]


class Fp8Gemm(_OverFp8):
    """Weights E4M3 `[N, K]` and their block scales as stored, made BF16 in registers, exactly (W8A16); tensor cores
    (mma.sync); sums over 128 of K are scaled and added in FP32; any M, N and K."""

    name = "fp8_gemm"
    rows = rows_from(1)
    kernels = tuple(
        k
        for d in SCALES.values()
        for k in (
            *(gemm_fp8_block(**t.parameters, scale=d) for t in TILES),
            gemm_fp8_block(**RAGGED.parameters, scale=d, x_vector=2, w_vector=1, pairs=False),
        )
    )
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: 8 + -(-k // 128), extra_roundings=1)
    reduction_class = ReductionClass("mma.m16n8k16.bf16", "K permuted inside 16", promotion=128)

    def lower(self, c: Call) -> list[Launch]:
        w, steps = _weight(c)
        ragged = c.k % 16 != 0 or c.n % 2 != 0
        tile = RAGGED if ragged else tile_for(c.m, c.n, c.context.target.sms)
        vectors = {"x_vector": 2, "w_vector": 1, "pairs": False} if ragged else {}
        return [
            Launch(
                gemm_fp8_block(**tile.parameters, scale=SCALES[w.scale.dtype], **vectors),
                grid=tile.count(c.m, c.n),
                block=tile.threads,
                shared=tile.stages * (tile.bm * X_ROW + tile.bn * W_ROW),
                args=(c.x, w.weight, w.scale, c.y, c.m, c.n, c.k, *steps),
                flops=2 * c.m * c.n * c.k,
                pipe="mma_bf16",
                label=self.name,
            )
        ]
