"""The arm over Q4_K weights on warpgroups, whose activations are quantized to int8 (MMQ); it reads the copy that
`q4k_mma_repacked` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.arms.copies import can_repack_q4_k, repacked_q4_k
from atlas_lab.arms.copies.lanes_q4_k import unpack
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
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import q4_k, q8_1
from atlas_lab.kernels.gemm.wgmma_q4_k import GROUPS, LINES, stage_bytes, wgmma_q4_k
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.q8_1 import GROUP, PIECES, ROWS, SUMS, THREADS, quantize_q8_1
from atlas_lab.kernels.quantize.repack_q4_k import SPAN, UNIT

MAKING = 46  # instructions of a warp for a group, beside those that add up its sums


@dataclass(frozen=True)
class BlockTile(RepackedTile):
    """bm rows of x by bn rows of W, a block of 256 weights of each a stage."""

    span, x_row = SPAN, 2 * SPAN

    @property
    def w_bytes(self) -> int:
        return self.bn // 16 * UNIT

    @property
    def issued(self) -> int:
        """Of a group a multiply-add for each sum and a load for eight; of a stage two more for each."""
        return GROUPS * (MAKING + self.bm // 2 + self.bm // 16) + self.bm

    @property
    def stage(self) -> int:
        return stage_bytes(self.bm, self.bn)


class Q4KMmq(Transposed):
    """Weights Q4_K repacked at load time as q4k_mma_repacked reads them, one copy for both; x quantized to q8_1 (int8,
    a scale and a sum for 32 of K), a launch of its own; sums of integers over 32 of K on tensor cores (wgmma, F16, in
    which sc·q and x's codes are exact) fed by TMA, scaled and added in FP32; any M and N. It changes numbers: it
    quantizes activations."""

    name = "q4k_mmq"
    source = "q4_k"
    pipe = "mma_f16"
    made = BlockTile
    narrow: Sequence[int] = (128,)
    several: Sequence[tuple[int, int, int]] = ((96, 128, 1), (96, 128, 2), (64, 128, 1))
    # two products of a group and one of a block, then fused additions in FP32: 2**-24 each, ten a block, counted twice
    tolerance = Rounded(accumulate="mma_f16", out="bf16", depth=lambda k: 6 + -(-k // (SPAN << 1)))
    accuracy = Accuracy(min_snr_db=20)
    reduction_class = ReductionClass("wgmma.m64k16.f16", "blocks of 256, in parts by M, N, K, target", promotion=GROUP)

    def __init__(self) -> None:
        self.kernels = (quantize_q8_1(), *dict.fromkeys(_kernel(t) for tiles in self.tiles() for t in tiles))

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return can_repack_q4_k(p)

    def finalize(self, p: Projection, ctx: Context) -> list[Derived]:
        return [repacked_q4_k(p)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {
            "x.codes": Tensor("f16", (c.m, c.k)),
            "x.scales": Tensor("f32", (c.k // GROUP, round_up(c.m, ROWS))),
            "x.sums": Tensor("bf16", (c.m, c.k // SPAN * SUMS)),
        }

    def lower(self, c: Call) -> list[Launch]:
        t = self.tile(c)
        codes, scales, sums = (c.scratch[f"x.{name}"] for name in ("codes", "scales", "sums"))
        flags, words = self.to_clear(c, t)
        quantized = Launch(
            quantize_q8_1(),
            grid=(-(-c.m // ROWS), c.k // (8 * PIECES)),
            block=THREADS,
            args=(c.x, codes, scales, sums, flags, c.m, c.k, scales.shape[1], words),
            quantizes=True,
            label=f"{self.name} x",
        )
        of_x = (TensorMap(scales, (GROUPS, t.bm)), TensorMap(sums, (t.bm, SUMS), swizzle=2 * SUMS))
        ((_, w),) = c.weights.items()
        units, across, _ = w.weight.shape
        lines = TensorMap(w.weight.view(0, (units, across * LINES, ROW)), (t.bn // 16, LINES, ROW), promotion=256)
        args = (self.x_map(c, codes, t), *of_x, lines, c.y.data)
        return [quantized, self.launch(c, t, _kernel(t), args)]

    def reference(self, call: Call, x: np.ndarray, weights: Any) -> np.ndarray:
        """The float64 product of quantized x and stored weights, minimums times x's sums as they are stored."""
        step, least = _two_parts(weights, call.n)
        quantized = q8_1.quantize(x.astype(np.float32))
        made: np.ndarray = q8_1.dequantize(quantized) @ step.T - quantized.sums @ least.T
        return made

    def terms(self, weights: Any) -> np.ndarray:
        """|d·sc·q| + |dmin·m|, `[N, K]`, and the rows that fill the last tile: they may cancel."""
        step, least = _two_parts(weights, 16 * sum(len(w["weight"]) for w in weights.values()))
        made: np.ndarray = np.abs(step) + np.repeat(np.abs(least), GROUP, axis=1)
        return made


def _two_parts(weights: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 d·sc·q `[n, K]` and dmin·m `[n, K/32]` of the repacked weight."""
    ((_, stored),) = weights.items()
    blocks = unpack(stored, n)["blocks"].reshape(-1, q4_k.BYTES)
    scale, least = q4_k.group_values(blocks)
    return (scale[..., None] * q4_k.codes(blocks)).reshape(n, -1), least.reshape(n, -1)


def _kernel(t: Tile) -> Kernel:
    return wgmma_q4_k(t.bm, t.bn, t.stages, per_sm(t.bm, t.bn), t.across)
