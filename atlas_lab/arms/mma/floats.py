"""Arms of class T over BF16 and FP8 weights, read in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from atlas_lab.arms.fp8 import KEYS, SCALES
from atlas_lab.arms.loads import k_in_loads
from atlas_lab.arms.mma.base import Mma, ascending, class_t, rounded
from atlas_lab.arms.mma.forms import Form
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.declare import Bind
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.formats.base import PER_ROW
from atlas_lab.kernels.gemv.mma_bf16 import SPAN as BF16_SPAN
from atlas_lab.kernels.gemv.mma_bf16 import UNIT as BF16_UNIT
from atlas_lab.kernels.gemv.mma_bf16 import mma_bf16
from atlas_lab.kernels.gemv.mma_fp8 import SPAN, UNIT, mma_fp8


class Bf16Mma(Mma):
    """Weights BF16 `[N, K]` as stored."""

    source = "bf16"
    family = staticmethod(mma_bf16)
    unit, span, weight_bytes, issue = BF16_UNIT, BF16_SPAN, 2, 0.03
    forms = (
        *(Form(8, 3, 2, 1), Form(4, 1, 1, 2), Form(12, 2, 1, 1), Form(16, 3, 2, 1, 4, 4)),
        *(Form(16, 5, 4, 1, kept=5, wide_kept=5), Form(16, 5, 4, 1, kept=4, wide_kept=4)),
    )
    caps = MappingProxyType({(1, 1): 56, (1, 2): 72, (2, 1): 72, (2, 2): 96})
    variants = ({"whole": True}, {"whole": False})
    tolerance = rounded(ascending(BF16_SPAN, 4, 4, 16), 0)
    reduction_class = class_t("units of 64")

    def fits(self, p: Projection) -> Verdict:
        return k_in_loads(p, 8)

    def declare(self, p: Projection, key: str) -> Bind:
        return Bind(p.weight, key="weight" + key)

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        return {"whole": c.k % BF16_SPAN == 0}

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return (w.weight,)


class Fp8Mma(Mma):
    """Weights E4M3 `[N, K]` and their scales as stored, of 128x128 blocks or of the whole tensor; made BF16 in
    registers, exactly (W8A16); sums over 128 of K are scaled and added."""

    source = "fp8"
    family = staticmethod(mma_fp8)
    unit, span, weight_bytes, issue = UNIT, SPAN, 1, 0.11
    forms: Sequence[Form] = (
        *(Form(8, 2, 2, 1), Form(4, 1, 1, 2), Form(4, 1, 1, 3), Form(16, 2, 2, 1, 4, 4)),
        *(Form(2, 1, 1, 1, abreast=9), Form(6, 1, 1, 1, abreast=3)),
    )
    caps = MappingProxyType({(1, 1): 56, (1, 2): 88, (2, 1): 80, (2, 2): 96, (2, 3): 152})
    apart, pair_apart = 16, 16
    variants = tuple({"whole": w, "scale": d} for d in SCALES.values() for w in (True, False))
    tolerance = rounded(lambda k: 8 + ascending(SPAN, 1, 2, 16)(k), 1)
    reduction_class = class_t("units of 128", promotion=128)

    def fits(self, p: Projection) -> Verdict:
        if p.weight.geometry not in KEYS:
            allowed = " or ".join(map(str, KEYS))
            return no("scale-geometry", "reads a grid of block scales", found=p.weight.geometry, allowed=allowed)
        return k_in_loads(p, 16)

    def declare(self, p: Projection, key: str) -> Bind:
        return Bind(p.weight, key=KEYS[p.weight.geometry] + key)

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        return {"whole": c.k % SPAN == 0, "scale": SCALES[w.scale.dtype]}

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return w.weight, w.scale

    def scalars(self, key: str, c: Call) -> tuple[int, ...]:
        return (-(-c.k // SPAN), 1) if key == "blocks" else (0, 0)


class Fp8RowMma(Fp8Mma):
    """Weights E4M3 `[N, K]` and a scale for each row as stored; made BF16 in registers, exactly (W8A16)."""

    forms = (Form(8, 2, 2, 1), Form(4, 1, 1, 3))
    caps = MappingProxyType({(1, 1): 56, (1, 2): 88, (2, 1): 80, (2, 2): 120, (2, 3): 152})
    variants = tuple({**v, "by_row": True} for v in Fp8Mma.variants)

    def fits(self, p: Projection) -> Verdict:
        if p.weight.geometry != PER_ROW:
            return no("scale-geometry", "reads a scale a row", found=p.weight.geometry, allowed=PER_ROW)
        return k_in_loads(p, 16)

    def declare(self, p: Projection, key: str) -> Bind:
        return Bind(p.weight, key="rows" + key)

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        return {**super().variant(w, key, c), "by_row": True}
