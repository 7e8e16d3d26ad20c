"""What a kernel that quantizes x is handed: of x, or of the gated product that a call's prologue makes it of."""

from __future__ import annotations

from atlas_lab.core.call import Call
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.activation.gated import KINDS, kind_of

PROLOGUES = (*KINDS, "limit")


def source(c: Call) -> tuple[Tensor, ...]:
    """x `[M, K]`, or g and u of a call with a prologue: `[M, K]` each, the halves of its x `[M, 2K]`."""
    if not c.prologue:
        return (c.x.data,)
    return tuple(c.x.data.view(at, (c.m, c.k), (2 * c.k, 1)) for at in (0, c.k))


def form(c: Call) -> tuple[int, ...]:
    """Elements between rows of g, between those of u, and the kernels' `kind`; nothing without a prologue."""
    return (2 * c.k, 2 * c.k, kind_of(c.prologue, c.prologue_limit)) if c.prologue else ()
