"""What an arm's loads ask of K."""

from __future__ import annotations

from atlas_lab.core.projection import Projection
from atlas_lab.core.verdict import Verdict, no, yes


def k_in_loads(p: Projection, step: int) -> Verdict:
    """Whether K divides into 16-byte loads of `step` weights, so that every row of the weight begins on one."""
    if p.k % step:
        allowed = f"{step}, {2 * step}, {3 * step}, ..."
        return no("k-multiple", f"K must be a multiple of {step} for 16-byte loads", found=p.k, allowed=allowed)
    return yes()
