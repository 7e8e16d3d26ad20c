"""What arms on CUDA cores ask of K, how they cut it, and their launch."""

from __future__ import annotations

from typing import Any

from atlas_lab.core.call import Call
from atlas_lab.core.launch import Launch
from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict, no, yes
from atlas_lab.kernels.lang import Kernel

WARPS_AN_SM = 16  # that keep its memory busy
CUTS = "1, 2 or 4 ranges of K by N, K and target"


def k_in_loads(p: Projection, step: int) -> Verdict:
    """Whether K divides into 16-byte loads of `step` weights, so that every row of the weight begins on one."""
    if p.k % step:
        allowed = f"{step}, {2 * step}, {3 * step}, ..."
        return no("k-multiple", f"K must be a multiple of {step} for 16-byte loads", found=p.k, allowed=allowed)
    return yes()


def cuts_for(c: Call, rows: int, span: int) -> int:
    """0, 1 or 2: K is cut into two to the power of it, so that warps of `rows` rows fill the card, while each range has
    a span of K. Never by M."""
    cuts = 0
    while cuts < 2 and (-(-c.n // rows) << cuts) < WARPS_AN_SM * c.context.target.sms and span << cuts < c.k:
        cuts += 1
    return cuts


def one_pass(c: Call, kernel: Kernel, warps: int, rows: int, cuts: int, args: tuple[Any, ...], label: str) -> Launch:
    """The launch of a kernel whose blocks have `warps` warps, 2**cuts of them for the same `rows` rows."""
    grid = -(-c.n // (warps * rows >> cuts))
    return Launch(kernel, grid=grid, block=32 * warps, args=args, flops=2 * c.m * c.n * c.k, label=label)
