"""The tensor scale that a checkpoint has for the activations of an NVFP4 projection, with what the product is to be
multiplied by."""

from __future__ import annotations

import numpy as np

from atlas_lab.arms.copies.shapes import CopyError, is_reciprocal, two_level
from atlas_lab.core.declare import Arrays, Derived
from atlas_lab.core.projection import Projection, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.verdict import Verdict, no, yes

INPUT_SCALE = "input_scale"
_DIVIDES = {INPUT_SCALE: False, "input_global_scale": True}
_TINY = np.finfo(np.float32).tiny


def _stored(p: Projection) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in p.weight.activation if name in _DIVIDES]


def can_scale_input(p: Projection) -> Verdict:
    """NVFP4 of either convention, with at most one tensor scale of activations, one F32."""
    verdict = two_level(p)
    if not verdict:
        return verdict
    found = _stored(p)
    if len(found) > 1 or any(t.elements != 1 or t.dtype != "f32" for _, t in found):
        said = ", ".join(f"{name} {t.dtype}{list(t.shape)}" for name, t in found)
        return no("input-scale", "scales activations by one f32", found=said, allowed="f32[] or f32[1]")
    return yes()


def input_scale(p: Projection) -> Derived | None:
    """`x` f32 `[]`, the tensor scale of activations as a multiplier (`input_scale`, or one over `input_global_scale`),
    and `alpha` f32 `[]`, it times the weight's; None where the checkpoint has none. Key `input_scale`.

    Built on the host; raises CopyError, and while building ValueError for a scale that is not finite and at least
    2^-126.
    """
    verdict = can_scale_input(p)
    if not verdict:
        raise CopyError(f"{p.label}: no scale of its input can be made: {verdict}")
    found = _stored(p)
    if not found:
        return None
    ((name, stored),) = found
    w, divides = p.weight, is_reciprocal(p)

    def build(t: Arrays) -> dict[str, np.ndarray]:
        given, of_weight = np.float64(t[name].reshape(())), np.float64(t["global_scale"].reshape(()))
        with np.errstate(divide="ignore"):
            x = np.float32(1 / given if _DIVIDES[name] else given)
        if not _TINY <= x < np.inf:
            raise ValueError(f"{p.label}.{name}: found {given:g}, expected a scale of 2^-126 or more that is finite")
        with np.errstate(over="ignore", under="ignore"):
            alpha = np.float32(np.float64(x) / of_weight if divides else np.float64(x) * of_weight)
        return {"x": np.asarray(x), "alpha": np.asarray(alpha)}

    def dequantize(t: Arrays) -> np.ndarray:
        return np.empty((0, p.k))  # no rows of weights

    scales = WeightSource(w.format, w.family, w.geometry, (("global_scale", w["global_scale"]), (name, stored)))
    return Derived(
        INPUT_SCALE,
        source=scales.packed,
        build=build,
        dequantize=dequantize,
        x=Tensor("f32", ()),
        alpha=Tensor("f32", ()),
    )
