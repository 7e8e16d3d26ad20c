"""What a call should have computed: float64 of the arm's own arithmetic, and how far from it an output may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab import formats
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.declare import Bind, Declaration
from atlas_lab.core.numbers import Exact, Rounded, snr_db
from atlas_lab.formats.scan import row_chunks
from atlas_lab.runtime import load

Arrays = Mapping[str, Mapping[str, np.ndarray]]
"""Tensors of weights: by the key of their declaration, then by field."""

LARGEST = {"f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "f16": 65504.0}  # finite


class OracleError(ValueError):
    """Weights from which no reference can be computed; one sentence."""


@dataclass(frozen=True)
class Reference:
    """float64 `[M, N]`: the product, and the product of the magnitudes, which rounding errors scale with."""

    values: np.ndarray
    magnitude: np.ndarray


@dataclass(frozen=True)
class Comparison:
    """The output with the largest error over its bound, at `[m, n]`; `outside` counts those whose ratio is above 1."""

    worst: float
    m: int
    n: int
    found: float
    expected: float
    bound: float
    outside: int
    of: int

    @property
    def ok(self) -> bool:
        return self.outside == 0

    @property
    def error(self) -> float:
        return abs(self.found - self.expected)

    def __str__(self) -> str:
        where = f"y[{self.m}, {self.n}]: found {self.found:.6g}, expected {self.expected:.6g} within {self.bound:.3g}"
        if self.ok:
            return f"{where} ({self.worst:.2f} of the bound)"
        return f"{self.outside} of {self.of} outputs are outside the tolerance, worst {where}"


@dataclass(frozen=True)
class Fidelity:
    """An output against the product of the unquantized weights. `worst_row` is the token with the lowest ratio."""

    rel_l2: float
    cosine: float
    snr_db: float
    worst_row: int


def declared(declarations: tuple[Declaration, ...], read: load.Read) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of declared weights: stored ones as read, derived ones built on the host. Raises LoadError."""
    out = {}
    for d in declarations:
        if isinstance(d, Bind):
            out[d.key] = {field: load.stored(read, t) for field, t in d.tensors.items()}
        else:
            fields = {t.name: field for field, t in d.tensors.items()}
            out[d.key] = {fields[t.name]: array for t, array in load.build(d, d.owner, read)}
    return out


def dequantized(declarations: tuple[Declaration, ...], arrays: Arrays, n: int, k: int) -> np.ndarray:
    """float64 `[N, K]` of declared weights: one declaration for all rows, or several whose rows follow each other.

    Raises OracleError where the declarations leave open which rows are whose.
    """
    parts = [_values(d, arrays[d.key]) for d in declarations]
    for d, part in zip(declarations, parts, strict=True):
        if part.ndim != 2 or part.shape[1] != k or part.dtype != np.float64:
            raise OracleError(
                f"weight {d.key!r}: dequantize gave {part.dtype}{list(part.shape)}, expected float64 [rows, {k}]"
            )
        if not np.isfinite(part).all():
            raise OracleError(f"weight {d.key!r}: dequantize gave a value that is not finite")
    if sum(part.shape[0] for part in parts) == n:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if parts and all(p.shape == (n, k) and np.array_equal(p, parts[0]) for p in parts):
        return parts[0]
    found = ", ".join(f"{d.key!r} {list(p.shape)}" for d, p in zip(declarations, parts, strict=True)) or "none"
    raise OracleError(f"weights {found}: expected rows that add up to [{n}, {k}], or an arm that defines `reference`")


