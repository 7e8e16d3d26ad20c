"""Arms of class T over NVFP4 weights: as stored, and repacked at load time into the lanes' own order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from atlas_lab.arms.copies.repacked import can_repack, repacked_nvfp4
from atlas_lab.arms.loads import k_in_loads
from atlas_lab.arms.mma.base import Mma, ascending, class_t, rounded, under
from atlas_lab.arms.mma.forms import Form
from atlas_lab.arms.nvfp4 import CONVENTIONS
from atlas_lab.core.call import Call, Fields
from atlas_lab.core.declare import Bind, Derived
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict, no
from atlas_lab.kernels.gemv import mma_lanes, mma_nvfp4
from atlas_lab.kernels.gemv.columns import TILE


class Nvfp4Mma(Mma):
    """Codes, block scales and tensor scale as stored; a code times its block scale is exact in BF16 (W4A16); the tensor
    scale on the sums."""

    source = "nvfp4"
    family = staticmethod(mma_nvfp4.mma_nvfp4)
    unit, span, weight_bytes, issue = mma_nvfp4.UNIT, mma_nvfp4.SPAN, 9 / 16, 0.17
    forms = (
        *(Form(8, 2, 2, 2), Form(4, 2, 1, 2), Form(8, 2, 5, 1, wide_kept=5), Form(8, 5, 5, 1, kept=5, wide_kept=5)),
    )
    caps = MappingProxyType({(1, 1): 64, (1, 2): 96, (2, 1): 88, (2, 2): 128})
    variants = ({"whole": True}, {"whole": False})
    tolerance = rounded(ascending(mma_nvfp4.SPAN, 8, 4, 8), 2)
    reduction_class = class_t("units of 128, two groups of 16 a lane")

    def fits(self, p: Projection) -> Verdict:
        if p.weight.geometry not in CONVENTIONS:
            allowed = " or ".join(map(str, CONVENTIONS))
            return no("scale-geometry", "reads group scales", found=p.weight.geometry, allowed=allowed)
        return k_in_loads(p, 32)

    def declare(self, p: Projection, key: str) -> Bind:
        return Bind(p.weight, key=CONVENTIONS[p.weight.geometry] + key)

    def variant(self, w: Fields, key: str, c: Call) -> Mapping[str, Any]:
        return {"whole": c.k % mma_nvfp4.SPAN == 0}

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return w.weight, w.scale, w.global_scale

    def scalars(self, key: str, c: Call) -> tuple[int, ...]:
        return (int(key == "reciprocal"),)


class Nvfp4MmaRepacked(Mma):
    """NVFP4 repacked at load time: each lane loads its own operand (W4A16), three bit operations a pair of weights. The
    copy is of the stored size; the stored weight is kept only where another arm reads it."""

    source = "nvfp4"
    family = staticmethod(mma_lanes.mma_nvfp4_lanes)
    unit, span, weight_bytes, issue = mma_lanes.UNIT, mma_lanes.SPAN, 9 / 16, 0.14
    forms = (
        *(Form(4, 2, 2, 2), Form(4, 2, 2, 3), Form(8, 2, 2, 1), Form(8, 2, 2, 2), Form(12, 2, 2, 1)),
        Form(16, 3, 3, 1, 4, 4),
        *(Form(20, 2, 2, 1, kept=2, wide_kept=2), Form(16, 2, 2, 1, kept=2, wide_kept=2)),
        Form(16, 2, 5, 1, 1, 2, 4, 4),
    )
    caps = MappingProxyType({(1, 1): 56, (1, 2): 56, (2, 1): 80, (2, 2): 96, (2, 3): 104})
    gate_caps = MappingProxyType({1: 64, 2: 112})
    ragged = True
    first_on = ("sm_90a",)  # where nvfp4_wgmma reads the same copy
    tolerance = rounded(ascending(mma_lanes.SPAN, 8, 4, 20), 2)
    reduction_class = class_t("units of 128, a group of 16 a lane twice")

    def fits(self, p: Projection) -> Verdict:
        return can_repack(p)

    def declare(self, p: Projection, key: str) -> Derived:
        return under(repacked_nvfp4(p), key)

    def operands(self, w: Fields) -> tuple[Any, ...]:
        return w.weight, w.global_scale

    def scalars(self, key: str, c: Call) -> tuple[int, ...]:
        return (int(key.endswith("_reciprocal")),)

    def count(self, w: Fields) -> int:
        return TILE * super().count(w)
