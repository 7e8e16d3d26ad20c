"""Rings whose loading thread fills stages that may not be empty yet."""

from __future__ import annotations

from collections.abc import Callable

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import ROW, Ring


def impatient(of_ring: Callable[..., Ring]) -> Callable[..., Ring]:
    """As `wgmma_ring.ring`, but `fill` does not wait until its stage is empty."""

    def made(*args, tiles=1, **kwargs):
        _, expected, bars_at, bm, *_ = args

        @L.device
        def fill(s, phase, m):
            missing = max(bm - m, 0) * (tiles * ROW)
            L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, bars_at), s, L.u32(expected - missing))

        return of_ring(*args, tiles=tiles, **kwargs)._replace(fill=fill)

    return made
