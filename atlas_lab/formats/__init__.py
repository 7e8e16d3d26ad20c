"""Number formats and packed layouts on the host: quantize, dequantize, sizes, value checks; every kernel's oracle."""

from __future__ import annotations

from difflib import get_close_matches

from atlas_lab.formats import bf16, block_nvfp4, fp8, nvfp4, q2_0, q4_k, q6_k, q8_0
from atlas_lab.formats.base import (
    BLOCK_128,
    GROUP_16,
    GROUP_16_RECIPROCAL,
    NO_SCALE,
    PER_ROW,
    PER_TENSOR,
    Format,
    FormatError,
    Geometry,
    Spec,
    Tensors,
)

_MODULES = (bf16, fp8, nvfp4, q8_0, q4_k, q6_k, q2_0, block_nvfp4)
FORMATS: dict[str, Format] = {f.name: f for module in _MODULES for f in module.FORMATS}


def get(name: str) -> Format:
    """The format called `name`; raises KeyError with the known names and the nearest ones."""
    try:
        return FORMATS[name]
    except KeyError:
        near = get_close_matches(name, FORMATS)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise KeyError(f"unknown format {name!r}, expected one of {', '.join(FORMATS)}{hint}") from None


__all__ = [
    "BLOCK_128",
    "FORMATS",
    "GROUP_16",
    "GROUP_16_RECIPROCAL",
    "NO_SCALE",
    "PER_ROW",
    "PER_TENSOR",
    "Format",
    "FormatError",
    "Geometry",
    "Spec",
    "Tensors",
    "get",
]
