"""Arms on warpgroup matrix products (wgmma) fed by the copy engine: 17 rows of x and more, Hopper only."""

from __future__ import annotations

from atlas_lab.arms.wgmma.bf16 import Bf16Wgmma
from atlas_lab.arms.wgmma.block_nvfp4 import Nvfp4Mmq
from atlas_lab.arms.wgmma.fp8 import Fp8WgmmaW8A8
from atlas_lab.arms.wgmma.int8 import Int8Wgmma, Int8WgmmaSub
from atlas_lab.arms.wgmma.joined import Bf16WgmmaJoined, Nvfp4WgmmaJoined
from atlas_lab.arms.wgmma.nvfp4 import Nvfp4Wgmma
from atlas_lab.arms.wgmma.nvfp4_fp8 import Nvfp4WgmmaFp8, Nvfp4WgmmaW4A8
from atlas_lab.arms.wgmma.nvfp4_int8 import Nvfp4WgmmaInt8
from atlas_lab.arms.wgmma.q2_0 import Q2Mmq
from atlas_lab.arms.wgmma.q2_dequant import Q2Dequant
from atlas_lab.arms.wgmma.q4_k import Q4KMmq
from atlas_lab.arms.wgmma.w4a4 import Nvfp4W4A4Emulated
from atlas_lab.arms.wgmma.w8a16 import Fp8Wgmma

__all__ = [
    "Bf16Wgmma",
    "Bf16WgmmaJoined",
    "Fp8Wgmma",
    "Fp8WgmmaW8A8",
    "Int8Wgmma",
    "Int8WgmmaSub",
    "Nvfp4Mmq",
    "Nvfp4W4A4Emulated",
    "Nvfp4Wgmma",
    "Nvfp4WgmmaFp8",
    "Nvfp4WgmmaInt8",
    "Nvfp4WgmmaJoined",
    "Nvfp4WgmmaW4A8",
    "Q2Dequant",
    "Q2Mmq",
    "Q4KMmq",
]
