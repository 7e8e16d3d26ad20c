"""What every format refuses, in one sentence: a missing field, a wrong dtype or shape, a value no kernel may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from atlas_lab.formats import scan
from atlas_lab.formats.base import FormatError, Tensors
from atlas_lab.formats.dtypes import DTYPES, dtype

Shape = tuple[int, ...]


def dims(name: str, n: int, k: int, multiple: int = 1) -> None:
    """Raise FormatError unless a weight `[n, k]` can be stored: both 1 or more, K a multiple of `multiple`."""
    if n < 1 or k < 1:
        raise FormatError(f"{name}: found a weight of shape [{n}, {k}], expected N and K of 1 or more")
    if k % multiple:
        raise FormatError(f"{name}: found K = {k} in a weight [{n}, {k}], expected a multiple of {multiple}")


def source(w: np.ndarray, name: str) -> tuple[int, int]:
    """N and K of a weight to quantize; raises FormatError unless it is float32 `[N, K]`, finite throughout."""
    label = source_label(name)
    if w.dtype != np.float32:
        raise FormatError(f"{label}: found dtype {dtype_name(w)}, expected f32")
    if w.ndim != 2:
        raise FormatError(f"{label}: found shape {list(w.shape)}, expected [N, K]")
    n, k = w.shape
    dims(name, n, k)
    if not np.isfinite(scan.amax(w)):
        value(w, label, lambda x: ~np.isfinite(x), "finite values")
    return n, k


def source_label(name: str) -> str:
    return f"the weight to quantize as {name}"


def weight(t: Tensors, label: str, dtype: str) -> tuple[int, int]:
    """Shape of the stored field `weight`; raises FormatError unless it is there, 2-D, not empty and of `dtype`."""
    w = present(t, label, "weight")
    if dtype_name(w) != dtype:
        raise FormatError(f"{label}.weight: found dtype {dtype_name(w)}, expected {dtype}")
    if w.ndim != 2 or 0 in w.shape:
        raise FormatError(f"{label}.weight: found shape {list(w.shape)}, expected two dimensions of 1 or more")
    return w.shape[0], w.shape[1]


def field(t: Tensors, label: str, name: str, dtypes: Sequence[str], shapes: Sequence[Shape], of: Shape) -> np.ndarray:
    """Field `name` of a weight of logical shape `of`; raises FormatError unless dtype and shape are among these."""
    a = present(t, label, name)
    if dtype_name(a) not in dtypes:
        raise FormatError(f"{label}.{name}: found dtype {dtype_name(a)}, expected {' or '.join(dtypes)}")
    if a.shape not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise FormatError(f"{label}.{name}: found shape {list(a.shape)}, expected {wanted} for a weight {list(of)}")
    return a


def present(t: Tensors, label: str, name: str) -> np.ndarray:
    """Field `name`; raises FormatError naming the fields that are there where it is not."""
    if name not in t:
        raise FormatError(f"{label}.{name}: missing, found {', '.join(t) or 'no tensor at all'}")
    return t[name]


def positive(a: np.ndarray, label: str) -> None:
    """Raise FormatError unless every scale in `a` (f32 or bf16) is finite and above zero."""
    value(a, label, lambda x: ~((x > 0) & np.isfinite(x)), "a finite scale above 0")


def value(a: np.ndarray, label: str, bad: Callable[[np.ndarray], np.ndarray], expected: str) -> None:
    """Raise FormatError with value and place of the first element for which `bad` (elementwise) is true."""
    at = scan.first(a, bad)
    if at is not None:
        raise FormatError(f"{label}: found {show(a[at])}{place(at)}, expected {expected}")


def place(at: Shape) -> str:
    if not at:
        return ""
    return f" at row {at[0]}" + (f", column {at[1]}" if len(at) > 1 else "")


def show(x: np.generic) -> str:
    """A value in words; one-byte floats with their code, which is what a hex dump shows."""
    text = {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}.get(str(float(x)), f"{float(x):g}")
    return f"code 0x{x.tobytes()[0]:02X} ({text})" if x.dtype == dtype("e4m3").numpy else text


def dtype_name(a: np.ndarray) -> str:
    return next((d.name for d in DTYPES.values() if d.numpy == a.dtype), str(a.dtype))
