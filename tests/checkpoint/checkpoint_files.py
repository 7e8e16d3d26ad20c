"""Safetensors files of a few bytes, whole and faulty, for the tests of this folder."""

import json
from pathlib import Path

from atlas_lab.core.tensor import Tensor


def framed(header: bytes | str | dict, data: bytes = b"") -> bytes:
    """A file from a header, JSON or not, and data."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: bytes | str | dict, data: bytes = b"") -> Path:
    path.write_bytes(framed(header, data))
    return path


def handles(*tensors: str) -> dict[str, Tensor]:
    """Handles from `"m.weight u8 4 8"`: name, dtype, extents."""
    out = {}
    for t in tensors:
        name, dtype, *shape = t.split()
        out[name] = Tensor(dtype, tuple(map(int, shape)), name)
    return out
