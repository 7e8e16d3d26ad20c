"""The built-in arms, formats, models and targets: a plugin like any other. The order of the arms is the built-in
order of `resolve`."""

from __future__ import annotations

from typing import Any

from atlas_lab.arms.bf16 import Bf16Gemm, Bf16Gemv
from atlas_lab.arms.fp8 import Fp8Gemm, Fp8Gemv, Fp8RowGemv
from atlas_lab.arms.int8 import Int8Gemv
from atlas_lab.arms.library import Bf16Library
from atlas_lab.arms.mma import (
    Bf16Mma,
    Fp8Mma,
    Fp8RowMma,
    Int8Mma,
    Nvfp4Mma,
    Nvfp4MmaRepacked,
    Q2Mma,
    Q4KMma,
    Q4KMmaRepacked,
)
from atlas_lab.arms.nvfp4 import Nvfp4Gemm, Nvfp4Gemv, Nvfp4Gemv64
from atlas_lab.arms.q2_0 import Q2Gemv
from atlas_lab.arms.q4_k import Q4KGemv
from atlas_lab.arms.w4a4 import Nvfp4W4A4
from atlas_lab.arms.wgmma import (
    Bf16Wgmma,
    Bf16WgmmaJoined,
    Fp8Wgmma,
    Fp8WgmmaW8A8,
    Int8Wgmma,
    Int8WgmmaSub,
    Nvfp4Mmq,
    Nvfp4W4A4Emulated,
    Nvfp4Wgmma,
    Nvfp4WgmmaFp8,
    Nvfp4WgmmaInt8,
    Nvfp4WgmmaJoined,
    Nvfp4WgmmaW4A8,
    Q2Dequant,
    Q2Mmq,
    Q4KMmq,
)
from atlas_lab.checkpoint.gemma import GEMMA
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.transformer import LLAMA, QWEN3
from atlas_lab.core.arm import Arm
from atlas_lab.core.hookspecs import hookimpl
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.formats import FORMATS, Format


@hookimpl  # type: ignore[untyped-decorator]
def atlas_arms() -> list[Arm]:
    return [
        # a joined arm behind what serves its members alone: where an order or a pin names it
        *(Bf16Gemv(), Bf16Mma("bf16_mma"), Bf16Wgmma(), Bf16WgmmaJoined(), Bf16Gemm()),
        *(Fp8Gemv(), Fp8RowGemv(), Fp8Mma("fp8_mma"), Fp8RowMma("fp8_row_mma"), Fp8WgmmaW8A8(), Fp8Gemm()),
        Fp8Wgmma(),  # behind fp8_gemm: where an order or pin names it
        *(Nvfp4Gemv(), Nvfp4Gemv64(), Nvfp4Mma("nvfp4_mma"), Nvfp4MmaRepacked("nvfp4_mma_repacked")),
        *(Nvfp4Gemm(), Nvfp4Wgmma(), Nvfp4WgmmaJoined(), Nvfp4WgmmaFp8(), Nvfp4WgmmaW4A8(), Nvfp4WgmmaInt8()),
        # activations quantized too: where an order or pin names them
        *(Nvfp4W4A4(), Nvfp4W4A4Emulated()),
        *(Nvfp4Mmq("nvfp4_mmq"), Nvfp4Mmq("nvfp4_mmq_joined", joined=True), Nvfp4Mmq("block_nvfp4_mmq", "block_nvfp4")),
        *(Q4KGemv(), Q4KMma("q4k_mma"), Q4KMmaRepacked("q4k_mma_repacked"), Q4KMmq()),
        *(Q2Gemv(), Q2Mma("q2_mma"), Q2Dequant(), Q2Mmq(), Int8Gemv(), Int8Mma("int8_mma")),
        *(Int8Wgmma(), Int8WgmmaSub()),  # they change numbers: where an order or a pin names them
        # two or three projections in one launch: where an order or a pin names them
        Bf16Mma("bf16_mma_joined", joined=True),
        Fp8Mma("fp8_mma_joined", joined=True),
        Nvfp4Mma("nvfp4_mma_joined", joined=True),
        Nvfp4MmaRepacked("nvfp4_mma_repacked_joined", joined=True),
        Bf16Library(),  # what an engineer would use instead: where an order or a pin names it
    ]


@hookimpl  # type: ignore[untyped-decorator]
def atlas_formats() -> list[Format]:
    return list(FORMATS.values())


@hookimpl  # type: ignore[untyped-decorator]
def atlas_models() -> list[Any]:
    return [QWEN35, QWEN3, LLAMA, GEMMA]


@hookimpl  # type: ignore[untyped-decorator]
def atlas_targets() -> list[Target]:
    return list(shipped_targets())
