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
from atlas_lab.kernels.gemm.wgmma_store import OUT_ROWS
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
    """Where the share of group `number` begins, in `steps` steps of all tiles that are cut: at a tile's own begin for
    every so many groups, where as many are to each tile."""
    return L.i32(L.u32(number * steps) // L.u32(groups))


class Walk(NamedTuple):
    """Device functions; a part is some steps of K of a tile: `(tile, begin, end, row0, col0)`, steps from `begin` to
    `end`, which are equal after the last part, and where the tile starts in y (past m or n where a cluster has blocks
    to spare).

    `start(m, n, steps, cut)` returns the block's place and its first part, `next(place, steps, m, n)` those after.
    `shares(m, n, steps, cut)`: the steps of all tiles that are cut of a row of tiles, and the blocks of a group.
    """

    start: L.DeviceFunction
    next: L.DeviceFunction
    shares: L.DeviceFunction


@functools.cache
def walk(bm: int, bn: int, raster: int, across: int = 1, down: int = 1, inside: bool = False) -> Walk:
    """Tiles of bm x bn; a cluster takes neighbours, `across` in a row and `down` in a column. `raster` row tiles share
    their weights' columns before the next column. With `inside` a tile that would reach past m begins earlier, by as
    many times OUT_ROWS as are missing, for boxes past the end of x take longer: its rows before a multiple of bm are
    those of the tile before, which stores them."""
    wide, tall, cluster = bn * across, bm * down, across * down
    band = max(raster // down, 1)

    @L.device
    def sizes(m, n, cut):
        """Rows of tiles and tiles of each, as they are dealt out, and the groups of blocks that take them."""
        clusters = L.i32(cuda.gridDim.x // cluster)
        rows, tiles = L.i32((m + tall - 1) // tall), L.i32((n + wide - 1) // wide)
        if cut == 0:
            rows, tiles = L.i32(1), L.i32(rows * tiles)
        return rows, tiles, L.i32(clusters // rows)

    @L.device
    def shares(m, n, steps, cut):
        rows, tiles, groups = sizes(m, n, cut)
        return L.i32(shared_tiles(tiles, groups, cut) * steps), rows

    @L.device
    def part(place, steps, m, n):
        low, high, whole, end, rows = place
        if low >= high:
            low, high = whole, min(L.i32(whole + steps), end)
        tile = L.i32(max(high - 1, 0) // steps)
        first = L.i32(tile * steps)
        begin, stop = L.i32(max(low - first, 0)), L.i32(max(high - first, 0))
        tile = L.i32(tile * rows + L.i32(cuda.blockIdx.x // cluster) % rows)
        row0, col0 = tile_at(tile, m, n, tall, wide, band)
        if across > 1:
            col0 = col0 + L.i32(L.cluster_rank()) % across * bn
        if down > 1:
            row0 = row0 + L.i32(L.cluster_rank()) // across * bm
        if inside and row0 < m:
            row0 = row0 - max(min(row0, L.i32(row0 + bm - m)), 0) // OUT_ROWS * OUT_ROWS
        return tile, begin, L.i32(max(begin, stop)), L.i32(row0), L.i32(col0)

    @L.device
    def start(m, n, steps, cut):
        rows, tiles, groups = sizes(m, n, cut)
        group = L.i32(L.i32(cuda.blockIdx.x // cluster) // rows)
        common = shared_tiles(tiles, groups, cut)
        all_steps, end = L.i32(common * steps), L.i32(tiles * steps)
        # in steps of a row of tiles: the share's begin and its end so far, where the next whole tile begins, the end
        low, high, whole = share(group, all_steps, groups), share(L.i32(group + 1), all_steps, groups), common + group
        if group >= groups:  # left over
            low, high, whole = L.i32(0), L.i32(0), tiles
        place = (low, high, L.i32(whole * steps), end, rows)
        return place, part(place, steps, m, n)

    @L.device
    def after(place, steps):
        low, high, whole, end, rows = place
        if low < high:
            return low, max(low, L.i32((high - 1) // steps * steps)), whole, end, rows
        groups = L.i32(L.i32(cuda.gridDim.x // cluster) // rows)
        return low, high, L.i32(whole + groups * steps), end, rows

    @L.device
    def next_(place, steps, m, n):
        place = after(place, steps)
        return place, part(place, steps, m, n)

    return Walk(start, next_, shares)


@functools.cache
def loader(ring: Ring, walk: Walk, per_row: int, stages: int, bring_w: L.DeviceFunction, bring_x: L.DeviceFunction):
    """A device function of the loading thread, `(w_maps, x_maps, m, n, k, cut)`: fills the ring, stage by stage, for
    every part that is this block's, by `bring_w(s, w_maps, col0, step)` and `bring_x(s, x_maps, row0, step)`;
    `per_row` elements of K are a stage.

    It tells the warps that multiply of each part, so that they divide nothing between tiles, while nothing is
    multiplied. It waits for the launch before (`grid_wait`) once the first round of stages has its part of W, which
    nothing writes, and lets the next launch do likewise as soon as an SM has room.
    """

    @L.device
    def run(w_maps, x_maps, m, n, k, cut):
        steps = L.i32((k + per_row - 1) // per_row)
        place, part = walk.start(m, n, steps, cut)
        _, begin, end, row0, col0 = part
        s = L.i32(0)
        while s < stages and begin + s < end:
            if s == 0:
                ring.start(s, L.u32(0), m, part)
            else:
                ring.fill(s, L.u32(0), m)
            bring_w(s, w_maps, col0, L.i32(begin + s))
            s = L.i32(s + 1)
        L.grid_launch_dependents()
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
                if step == begin:
                    ring.start(s, phase, m, part)
                else:
                    ring.fill(s, phase, m)
                bring_w(s, w_maps, col0, step)
                bring_x(s, x_maps, row0, step)
                s, phase = ring.after(s, phase)
                step = L.i32(step + 1)
            place, part = walk.next(place, steps, m, n)
            _, begin, end, row0, col0 = part
            step = begin
        ring.stop(s, phase, part)
        s, phase = ring.after(s, phase)
        ring.drain(s, phase)

    return run
