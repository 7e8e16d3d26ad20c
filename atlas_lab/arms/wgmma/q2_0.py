"""The arm over Q2_0 weights on warpgroups, whose activations are quantized to int8 (MMQ); it reads the copy that
`q2_mma` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies import can_repack_q2_0, repacked_q2_0
from atlas_lab.arms.copies.lanes_q2_0 import unpack
from atlas_lab.arms.wgmma.repacked_tiles import RepackedTile, per_sm
from atlas_lab.arms.wgmma.tiles import Tile
from atlas_lab.arms.wgmma.transposed import Transposed
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Derived
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor, round_up
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats import FORMATS, q8_1
from atlas_lab.kernels.gemm.wgmma_q2_0 import GROUPS, LINE, LINES, UNIT, stage_bytes, wgmma_q2_0
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.q8_1 import GROUP, ROWS, SPAN, THREADS, quantize_q8_1

FORMAT = "q2_0_g128"
MAKING = 46  # instructions of a warp for 32 of K, beside those that add up its sums


@dataclass(frozen=True)
class UnitTile(RepackedTile):
    """bm rows of x by bn rows of W, 128 of K of each a stage."""

    @property
    def w_bytes(self) -> int:
        return self.bn // 16 * UNIT

    @property
    def issued(self) -> int:
        """Of 32 of K a multiply-add for each sum and a load for eight; of a stage another one for each."""
        return GROUPS * (MAKING + self.bm // 2 + self.bm // 16) + self.bm // 2

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)


class Q2Mmq(Transposed):
    """Weights Q2_0 in groups of 128, repacked at load time as q2_mma reads them, one copy for both; x quantized to q8_1
    (int8, a scale for 32 of K), a launch of its own; sums of integers over 32 of K on tensor cores (wgmma, F16, in
    which codes are exact) fed by TMA, scaled and added in FP32; K a multiple of 128. It changes numbers: it quantizes
    activations."""

    name = "q2_mmq"
    source = "q2_0"
    pipe = "mma_f16"
    made = UnitTile
    narrow: Sequence[int] = (128,)
    several: Sequence[tuple[int, int, int]] = ((96, 128, 1), (64, 128, 1))
    # two products of 32 of K, then fused additions in FP32: 2**-24 each, five for 128, counted twice
    tolerance = Rounded(accumulate="mma_f16", out="bf16", depth=lambda k: 6 + -(-k // SPAN))
    accuracy = Accuracy(min_snr_db=1)  # of normal weights, of which two bits keep 2 dB
    reduction_class = ReductionClass("wgmma.m64k16.f16", "groups of 128, in parts by M, N, K, target", promotion=GROUP)

    def __init__(self) -> None:
        products = (_kernel(t) for tiles in self.tiles() for t in tiles)
        self.kernels = (self.order, *dict.fromkeys(products))

    @property
    def order(self) -> Kernel:
        return quantize_q8_1(with_sums=False)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        verdict = can_repack_q2_0(p)
        if verdict and p.weight.geometry.group != SPAN:
            return no("scale-geometry", "reads groups of 128", found=p.weight.format, allowed=FORMAT)
        return verdict

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_q2_0(p)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {
            "x.codes": Tensor("f16", (c.m, c.k)),
            "x.scales": Tensor("f32", (c.k // GROUP, round_up(c.m, ROWS))),
        }

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        codes, scales = c.scratch["x.codes"], c.scratch["x.scales"]
        flags, words = self.to_clear(c, t)
        quantized = Launch(
            self.order,
            grid=(-(-c.m // ROWS), c.k // SPAN),
            block=THREADS,
            args=(c.x, codes, scales, flags, c.m, c.k, scales.shape[1], words),
            quantizes=True,
            label=f"{self.name} x",
        )
        ((_, w),) = c.weights.items()
        units, across, _ = w.weight.shape
        lines = w.weight.view(0, (units, across * LINES, LINE))
        of_w = TensorMap(lines, (t.bn // 16, LINES, LINE), promotion=256)
        args = (self.x_map(c, codes, t), TensorMap(scales, (GROUPS, t.bm)), of_w, c.y.data)
        return [quantized, self.launch(c, t, _kernel(t), args)]

    def reference(self, call: Call, x: np.ndarray, weights: Any) -> np.ndarray:
        """The float64 product of quantized x and stored weights."""
        ((_, stored),) = weights.items()
        w = FORMATS[FORMAT].dequantize(unpack(stored, call.n))
        made: np.ndarray = q8_1.dequantize(q8_1.quantize(x.astype(np.float32))) @ w.T
        return made


def _kernel(t: Tile) -> Kernel:
    return wgmma_q2_0(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn))
