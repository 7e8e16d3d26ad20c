"""Arms over FP8 E4M3 weights with one scale for every 128x128 block, for the whole tensor or for a row, in place."""

from __future__ import annotations

from collections.abc import Callable

from atlas_lab.arms.loads import CUTS, cuts_for, k_in_loads, one_pass
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
from atlas_lab.formats.base import BLOCK_128, PER_ROW, PER_TENSOR
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.fp8 import W_ROW, X_ROW, gemm_fp8_block
from atlas_lab.kernels.gemv.fp8 import SPAN, gemv_fp8_block, gemv_fp8_row
from atlas_lab.kernels.lang import Kernel

WARPS, ROWS, UNROLL = 4, 2, 2
# Blocks of a GEMV that an SM is to have registers for, by M: to convert by bits takes more of them.
BLOCKS = {True: {1: 10, 2: 4, 3: 4}, False: {1: 6, 2: 4, 3: 4}}
SCALES = {"f32": L.f32, "bf16": L.bf16}
CONVERTS = L.e4m3x4_f16x2_cvt.needs  # of cards with an instruction for it


def gemvs(family: Callable[..., Kernel], *, native: bool) -> tuple[Kernel, ...]:
    """The kernels of a GEMV, for weights under either type of scale, one to three rows of x and each lever."""
    return tuple(
        family(WARPS, ROWS, UNROLL, m, scale=d, stream=s, native=native, blocks=b)
        for d in SCALES.values()
        for m, b in BLOCKS[native].items()
        for s in (True, False)
    )


def gemv_for(c: Call, family: Callable[..., Kernel], scale: str) -> Kernel:
    """The one for a call, whose scales have that dtype."""
    stream, native = c.context.levers.stream_weights, c.context.target.meets(CONVERTS)
    return family(
        WARPS, ROWS, UNROLL, c.m, scale=SCALES[scale], stream=stream, native=native, blocks=BLOCKS[native][c.m]
    )


# How the scales lie. The kernels' steps between them follow from the key the weight is bound under.
KEYS = {BLOCK_128: "blocks", PER_TENSOR: "tensor"}


def weight_of(c: Call) -> tuple[Fields, tuple[int, int]]:
    """The stored tensors, and how many scales lie between blocks of 128 rows and of 128 K."""
    ((key, w),) = c.weights.items()
    return w, (-(-c.k // 128), 1) if key == "blocks" else (0, 0)


class OverFp8(Arm):
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


class Fp8Gemv(OverFp8):
    """Weights E4M3 `[N, K]` and their block scales as stored, each byte read once for up to three rows of x, which stay
    BF16 (W8A16); FP32 sums on CUDA cores."""

    name = "fp8_gemv"
    rows = rows(1, 3)
    k_multiple = 16
    kernels = gemvs(gemv_fp8_block, native=False)
    optional_kernels = gemvs(gemv_fp8_block, native=True)
    # 16 products, the block's scale, one addition a load, then the butterfly
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + -(-k // SPAN) + 5, extra_roundings=1)
    reduction_class = ReductionClass("fma.f32", f"lane 16 of 512, then a butterfly, {CUTS}", promotion=16)

    def lower(self, c: Call) -> list[Launch]:
        w, steps = weight_of(c)
        kernel = gemv_for(c, gemv_fp8_block, w.scale.dtype)
        cuts = cuts_for(c, ROWS, SPAN)
        args = (w.weight, w.scale, c.x, c.y, c.n, c.k, cuts, *steps)
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]


class Fp8RowGemv(Arm):
    """Weights E4M3 `[N, K]` and a scale for each row as stored, each byte read once for up to three rows of x, which
    stay BF16 (W8A16); FP32 sums on CUDA cores."""

    name = "fp8_row_gemv"
    roles = ("*",)
    rows = rows(1, 3)
    source = "fp8"
    kernels = gemvs(gemv_fp8_row, native=False)
    optional_kernels = gemvs(gemv_fp8_row, native=True)
    # 16 products, one addition a load, the row's scale, then the butterfly
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + -(-k // SPAN) + 5, extra_roundings=1)
    reduction_class = ReductionClass("fma.f32", f"lane 16 of 512, scaled, then a butterfly, {CUTS}", promotion=16)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        if p.weight.geometry != PER_ROW:
            return no("scale-geometry", "reads a scale a row", found=p.weight.geometry, allowed=PER_ROW)
        return k_in_loads(p, 16)

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def lower(self, c: Call) -> list[Launch]:
        w = c.weights["weight"]
        kernel = gemv_for(c, gemv_fp8_row, w.scale.dtype)
        cuts = cuts_for(c, ROWS, SPAN)
        args = (w.weight, w.scale, c.x, c.y, c.n, c.k, cuts)
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]


class Fp8Gemm(OverFp8):
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
        w, steps = weight_of(c)
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
