"""Arms on warpgroup matrix products (wgmma) fed by the copy engine: 17 rows of x and more, Hopper only."""

from __future__ import annotations

from atlas_lab.arms.wgmma.bf16 import Bf16Wgmma
from atlas_lab.arms.wgmma.fp8 import Fp8WgmmaW8A8

__all__ = ["Bf16Wgmma", "Fp8WgmmaW8A8"]
