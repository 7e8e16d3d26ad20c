"""The arm over Q2_0 weights that makes them BF16 in each call, and multiplies those on warpgroups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.arms.q2_0 import GROUPS, OverQ2
from atlas_lab.arms.wgmma.base import addends
from atlas_lab.arms.wgmma.bf16 import Bf16Wgmma
from atlas_lab.arms.wgmma.tiles import Tile, tightness
from atlas_lab.core.call import Call
from atlas_lab.core.launch import Argument, Launch
from atlas_lab.core.numbers import Accuracy, ReductionClass
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.kernels.gemm.wgmma_addends import ADDENDS
from atlas_lab.kernels.quantize.q2_0_bf16 import PIECE, THREADS, dequantize_q2_0


class Q2Dequant(OverQ2, Bf16Wgmma):
    """Blocks of 64 or 128 two-bit weights as stored, made BF16 `[N, K]` in scratch memory by a launch of each call,
    their scales rounded to BF16; then the product of bf16_wgmma. It changes numbers: it rounds scales."""

    name = "q2_dequant"
    # of bf16_wgmma's kernels a few: most of the time is that of writing and reading W
    narrow, splits = (136, 128), ()
    wide = ((256, 1, 2), (256, 1, 1), (136, 1, 1))
    tall = ()
    accuracy = Accuracy(min_snr_db=1.5)  # what normal values keep in two bits
    reduction_class = ReductionClass(
        "wgmma.m64k16.bf16", "ascending K, in parts by M, N, K, target", rounding="weights, output"
    )

    def __init__(self) -> None:
        tiles = [t for tiles in self.tiles() for t in tiles]
        self.kernels = (*(dequantize_q2_0(g) for g in GROUPS.values()), *map(self.kernel, tiles))
        self.optional_kernels = tuple(self.kernel(t, ADDENDS) for t in sorted(tiles, key=tightness))

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return super().scratch(c) | {"w": Tensor("bf16", (c.n, c.k))}

    def lower(self, c: Call) -> list[Launch]:
        ((key, w),) = c.weights.items()
        t, made = self.tile(c), c.scratch["w"]
        flags, words = self.to_clear(c, t)
        pieces = made.elements // PIECE
        weights = Launch(
            dequantize_q2_0(GROUPS[key]),
            grid=-(-pieces // THREADS),
            block=THREADS,
            args=(w.blocks, made, flags, pieces, words),
            label=f"{self.name} w",
        )
        added, both = addends(c)
        args = (self.x_map(c, c.x.data, t), *self.operands(c, t), *added)
        kernel = self.kernel(t, ADDENDS if added else None)
        # W is what the launch before makes, and the product loads it before it waits
        return [weights, replace(self.launch(c, t, kernel, args, both), pdl=False)]

    def operands(self, c: Call, t: Tile) -> tuple[Argument, ...]:
        return self.rows_map(c.scratch["w"], t.bn // t.down), c.y.data

    def reference(self, call: Call, x: np.ndarray, weights: Any) -> np.ndarray:
        """The float64 product with weights rounded to BF16."""
        ((key, stored),) = weights.items()
        values = get(f"q2_0_g{GROUPS[key]}").dequantize(stored).astype(np.float32)
        made: np.ndarray = x @ values.astype(ml_dtypes.bfloat16).astype(np.float64).T
        return made
