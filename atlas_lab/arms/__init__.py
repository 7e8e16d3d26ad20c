"""The built-in arms, formats, models and targets: a plugin like any other. The order of the arms is the built-in
order of `resolve`."""

from __future__ import annotations

from typing import Any

from atlas_lab.arms.bf16 import Bf16Gemm, Bf16Gemv
from atlas_lab.arms.fp8 import Fp8Few, Fp8Gemm, Fp8Gemv
from atlas_lab.arms.nvfp4 import Nvfp4Few, Nvfp4Gemm, Nvfp4Gemv
from atlas_lab.checkpoint.gemma import GEMMA
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.transformer import LLAMA, QWEN3
from atlas_lab.core.arm import Arm
from atlas_lab.core.hookspecs import hookimpl
from atlas_lab.core.target import Target, shipped_targets
from atlas_lab.formats import FORMATS, Format


@hookimpl  # type: ignore[untyped-decorator]
def atlas_arms() -> list[Arm]:
    return [Bf16Gemv(), Bf16Gemm(), Fp8Gemv(), Fp8Few(), Fp8Gemm(), Nvfp4Gemv(), Nvfp4Few(), Nvfp4Gemm()]


@hookimpl  # type: ignore[untyped-decorator]
def atlas_formats() -> list[Format]:
    return list(FORMATS.values())


@hookimpl  # type: ignore[untyped-decorator]
def atlas_models() -> list[Any]:
    return [QWEN35, QWEN3, LLAMA, GEMMA]


@hookimpl  # type: ignore[untyped-decorator]
def atlas_targets() -> list[Target]:
    return list(shipped_targets())
