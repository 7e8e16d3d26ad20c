"""Rings whose loading thread fills stages that may not be empty yet."""

from __future__ import annotations

from collections.abc import Callable

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import Ring


def impatient(of_ring: Callable[..., Ring]) -> Callable[..., Ring]:
    """As `wgmma_ring.ring`, but `fill` does not wait until its stage is empty."""

    def made(*args, **kwargs):
        @L.device
        def fill(s, phase, less):
            L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, args[2]), s, L.u32(args[1] - less))

        return of_ring(*args, **kwargs)._replace(fill=fill)

    return made
