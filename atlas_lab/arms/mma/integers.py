"""Arms of class T over integer codes: Q4_K blocks in place and repacked, Q2_0 repacked, int8 made of any weight at load
time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_lab.arms.copies.int8 import can_int8, int8_32
from atlas_lab.arms.copies.lanes_q2_0 import can_repack_q2_0, repacked_q2_0
from atlas_lab.arms.copies.lanes_q4_k import can_repack_q4_k, repacked_q4_k, unpack
from atlas_lab.arms.copies.shapes import agrees, multiples
from atlas_lab.arms.mma.base import Mma, ascending, class_t, rounded, under
from atlas_lab.arms.mma.forms import Form, Launched
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.numbers import Accuracy
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict
from atlas_lab.formats import q4_k
from atlas_lab.kernels.gemv import mma_int8, mma_q2_0, mma_q4_k, mma_q4_k_lanes
from atlas_lab.kernels.gemv.columns import TILE

GROUPS = {64: "q2_lanes_64", 128: "q2_lanes_128"}


class Q4KMma(Mma):
    """Blocks as stored. A weight is d·sc·(q - 8) + (8·d·sc - dmin·m): codes less 8 are exact in BF16, and the second
    part multiplies the sum of x over its group of 32."""

    source = "q4_k"
    family = staticmethod(mma_q4_k.mma_q4_k)
    unit, span, weight_bytes, issue = mma_q4_k.UNIT, mma_q4_k.SPAN, 144 / 256, 0.25
    forms = (Form(4, 1, 1, 1), Form(8, 2, 2, 1))
    tiles = 2
    caps = MappingProxyType({(1, 2): 96, (2, 1): 96, (2, 2): 136})
    # a group: two products, then its scale and its least value, each of which is rounded
    tolerance = rounded(lambda k: 2 + ascending(mma_q4_k.SPAN, 2, 4, 8)(k), 2)
    reduction_class = class_t("blocks of 256", promotion=32)

    def fits(self, p: Projection) -> Verdict:
        return agrees(p)

    def declare(self, p: Projection, key: str) -> Bind:
        return Bind(p.weight, key="weight" + key)

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return (w.blocks,)

    def terms(self, weights: Mapping[str, Mapping[str, np.ndarray]]) -> np.ndarray:
        """|d·sc·(q - 8)| + |8·d·sc - dmin·m|, `[N, K]`: they may cancel where many weights of a group are alike."""
        return np.concatenate([_two_parts(w["blocks"], -8) for w in weights.values()])


class Q4KMmaRepacked(Mma):
    """Blocks repacked at load time, of the stored size: each lane loads its own operand. A weight is d·sc·(16 + q) -
    (16·d·sc + dmin·m): 16 + q are the bits of a BF16 around those of q, and the second part is a product of sc and m,
    exact in BF16, and the sums of x over each group of 32."""

    source = "q4_k"
    family = staticmethod(mma_q4_k_lanes.mma_q4_k_lanes)
    unit, span, weight_bytes, issue = mma_q4_k_lanes.HELD, mma_q4_k_lanes.SPAN, 144 / 256, 0.15
    forms = (
        *(Form(4, 2, 2, 1), Form(4, 1, 1, 1), Form(4, 1, 1, 2), Form(12, 2, 2, 1)),
        *(Form(20, 2, 2, 1, 1, 2, 1, 1), Form(16, 2, 2, 1, kept=1, wide_kept=1)),
    )
    caps = MappingProxyType({(1, 1): 80, (1, 2): 96, (2, 1): 128, (2, 2): 168})
    ragged = True
    # a unit: two products a group and its scale, in turn, then two products that take away the second part
    tolerance = rounded(lambda k: 16 + ascending(mma_q4_k_lanes.SPAN, 2, 4, 20)(k), 2)
    reduction_class = class_t("blocks of 256, the minimums last", promotion=32)

    def _launched(self, form: Form, m: int, way: str = "") -> Launched:
        """As many row tiles for few rows of x as for many."""
        one = super()._launched(form, m, way)
        return one._replace(tiles=1 if one.kept else form.wide_tiles)

    def fits(self, p: Projection) -> Verdict:
        return can_repack_q4_k(p)

    def declare(self, p: Projection, key: str) -> Derived:
        return under(repacked_q4_k(p), key)

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return (w.weight,)

    def count(self, w: Fields) -> int:
        return TILE * super().count(w)

    def terms(self, weights: Mapping[str, Mapping[str, np.ndarray]]) -> np.ndarray:
        """|d·sc·(q + 16)| + |16·d·sc + dmin·m|, `[N, K]` and the rows that fill the last tile: they may cancel."""
        return np.concatenate([_two_parts(unpack(w, TILE * len(w["weight"]))["blocks"], 16) for w in weights.values()])


def _two_parts(stored: np.ndarray, offset: int) -> np.ndarray:
    """|d·sc·(q + offset)| + |offset·d·sc + dmin·m| of stored blocks, `[N, K]`."""
    blocks = stored.reshape(-1, q4_k.BYTES)
    scale, least = q4_k.group_values(blocks)
    product = np.abs(scale[..., None] * (q4_k.codes(blocks).astype(np.float64) + offset))
    terms: np.ndarray = product + np.abs(offset * scale + least)[..., None]
    return terms.reshape(len(stored), -1)


class Q2Mma(Mma):
    """Blocks of 64 or 128 repacked at load time into the lanes' own order, of the stored size; codes less 1 are exact
    in BF16, and the sums over a group are scaled in FP32."""

    source = "q2_0"
    family = staticmethod(mma_q2_0.mma_q2_0)
    unit, span, weight_bytes, issue = 768, mma_q2_0.SPAN, 2.25 / 8, 0.2
    forms = (
        *(Form(8, 2, 2, 2), Form(4, 2, 2, 2)),
        *(Form(8, 2, 10, 1, wide_kept=5), Form(8, 10, 10, 1, kept=5, wide_kept=5)),
    )
    caps = MappingProxyType({(1, 1): 56, (1, 2): 88, (2, 1): 88, (2, 2): 96})
    variants = tuple({"group": g} for g in GROUPS)
    tolerance = rounded(lambda k: 8 + ascending(mma_q2_0.SPAN, 1, 4, 8)(k), 2)
    reduction_class = class_t("units of 128", promotion=64)

    def cap(self, columns: int, tiles: int, variant: Mapping[str, Any]) -> int:
        # two scales a row and unit take more
        return 104 if (columns, tiles, variant["group"]) == (2, 2, 64) else super().cap(columns, tiles, variant)

    def fits(self, p: Projection) -> Verdict:
        return can_repack_q2_0(p)

    def declare(self, p: Projection, key: str) -> Derived:
        return under(repacked_q2_0(p), key)

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        return {"group": next(g for g, name in GROUPS.items() if name == key)}

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return (w.weight,)


class Int8Mma(Mma):
    """int8 with one scale for 32 weights of a row, made of the weight's values at load time; exact in BF16, sums over
    32 of K are scaled in FP32. It changes numbers: it re-quantizes."""

    source = ""
    family = staticmethod(mma_int8.mma_int8)
    unit, span, weight_bytes, issue = mma_int8.UNIT, mma_int8.SPAN, 1.125, 0.1
    forms = (*(Form(8, 2, 2, 1), Form(4, 3, 4, 1), Form(8, 4, 4, 1, kept=5, wide_kept=5)),)
    caps = MappingProxyType({(1, 1): 64, (2, 1): 88})
    tolerance = rounded(lambda k: 2 + ascending(mma_int8.SPAN, 4, 4, 8)(k), 2)
    reduction_class = class_t("units of 128", promotion=32)
    accuracy = Accuracy(min_snr_db=42)

    def fits(self, p: Projection) -> Verdict:
        verdict = can_int8(p)
        return verdict if not verdict else multiples(p, k_multiple=mma_int8.SPAN)

    def declare(self, p: Projection, key: str) -> Derived:
        return under(int8_32(p), key)

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return w.q, w.scale
