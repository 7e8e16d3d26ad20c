"""Element types: one name for each, with its NumPy dtype on the host and its name in a safetensors header."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """An element type.

    `numpy` is the host representation; `safetensors` the spelling in a safetensors header ("" where that
    format has none). `bits` is the storage width: packed 4-bit codes are stored as `u8`, two a byte.
    """

    name: str
    bits: int
    numpy: np.dtype
    safetensors: str

    @property
    def bytes(self) -> int:
        return self.bits // 8

    def __str__(self) -> str:
        return self.name


def _dtype(name: str, numpy: object, safetensors: str) -> DType:
    host = np.dtype(numpy)  # type: ignore[call-overload]
    return DType(name, host.itemsize * 8, host, safetensors)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _dtype("bool", np.bool_, "BOOL"),
        _dtype("u8", np.uint8, "U8"),
        _dtype("i8", np.int8, "I8"),
        _dtype("u16", np.uint16, "U16"),
        _dtype("i16", np.int16, "I16"),
        _dtype("u32", np.uint32, "U32"),
        _dtype("i32", np.int32, "I32"),
        _dtype("u64", np.uint64, "U64"),
        _dtype("i64", np.int64, "I64"),
        _dtype("f16", np.float16, "F16"),
        _dtype("bf16", ml_dtypes.bfloat16, "BF16"),
        _dtype("f32", np.float32, "F32"),
        _dtype("f64", np.float64, "F64"),
        _dtype("e4m3", ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        _dtype("e5m2", ml_dtypes.float8_e5m2, "F8_E5M2"),
        _dtype("e8m0", ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    )
}

BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The element type called `name`; raises KeyError naming the known ones."""
    try:
        return DTYPES[name]
    except KeyError:
        raise KeyError(f"unknown dtype {name!r}, expected one of {', '.join(DTYPES)}") from None
