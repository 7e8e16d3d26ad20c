"""The order in which blocks, or clusters of them, take tiles of y, and the thread that loads for them in that order."""

from __future__ import annotations

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import tile_at
from atlas_lab.kernels.gemm.wgmma_ring import Ring
from atlas_lab.kernels.lang import cuda


class Walk(NamedTuple):
    """Device functions: `first()` and `after(i)` number what a block takes, `count(m, n)` says how many there are, and
    `at(i, m, n)` which row and column of y its tile starts at (a column past n where a cluster has blocks to spare)."""

    first: L.DeviceFunction
    after: L.DeviceFunction
    count: L.DeviceFunction
    at: L.DeviceFunction


@functools.cache
def walk(bm: int, bn: int, raster: int, cluster: int) -> Walk:
    """Tiles of bm x bn; blocks of a cluster take neighbours in a row. `raster` row tiles share their weights' columns
    before the next column."""
    wide = bn * cluster

    @L.device
    def first():
        return L.i32(cuda.blockIdx.x // cluster)

    @L.device
    def after(i):
        return L.i32(i + cuda.gridDim.x // cluster)

    @L.device
    def count(m, n):
        return L.i32((m + bm - 1) // bm) * L.i32((n + wide - 1) // wide)

    @L.device
    def at(i, m, n):
        row0, col0 = tile_at(i, m, n, bm, wide, raster)
        if cluster > 1:
            col0 = col0 + L.i32(L.cluster_rank()) * bn
        return L.i32(row0), L.i32(col0)

    return Walk(first, after, count, at)


@functools.cache
def loader(ring: Ring, walk: Walk, per_row: int, bring: L.DeviceFunction):
    """A device function of the loading thread, `(maps, m, n, k)`: fills the ring, stage by stage, for every tile that
    is this block's, by `bring(s, maps, row0, col0, step)`; `per_row` elements of K are a stage."""

    @L.device
    def run(maps, m, n, k):
        s, phase = L.i32(0), L.u32(0)
        steps = L.i32((k + per_row - 1) // per_row)
        i, count = walk.first(), walk.count(m, n)
        while i < count:
            row0, col0 = walk.at(i, m, n)
            for step in range(steps):
                ring.fill(s, phase)
                bring(s, maps, row0, col0, step)
                s, phase = ring.after(s, phase)
            i = walk.after(i)
        ring.drain(s, phase)

    return run
