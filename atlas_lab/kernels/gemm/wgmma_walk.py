"""The order in which blocks, or clusters of them, take tiles of y, and the thread that loads for them in that order."""

from __future__ import annotations

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import tile_at
from atlas_lab.kernels.gemm.wgmma_ring import Ring
from atlas_lab.kernels.lang import cuda


class Walk(NamedTuple):
    """Device functions: `first()` and `after(i)` number what a block takes, `count(m, n)` says how many there are,
    `mine(m, n)` how many are this block's, and `at(i, m, n)` which row and column of y its tile starts at (a column
    past n where a cluster has blocks to spare)."""

    first: L.DeviceFunction
    after: L.DeviceFunction
    count: L.DeviceFunction
    mine: L.DeviceFunction
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
    def mine(m, n):
        clusters = L.i32(cuda.gridDim.x // cluster)
        return L.i32((count(m, n) - first() + clusters - 1) // clusters)

    @L.device
    def at(i, m, n):
        row0, col0 = tile_at(i, m, n, bm, wide, raster)
        if cluster > 1:
            col0 = col0 + L.i32(L.cluster_rank()) * bn
        return L.i32(row0), L.i32(col0)

    return Walk(first, after, count, mine, at)


@functools.cache
def loader(ring: Ring, walk: Walk, per_row: int, stages: int, bring_w: L.DeviceFunction, bring_x: L.DeviceFunction):
    """A device function of the loading thread, `(w_maps, x_maps, m, n, k)`: fills the ring, stage by stage, for every
    tile that is this block's, by `bring_w(s, w_maps, col0, step)` and `bring_x(s, x_maps, row0, step)`; `per_row`
    elements of K are a stage.

    It waits for the launch before (`grid_wait`) once the first round of stages has its part of W, which nothing writes.
    """

    @L.device
    def run(w_maps, x_maps, m, n, k):
        steps = L.i32((k + per_row - 1) // per_row)
        i, count = walk.first(), walk.count(m, n)
        row0, col0 = walk.at(i, m, n)
        start = min(steps, L.i32(stages))
        for s in range(start):
            ring.fill(L.i32(s), L.u32(0))
            bring_w(s, w_maps, col0, s)
        L.grid_wait()
        for s in range(start):
            bring_x(s, x_maps, row0, s)
        around = start == stages
        s, phase = (L.i32(0) if around else L.i32(start)), (L.u32(1) if around else L.u32(0))
        while i < count:
            row0, col0 = walk.at(i, m, n)
            for step in range(start, steps):
                ring.fill(s, phase)
                bring_w(s, w_maps, col0, step)
                bring_x(s, x_maps, row0, step)
                s, phase = ring.after(s, phase)
            start = L.i32(0)
            i = walk.after(i)
        ring.drain(s, phase)

    return run
