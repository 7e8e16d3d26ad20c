"""The arm over FP8 weights on warpgroups, whose activations are FP8 too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atlas_lab.arms.fp8 import OverFp8, weight_of
from atlas_lab.arms.gated import PROLOGUES
from atlas_lab.arms.wgmma.base import ADDING, OnWarpgroups, addends, rows_for_tma
from atlas_lab.arms.wgmma.grouped_x import GROUPED, codes_of, holding, quantized_x, quantizing, scales_map
from atlas_lab.arms.wgmma.tiles import TALL, Tile, splitting, tightness
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.launch import Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass, Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import fp8_groups
from atlas_lab.kernels.activation.quantized import gated_fp8_groups
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS
from atlas_lab.kernels.gemm.wgmma_codes import CODES
from atlas_lab.kernels.gemm.wgmma_fp8 import ADDED_CODES, MOST_AHEAD, wgmma_fp8
from atlas_lab.kernels.gemm.wgmma_parts import clear_flags
from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.quantize.fp8_groups import GROUP, ROWS, THREADS, quantize_fp8_groups

UNSHARED = 16  # clocks of a stage that two blocks save which share loads of W: at many rows the card's power is short


class Fp8WgmmaW8A8(OnWarpgroups, OverFp8):
    """Weights E4M3 `[N, K]` and their block scales as stored; x quantized to E4M3 with a scale for 128 of K of a row
    (W8A8), a launch of its own unless x comes so, and y likewise where an epilogue asks for it; tensor cores (wgmma)
    fed by TMA, sums over 128 of K scaled and added in FP32; K a multiple of 16. It changes numbers: it quantizes
    activations."""

    name = "fp8_wgmma_w8a8"
    element_bytes, pipe = 1, "mma_e4m3"
    beside = 4
    narrow = (192, 136, 128, 64)
    splits = ((128, 2), (80, 2))
    wide = ((128, 1, 1), (64, 1, 1))
    tall = ((128, 1, 2), (128, 1, 1))
    # the products of 128 of K, then a fused addition for each in FP32: 2**-24, counted twice
    tolerance = Rounded(accumulate="mma_e4m3", out="bf16", depth=lambda k: 4 + -(-k // (GROUP << 11)))
    accuracy = Accuracy(min_snr_db=26)
    reduction_class = ReductionClass("wgmma.m64k32.e4m3", "ascending K, in parts by M, N, K, target", promotion=GROUP)
    prologues = PROLOGUES
    epilogues = (*ADDING, "quantize")
    quantizes = reads = (GROUPED,)

    def __init__(self) -> None:
        whole, split = self.whole_and_split()
        self.kernels = (quantize_fp8_groups, *map(_kernel, whole))
        gated = (gated_fp8_groups(clamp=False), gated_fp8_groups(clamp=True))
        tiles = sorted((*whole, *split), key=tightness)
        adding = (_kernel(t, ADDENDS) for t in tiles)
        to_codes = (_kernel(t, e) for t in tiles if t.bn % GROUP == 0 for e in (CODES, ADDED_CODES))
        self.optional_kernels = (*gated, clear_flags, *map(_kernel, split), *adding, *to_codes)

    def eligible(self, p: Projection, ctx: Context) -> Verdict:
        return rows_for_tma(p.k, "e4m3") and OverFp8.eligible(self, p, ctx)

    def exposed(self, bm: int, bn: int, down: int) -> int:
        if bn > MOST_AHEAD:  # sums of a tile so wide are scaled while nothing is multiplied
            return bn // 2
        return UNSHARED if bm == TALL and down == 1 else 0

    def finishes(self, c: Call, t: Tile) -> bool:
        return not c.epilogue.quantize or t.bn % GROUP == 0

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return ({} if c.x.format in self.reads else holding(c, "e4m3", GROUP)) | super().scratch(c)

    def lower(self, c: Call) -> list[Launch]:
        w, steps = weight_of(c)
        t = self.tile(c)
        x, of_x = self.x_map(c, quantized_x(c)[0], t), scales_map(c, 1, t.bm)
        maps = (x, self.rows_map(w.weight, t.bn // t.down), of_x)
        scales = replace(w.scale, dtype="u8", shape=(w.scale.bytes,))
        y = codes_of(c.y, c.m, c.n) if c.epilogue.quantize else (c.y.data,)
        added, both = addends(c)
        tail = (*steps, int(w.scale.dtype == "bf16"), *(of_y.shape[1] for of_y in y[1:]), *both)
        asked = " ".join(part for part, wanted in ((ADDENDS, added), (CODES, y[1:])) if wanted)
        return [*self._first(c, t), self.launch(c, t, _kernel(t, asked or None), (*maps, scales, *y, *added), tail)]

    def _first(self, c: Call, t: Tile) -> list[Launch]:
        """What quantizes x and clears flags, where there is any of that."""
        if c.x.format in self.reads:
            return self.cleared(c, t)
        order = gated_fp8_groups(clamp=c.prologue_limit > 0) if c.prologue else quantize_fp8_groups
        return [quantizing(c, order, ROWS, THREADS, self.to_clear(c, t), f"{self.name} x")]

    def quantized(self, x: np.ndarray, weights: Any) -> np.ndarray:
        return fp8_groups.rounded(x)


def _kernel(t: Tile, epilogue: str | None = None) -> Kernel:
    return wgmma_fp8(t.bm, t.bn, t.stages, t.across, t.down, epilogue=epilogue, **splitting(t))
