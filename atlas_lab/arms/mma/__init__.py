"""Arms of class T: 1 to 16 rows of x on tensor cores (mma.sync), every weight byte read once."""

from __future__ import annotations

from atlas_lab.arms.mma.floats import Bf16Mma, Fp8Mma, Fp8RowMma
from atlas_lab.arms.mma.integers import Int8Mma, Q2Mma, Q4KMma, Q4KMmaRepacked
from atlas_lab.arms.mma.nvfp4 import Nvfp4Mma, Nvfp4MmaRepacked

__all__ = [
    "Bf16Mma",
    "Fp8Mma",
    "Fp8RowMma",
    "Int8Mma",
    "Nvfp4Mma",
    "Nvfp4MmaRepacked",
    "Q2Mma",
    "Q4KMma",
    "Q4KMmaRepacked",
]