def _values(d: Declaration, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return formats.get(d.source.format).dequantize(arrays) if isinstance(d, Bind) else np.asarray(d.dequantize(arrays))


def activations(x: np.ndarray, format: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """BF16 `[M, K]` as an arm that reads `format` is handed it: the values it stands for, and its arrays by field."""
    if format == "bf16":
        return x.astype(np.float64), {"weight": x}
    f = formats.get(format)
    stored = f.quantize(x.astype(np.float32))
    return f.dequantize(stored), stored


def product(x: np.ndarray, w: np.ndarray, terms: np.ndarray | None = None) -> Reference:
    """x·Wᵀ and |x|·|W|ᵀ of float64 `[M, K]` and `[N, K]`; with `terms`, that in place of |W|."""
    values, magnitude = np.empty((x.shape[0], w.shape[0])), np.empty((x.shape[0], w.shape[0]))
    size = np.abs(x)
    for rows in row_chunks(*w.shape):
        values[:, rows] = x @ w[rows].T
        magnitude[:, rows] = size @ (np.abs(w[rows]) if terms is None else terms[rows]).T
    return Reference(values, magnitude)


def reference(
    arm: Arm, call: Call, declarations: tuple[Declaration, ...], arrays: Arrays, x: np.ndarray
) -> tuple[Reference, np.ndarray | None]:
    """The reference of a call for x, float64 `[M, K]` as the arm is handed it, and the weights `[N, K]` it was made of
    (None where the arm defines `reference` and declares no rows of N). Raises OracleError."""
    if arm.reference is None:
        w = dequantized(declarations, arrays, call.n, call.k)
        return product(multiplied(arm, x, arrays), w, terms_of(arm, arrays)), w
    values = np.asarray(arm.reference(call, x, arrays), np.float64)
    if values.shape != (call.m, call.n):
        raise OracleError(f"reference of arm {arm.name} gave {list(values.shape)}, expected [{call.m}, {call.n}]")
    try:
        made = product(x, dequantized(declarations, arrays, call.n, call.k), terms_of(arm, arrays)).magnitude
    except OracleError:
        made = np.abs(values)
    return Reference(values, made), None


def multiplied(arm: Arm, x: np.ndarray, arrays: Arrays) -> np.ndarray:
    """What an arm multiplies by the weights of x, float64 `[M, K]`: what it quantizes it to, if it does."""
    return x if arm.quantized is None else np.asarray(arm.quantized(x, arrays), np.float64)


def terms_of(arm: Arm, arrays: Arrays) -> np.ndarray | None:
    """What an arm's rounding errors scale with in place of |W|, `[N, K]`; None for |W|."""
    return None if arm.terms is None else np.asarray(arm.terms(arrays), np.float64)


def compare(out: np.ndarray, ref: Reference, tolerance: Rounded | Exact, k: int) -> Comparison:
    """An output `[M, N]`, in the dtype it was written in, against its reference."""
    found = out.astype(np.float64)
    if isinstance(tolerance, Exact):
        rounded = ref.values.astype(out.dtype)
        wrong = out.view(np.uint8).reshape(*out.shape, -1) != rounded.view(np.uint8).reshape(*out.shape, -1)
        ratio, bound = np.where(wrong.any(axis=-1), np.inf, 0.0), np.zeros(out.shape)
    else:
        bound = tolerance.bound(ref.values, ref.magnitude, k)
        with np.errstate(invalid="ignore"):
            error = np.abs(found - ref.values)
        if not np.isfinite(error).all():
            error = np.where(_overflowed(found, ref.values, bound, tolerance.out), 0.0, error)
            error = np.where(np.isnan(error), np.inf, error)
        ratio = error / bound
    m, n = (int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    return Comparison(
        float(ratio[m, n]),
        m,
        n,
        float(found[m, n]),
        float(ref.values[m, n]),
        float(bound[m, n]),
        int((ratio > 1).sum()),
        ratio.size,
    )


def _overflowed(found: np.ndarray, ref: np.ndarray, bound: np.ndarray, out: str) -> np.ndarray:
    """Where infinity is right: the reference, within its bound, is past the largest value of the output's dtype."""
    past = np.abs(ref) + bound >= LARGEST[out]
    made: np.ndarray = np.isinf(found) & (np.sign(found) == np.sign(ref)) & past
    return made


def fidelity(out: np.ndarray, exact: np.ndarray) -> Fidelity:
    """How near an output `[M, N]` is to float64 `exact`."""
    found = out.astype(np.float64)
    length = float(np.linalg.norm(exact)) or 1.0
    lengths = length * (float(np.linalg.norm(found)) or 1.0)
    rows = [snr_db(f, e) for f, e in zip(found, exact, strict=True)]
    return Fidelity(
        rel_l2=float(np.linalg.norm(found - exact)) / length,
        cosine=float(np.vdot(found, exact)) / lengths,
        snr_db=snr_db(found, exact),
        worst_row=int(np.argmin(rows)),
    )


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays have equal dtype, shape and bytes."""
    x, y = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and np.array_equal(_bytes(x), _bytes(y))


def _bytes(a: np.ndarray) -> np.ndarray:
    flat: np.ndarray = a.reshape(-1).view(np.uint8)
    return flat
