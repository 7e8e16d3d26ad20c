"""What a weight must be like for a copy of it to be made."""

from __future__ import annotations

from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.formats import FORMATS, FormatError
from atlas_lab.formats.base import GROUP_16, GROUP_16_RECIPROCAL

TWO_LEVEL = (GROUP_16, GROUP_16_RECIPROCAL)


class CopyError(ValueError):
    """A copy that cannot be made of this weight; one sentence."""


def agrees(p: Projection) -> Verdict:
    """Whether the stored tensors have the shapes that N and K say: a config may be of another width."""
    f = FORMATS.get(p.weight.format)
    if f is None:
        return no("source", "its format is not known", found=p.weight.format, allowed=", ".join(FORMATS))
    try:
        expected = f.tensors(p.n, p.k)
    except FormatError as e:
        return no("k-multiple", str(e))
    for field, t in p.weight.fields:
        size = expected[field].shape
        # a scale of one value, and one a row, are stored in two shapes
        if field not in expected or (t.shape != size and t.elements != _elements(size)):
            found = f"{field} {list(t.shape)}"
            return no("shape", f"its tensors are not those of [{p.n}, {p.k}]", found=found, allowed=list(size))
    return yes()


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def two_level(p: Projection, *, n_multiple: int = 1, k_multiple: int = 16) -> Verdict:
    """Whether this is NVFP4 in either convention, of these multiples."""
    if p.weight.geometry not in TWO_LEVEL or p.weight.family != "nvfp4":
        allowed = " or ".join(map(str, TWO_LEVEL))
        return no("scale-geometry", "made of NVFP4", found=f"{p.weight.format}, {p.weight.geometry}", allowed=allowed)
    return multiples(p, n_multiple, k_multiple)


def multiples(p: Projection, n_multiple: int = 1, k_multiple: int = 1) -> Verdict:
    """Whether N and K are such multiples, and the tensors are of N and K."""
    for name, value, of in (("N", p.n, n_multiple), ("K", p.k, k_multiple)):
        if value % of:
            code, allowed = f"{name.lower()}-multiple", f"{of}, {2 * of}, ..."
            return no(code, f"{name} must be a multiple of {of}", found=value, allowed=allowed)
    return agrees(p)


def require(verdict: Verdict, what: str, p: Projection) -> None:
    """Raise CopyError unless the verdict is yes."""
    if not verdict:
        raise CopyError(f"{p.label}: no {what} copy can be made: {verdict}")


def is_reciprocal(p: Projection) -> bool:
    """Whether the tensor scale divides."""
    return p.weight.geometry == GROUP_16_RECIPROCAL


def named(key: str, p: Projection) -> str:
    """The key of a two-level copy: it says whether the tensor scale divides."""
    return key + ("_reciprocal" if is_reciprocal(p) else "")
