"""NVFP4 weights times NVFP4 activations (W4A4) on Hopper, which has no FP4 products: the same numbers in BF16."""

from __future__ import annotations

from typing import Any

from atlas_lab.arms.copies.input_scale import INPUT_SCALE, can_scale_input, input_scale
from atlas_lab.arms.gated import PROLOGUES, form, source
from atlas_lab.arms.w4a4 import SNR_DB, rounded_x
from atlas_lab.arms.wgmma.base import addends
from atlas_lab.arms.wgmma.nvfp4 import Nvfp4Wgmma, adds
from atlas_lab.arms.wgmma.tiles import Tile, tightness
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.kernels.activation.quantized import gated_nvfp4_lanes
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS
from atlas_lab.kernels.gemv.mma_lanes import RUN
from atlas_lab.kernels.quantize.lanes_order import THREADS, order_grid
from atlas_lab.kernels.quantize.nvfp4_lanes import quantize_nvfp4_lanes

COLUMNS = 128  # of y in the tiles that are tried here


class Nvfp4W4A4Emulated(Nvfp4Wgmma):
    """The numbers of native W4A4 where there are no FP4 products: x is quantized to NVFP4, under the tensor scale of
    activations that the checkpoint may have, and written as code times block scale, exact in BF16, in the lanes' order;
    then the kernel of nvfp4_wgmma over its copy of the weights. K a multiple of 128. It changes numbers: it quantizes
    activations."""

    name = "nvfp4_w4a4_emulated"
    splits = ()
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=3)
    accuracy = Accuracy(min_snr_db=SNR_DB)
    reduction_class = ReductionClass(
        "wgmma.m64k16.bf16", "each 64 of K by M, in parts by M, N, K, target", rounding="x to NVFP4, output"
    )
    prologues = PROLOGUES
    quantized = staticmethod(rounded_x)

    def __init__(self) -> None:
        few, _ = self.tiles()
        self.kernels = (_quantizer(False), *(self.kernel(t, True) for t in few if t.bn == COLUMNS))
        # the products are tried by nvfp4_wgmma; the other quantizers are for a tensor scale and for gated products
        tiles = [t for tiles in self.tiles() for t in tiles]
        products = (self.kernel(t, True) for t in tiles)
        adding = (self.kernel(t, True, ADDENDS) for t in sorted(tiles, key=tightness) if adds(t))
        gated = (_gated(clamp, scaled) for scaled in (False, True) for clamp in (False, True))
        self.optional_kernels = (_quantizer(True), *gated, *(k for k in products if k not in self.kernels), *adding)

    def _of_many(self, c: Call) -> list[Tile]:
        return self.tiles()[1]

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        verdict = super().eligible(p, ctx)
        return verdict if not verdict else can_scale_input(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        scale = input_scale(p)
        return [*super().finalize(p, ctx), *([scale] if scale is not None else [])]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {"x.ordered": Tensor("bf16", (c.m, c.k))}

    def operands(self, c: Call, t: Tile) -> tuple[Argument, ...]:
        w, tensor_scale, *y = super().operands(c, t)
        return (w, c.weights[INPUT_SCALE].alpha if INPUT_SCALE in c.weights else tensor_scale, *y)

    def lower(self, c: Call) -> list[Launch]:
        t, made = self.tile(c), c.scratch["x.ordered"]
        flags, words = self.to_clear(c, t)
        scaled = INPUT_SCALE in c.weights
        scale = (c.weights[INPUT_SCALE].x,) if scaled else ()
        quantized = Launch(
            _gated(c.prologue_limit > 0, scaled) if c.prologue else _quantizer(scaled),
            grid=order_grid(c.m, c.k, RUN),
            block=THREADS,
            args=(*source(c), *scale, made, flags, c.k, *form(c), words),
            quantizes=True,
            label=f"{self.name} x",
        )
        added, both = addends(c)
        args = (self.x_map(c, made, t), *self.operands(c, t), *added)
        divides = int(not scaled and next(iter(c.weights)).endswith("_reciprocal"))
        kernel = self.kernel(t, True, ADDENDS if added else None)
        return [quantized, self.launch(c, t, kernel, args, (divides, *both))]


def _quantizer(scaled: bool) -> Any:
    return quantize_nvfp4_lanes(RUN, scaled=scaled)


def _gated(clamp: bool, scaled: bool) -> Any:
    return gated_nvfp4_lanes(RUN, clamp=clamp, scaled=scaled)
