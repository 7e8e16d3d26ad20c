"""Arms over NVFP4 weights (ModelOpt and compressed-tensors), read in place."""

from __future__ import annotations

from atlas_lab.arms.loads import CUTS, cuts_for, k_in_loads, one_pass
from atlas_lab.arms.tiling import RAGGED, TILES, tile_for
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows, rows_from
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats.base import GROUP_16, GROUP_16_RECIPROCAL
from atlas_lab.kernels.gemm.nvfp4 import S_ROW, W_ROW, X_ROW, gemm_nvfp4
from atlas_lab.kernels.gemv.nvfp4 import SPAN, gemv_nvfp4

WARPS, ROWS, UNROLL = 4, 2, 1
# Whether the tensor scale divides. The kernels' parameter follows from the key the weight is bound under.
CONVENTIONS = {GROUP_16: "direct", GROUP_16_RECIPROCAL: "reciprocal"}


class _OverNvfp4(Arm):
    """What the arms share: any role, group scales below a tensor scale, nothing copied."""

    roles = ("*",)
    source = "nvfp4"
    k_multiple = 1
    """What K must be a multiple of: the weights of one 16-byte load, or 1 where there is a kernel for any K."""

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        whole = k_in_loads(p, self.k_multiple)
        if not whole:
            return whole
        if p.weight.geometry not in CONVENTIONS:
            allowed = " or ".join(map(str, CONVENTIONS))
            return no("scale-geometry", "reads group scales", found=p.weight.geometry, allowed=allowed)
        return yes()

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight, key=CONVENTIONS[p.weight.geometry])]


class Nvfp4Gemv(_OverNvfp4):
    """Codes, block scales and tensor scale as stored, each byte read once for up to three rows of x, which stay BF16
    (W4A16); FP32 sums on CUDA cores."""

    name = "nvfp4_gemv"
    rows = rows(1, 3)
    k_multiple = 32
    kernels = tuple(gemv_nvfp4(WARPS, ROWS, UNROLL, m, stream=s) for m in (1, 2, 3) for s in (True, False))
    # 16 products, their scale, two additions a load, the butterfly, the tensor scale
    tolerance = Rounded(accumulate="f32", out="bf16", depth=lambda k: 16 + 2 * -(-k // SPAN) + 5, extra_roundings=2)
    reduction_class = ReductionClass("fma.f32", f"lane 32 of 1024, then a butterfly, {CUTS}", promotion=16)

    def cuts(self, c: Call) -> int:
        """K is cut into two to the power of this many ranges."""
        return cuts_for(c, ROWS, SPAN)

    def lower(self, c: Call) -> list[Launch]:
        ((key, w),) = c.weights.items()
        kernel = gemv_nvfp4(WARPS, ROWS, UNROLL, c.m, stream=c.context.levers.stream_weights)
        cuts = self.cuts(c)
        args = (w.weight, w.scale, w.global_scale, c.x, c.y, c.n, c.k, cuts, int(key == "reciprocal"))
        return [one_pass(c, kernel, WARPS, ROWS, cuts, args, self.name)]


class Nvfp4Gemv64(Nvfp4Gemv):
    """As nvfp4_gemv with 64 threads a row whatever the shape: two warps take half of K each, added in order."""

    name = "nvfp4_gemv_64"
    reduction_class = ReductionClass("fma.f32", "lane 32 of 1024, then a butterfly", splits=2, promotion=16)

    def cuts(self, c: Call) -> int:
        return 1


class Nvfp4Gemm(_OverNvfp4):
    """Codes and scales as stored; weights made BF16 in registers, exactly (W4A16); tensor cores (mma.sync), FP32
    sums in ascending K, the tensor scale on the sums; any M, N and any K the format has."""

    name = "nvfp4_gemm"
    rows = rows_from(1)
    kernels = tuple(
        k
        for r in (False, True)
        for k in (
            *(gemm_nvfp4(**t.parameters, reciprocal=r) for t in TILES),
            gemm_nvfp4(**RAGGED.parameters, reciprocal=r, w_vector=8, s_vector=1, pairs=False),
        )
    )
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=2)
    reduction_class = ReductionClass("mma.m16n8k16.bf16", "K permuted inside 32")

    def lower(self, c: Call) -> list[Launch]:
        ((key, w),) = c.weights.items()
        ragged = c.k % 64 != 0 or c.n % 2 != 0
        tile = RAGGED if ragged else tile_for(c.m, c.n, c.context.target.sms)
        vectors = {"w_vector": 8, "s_vector": 1, "pairs": False} if ragged else {}
        return [
            Launch(
                gemm_nvfp4(**tile.parameters, reciprocal=key == "reciprocal", **vectors),
                grid=tile.count(c.m, c.n),
                block=tile.threads,
                shared=tile.stages * (tile.bm * X_ROW + tile.bn * (W_ROW + S_ROW)),
                args=(c.x, w.weight, w.scale, w.global_scale, c.y, c.m, c.n, c.k),
                flops=2 * c.m * c.n * c.k,
                pipe="mma_bf16",
                label=self.name,
            )
        ]
