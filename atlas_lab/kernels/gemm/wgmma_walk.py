"""Which parts of which tiles of y a block, or a cluster of them, takes, and the thread that loads for them.

Tiles are dealt out in turn. Where the last turn would leave blocks idle, `cut` has the first tiles cut along K
instead (stream-K: Osama et al., 2023): as many as leave whole turns for the others, but at least a turn, laid end to
end and cut into equal shares, one a block. A block takes its share first, from its end; of a tile that blocks share,
the one that ends it adds up: those before it did their parts of that tile first of all, so that nobody waits for long,
and they were started earlier, so that nobody waits for a block that finds no SM. As many blocks as x has row tiles are
a group, which has one share, a row tile each: they read the same part of W at the same time, and it comes from memory
once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import tile_at
from atlas_lab.kernels.gemm.wgmma_ring import Ring
from atlas_lab.kernels.lang import cuda


@L.device
def shared_tiles(tiles, groups, cut):
    """How many tiles of a row are cut."""
    turns = tiles // groups
    whole = turns * groups
    if cut == 0 or whole == tiles:
        return L.i32(0)
    return L.i32(tiles - max(turns - 1, 0) * groups)


@L.device
def share(number, steps, groups):
    """Where the share of group `number` begins, in `steps` steps of all tiles that are cut."""
    each = steps // groups
    return L.i32(number * each + min(L.i32(number), L.i32(steps - each * groups)))


@L.device
def alike(value):
    """A number that is the same in all lanes: now the compiler sees it, and keeps what descriptors of matrices are made
    of in uniform registers, where it would else move them there before each product."""
    return L.i32(L.shfl_idx(L.u32(value), 0))


@L.device
def uniform(part):
    """The numbers of a part, seen to be alike."""
    return alike(part[0]), alike(part[1]), alike(part[2])


@L.device
def own_group():
    """The warpgroup's number, seen to be alike."""
    return alike(L.warpgroup_id())


class Walk(NamedTuple):
    """Device functions; a part is a tile and its steps of K from `begin` to `end`.

    `first(m, n, steps, cut)` returns what `part(at, steps)` and `after(at, steps)` take: the block's place, whose last
    numbers are the steps of a row's tiles that are cut, and the blocks of a group. `part` returns a tile's number, its
    begin and its end, which are equal after the last. `at(tile, m, n)`: the row and column of y where it starts (a
    column past n where a cluster has blocks to spare).
    """

    first: L.DeviceFunction
    part: L.DeviceFunction
    after: L.DeviceFunction
    at: L.DeviceFunction


@functools.cache
def walk(bm: int, bn: int, raster: int, cluster: int) -> Walk:
    """Tiles of bm x bn; blocks of a cluster take neighbours in a row. `raster` row tiles share their weights' columns
    before the next column."""
    wide = bn * cluster

    @L.device
    def first(m, n, steps, cut):
        clusters, index = L.i32(cuda.gridDim.x // cluster), L.i32(cuda.blockIdx.x // cluster)
        rows, tiles = L.i32((m + bm - 1) // bm), L.i32((n + wide - 1) // wide)
        if cut == 0:
            rows, tiles = L.i32(1), L.i32(rows * tiles)
        groups, group = L.i32(clusters // rows), L.i32(index // rows)
        common = shared_tiles(tiles, groups, cut)
        all_steps, end = L.i32(common * steps), L.i32(tiles * steps)
        # in steps of a row of tiles: the share's begin and its end so far, where the next whole tile begins, the end
        low, high, whole = share(group, all_steps, groups), share(L.i32(group + 1), all_steps, groups), common + group
        if group >= groups:  # left over
            low, high, whole = L.i32(0), L.i32(0), tiles
        return low, high, L.i32(whole * steps), end, all_steps, rows

    @L.device
    def part(at, steps):
        low, high, whole, end, _, rows = at
        if low >= high:
            low, high = whole, min(L.i32(whole + steps), end)
        tile = L.i32(max(high - 1, 0) // steps)
        first = L.i32(tile * steps)
        begin, stop = L.i32(max(low - first, 0)), L.i32(max(high - first, 0))
        return L.i32(tile * rows + L.i32(cuda.blockIdx.x // cluster) % rows), begin, max(begin, stop)

    @L.device
    def after(at, steps):
        low, high, whole, end, common, rows = at
        if low < high:
            return low, max(low, L.i32((high - 1) // steps * steps)), whole, end, common, rows
        groups = L.i32(L.i32(cuda.gridDim.x // cluster) // rows)
        return low, high, L.i32(whole + groups * steps), end, common, rows

    @L.device
    def where(tile, m, n):
        row0, col0 = tile_at(tile, m, n, bm, wide, raster)
        if cluster > 1:
            col0 = col0 + L.i32(L.cluster_rank()) * bn
        return L.i32(row0), L.i32(col0)

    return Walk(first, part, after, where)


@functools.cache
def loader(ring: Ring, walk: Walk, per_row: int, stages: int, bring_w: L.DeviceFunction, bring_x: L.DeviceFunction):
    """A device function of the loading thread, `(w_maps, x_maps, m, n, k, cut)`: fills the ring, stage by stage, for
    every part that is this block's, by `bring_w(s, w_maps, col0, step)` and `bring_x(s, x_maps, row0, step)`;
    `per_row` elements of K are a stage.

    It waits for the launch before (`grid_wait`) once the first round of stages has its part of W, which nothing writes.
    """

    @L.device
    def run(w_maps, x_maps, m, n, k, cut):
        steps = L.i32((k + per_row - 1) // per_row)
        at = walk.first(m, n, steps, cut)
        tile, begin, end = walk.part(at, steps)
        row0, col0 = walk.at(tile, m, n)
        s = L.i32(0)
        while s < stages and begin + s < end:
            ring.fill(s, L.u32(0))
            bring_w(s, w_maps, col0, L.i32(begin + s))
            s = L.i32(s + 1)
        L.grid_wait()
        step = L.i32(begin + s)
        s = L.i32(0)
        while begin + s < step:
            bring_x(s, x_maps, row0, L.i32(begin + s))
            s = L.i32(s + 1)
        phase = L.u32(0)
        if s == stages:
            s, phase = L.i32(0), L.u32(1)
        while begin < end:
            while step < end:
                ring.fill(s, phase)
                bring_w(s, w_maps, col0, step)
                bring_x(s, x_maps, row0, step)
                s, phase = ring.after(s, phase)
                step = L.i32(step + 1)
            at = walk.after(at, steps)
            tile, begin, end = walk.part(at, steps)
            row0, col0 = walk.at(tile, m, n)
            step = begin
        ring.drain(s, phase)

    return run
