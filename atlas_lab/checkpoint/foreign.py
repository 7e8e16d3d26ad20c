"""Kinds of weights that are known and not read here, each refused by its name."""

from __future__ import annotations

from collections.abc import Mapping

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.core.tensor import Tensor

Held = Mapping[str, Tensor]  # tensors of a module by what follows its name

# Companions that make a weight something else, and what.
SUFFIXES = {
    ".weight_shape": "pack-quantized integer",
    ".weight_zero_point": "asymmetric",
    ".weight_g_idx": "column-permuted (GPTQ)",
    ".weight_blocks": "MXFP4",
    ".weight_scales": "MXFP4",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
    ".pre_quant_scale": "AWQ",
    ".svdquant_lora_a": "SVDQuant",
    ".svdquant_lora_b": "SVDQuant",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".scales": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes int8",
}

_EXPONENTS = ("u8", "e8m0")  # dtypes of a scale that is a power of two


def refuse(held: Held) -> None:
    """Raise CheckpointError, naming a tensor and the kind of the weight it is of; nothing for a kind that may be read.

    `held` are the tensors of one module whose suffixes are known, here or as parts of a weight that is read.
    """
    found = _by_codes(held) or next(((t, SUFFIXES[s]) for s, t in held.items() if s in SUFFIXES), None)
    if found:
        t, kind = found
        names = ", ".join(f"{h.dtype} {suffix.lstrip('.')}" for suffix, h in held.items())
        raise CheckpointError(f"{t.name}: found {kind} weights ({names}), expected BF16, FP8 or NVFP4")


def _by_codes(held: Held) -> tuple[Tensor, str] | None:
    """The tensor that tells, and the kind, by the dtypes of codes and scales."""
    codes = held.get(".weight", held.get(".weight_packed"))
    if codes is None:
        return None
    scale = held.get(".weight_scale", held.get(".weight_scale_inv"))
    under = scale.dtype if scale else ""
    if codes.dtype == "i32" and ".weight_packed" in held:
        return codes, "int4 or int8 pack-quantized"
    if codes.dtype == "e5m2":
        return codes, "E5M2"
    if scale and codes.dtype in ("u8", "i8") and under in _EXPONENTS:
        return scale, "MXFP4"
    if scale and codes.dtype == "e4m3" and under in _EXPONENTS:
        return scale, "MXFP8 (or FP8 under UE8M0 scales)"
    if codes.dtype == "i8":
        return codes, "int8"
    if scale and codes.dtype == "u8" and under in ("f32", "bf16", "f16"):
        return scale, "int4"
    return None
