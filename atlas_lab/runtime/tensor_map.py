"""Tensor maps as the driver encodes them: 128 opaque bytes from an address and what `TensorMap` says."""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime.bind import MapPlace
from atlas_lab.runtime.driver import bindings, call
from atlas_lab.runtime.errors import BindError

_TYPES = {
    "u8": "UINT8", "i8": "UINT8", "e4m3": "UINT8", "e5m2": "UINT8", "u16": "UINT16", "u32": "UINT32", "i32": "INT32",
    "u64": "UINT64", "i64": "INT64", "bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT32",
}  # fmt: skip
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


def encode(place: MapPlace, parameter: Parameter) -> np.ndarray:
    """The map's 16 words, uint64; its dimensions go to the driver innermost first. Raises BindError."""
    m = place.map
    address = place.buffer.memory + place.offset
    what = f"argument {parameter.name!r}: encoding a tensor map of {m.view}"
    if address % 16:
        raise BindError(f"{what}: found address {address:#x}, expected a multiple of 16")
    driver = bindings()
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    rank = len(m.box)

    def named(kind: str, prefix: str, name: str) -> Any:
        return getattr(getattr(driver, kind), f"CU_TENSOR_MAP_{prefix}_{name}")

    encoded = call(
        what,
        "cuTensorMapEncodeTiled",
        named("CUtensorMapDataType", "DATA_TYPE", _TYPES[m.dtype]),
        rank,
        address,
        [wide(e) for e in reversed(m.view.shape)],
        [wide(s) for s in reversed(m.strides[:-1])] or [wide(16)],  # of one dimension nothing is read, but not null
        [narrow(e) for e in reversed(m.box)],
        [narrow(1)] * rank,
        named("CUtensorMapInterleave", "INTERLEAVE", "NONE"),
        named("CUtensorMapSwizzle", "SWIZZLE", f"{m.swizzle}B" if m.swizzle else "NONE"),
        named("CUtensorMapL2promotion", "L2_PROMOTION", _PROMOTIONS[m.promotion]),
        named("CUtensorMapFloatOOBfill", "FLOAT_OOB_FILL", "NONE"),
    )
    return np.array([int(w) for w in encoded.opaque], np.uint64)
