"""Tiles of y of which the blocks of a cluster have a share of K each, and whose sums meet in shared memory.

For few tiles: where whole ones would leave most SMs idle, and sums that meet in device memory (`wgmma_parts`) take a
launch that clears flags, and microseconds. A cluster has one tile. Every block multiplies its steps; all but the last
send their sums to the last by asynchronous stores, which an mbarrier there counts, and it adds them, the nearest first.
"""

from __future__ import annotations

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import tile_at
from atlas_lab.kernels.gemm.wgmma_parts import CHUNK, Meeting, meeting
from atlas_lab.kernels.gemm.wgmma_ring import GROUP_ROWS
from atlas_lab.kernels.gemm.wgmma_walk import Walk, share, walk
from atlas_lab.kernels.gemv.columns import part_of
from atlas_lab.kernels.lang import cuda

CHUNK_BYTES = 32 * 4 * CHUNK  # of a warp
SPLITS = (2,)  # blocks of a cluster: three and four find too few SMs side by side


def refuse_rows(bm: int, split: int) -> None:
    """Raises ValueError for a tile that is split and whose warpgroups share bm rows of x: one whose rows all lie past
    the last would not meet the other."""
    if split > 1 and bm > GROUP_ROWS:
        raise ValueError(f"split: found tiles of {bm} rows of x, expected {GROUP_ROWS}")


def mail_bytes(warps: int, count: int, split: int) -> int:
    """Shared memory of a block for what comes from others, and its mbarrier; 0 where nothing is split."""
    return (split - 1) * warps * count // CHUNK * CHUNK_BYTES + 16 if split > 1 else 0


@functools.cache
def split_walk(bm: int, bn: int, split: int) -> Walk:
    """As `walk`, for a launch of a cluster a tile, and at least one step a block; raises ValueError for other
    splits."""
    if split not in SPLITS:
        raise ValueError(f"split: found {split} blocks a tile, expected {', '.join(map(str, SPLITS))}")

    @L.device
    def start(m, n, steps, cut):
        rank, tile = L.i32(L.cluster_rank()), L.i32(cuda.blockIdx.x // split)
        row0, col0 = tile_at(tile, m, n, bm, bn, 1)
        place = (L.i32(0), L.i32(0), L.i32(0), L.i32(0), L.i32(0))
        begin, end = share(rank, steps, split), share(L.i32(rank + 1), steps, split)
        return place, (tile, L.i32(begin), L.i32(end), L.i32(row0), L.i32(col0))

    @L.device
    def next_(place, steps, m, n):
        return place, (L.i32(0), L.i32(0), L.i32(0), L.i32(0), L.i32(0))

    @L.device
    def shares(m, n, steps, cut):
        return L.i32(0), L.i32(1)

    return Walk(start, next_, shares)


@functools.cache
def split_meeting(warps: int, count: int, split: int, at: int) -> Meeting:
    """As `meeting`, with memory from byte `at` of each block on, a multiple of 16."""
    own, chunk_of = warps * count // CHUNK * CHUNK_BYTES, part_of(CHUNK)
    bar = at + (split - 1) * own

    @L.device
    def begin():
        if cuda.threadIdx.x == 0:
            bars = L.dynamic_shared(L.u64, bar)
            L.mbarrier_init(bars, 0, 1)
            L.fence_mbarrier_init()
            if L.i32(L.cluster_rank()) == split - 1:
                L.mbarrier_arrive_expect_tx(bars, 0, L.u32((split - 1) * own))
        L.cluster_arrive_relaxed()

    @L.device
    def place(sender, warp):
        return L.i32(at + sender * own + warp * (count // CHUNK * CHUNK_BYTES) + 4 * CHUNK * L.lane_id())

    @L.device
    def leave(parts, flags, acc, warp):
        L.cluster_wait()
        shared, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bar)
        to, signal = L.mapa(shared, L.u32(split - 1)), L.mapa(bars, L.u32(split - 1))
        here = place(L.i32(L.cluster_rank()), warp)
        for j in L.unroll(count // CHUNK):
            L.st_async_v4_f32(to, here + CHUNK_BYTES * j, chunk_of(acc, j), signal, 0)

    @L.device
    def add(parts, flags, acc, warp, shares, tile, begin, steps):
        L.cluster_wait()
        shared = L.dynamic_shared(L.u8, 0)
        L.mbarrier_wait_cluster(L.dynamic_shared(L.u64, bar), 0, L.u32(0))
        for back in L.unroll(1, split):
            here, sums = place(split - 1 - back, warp), ()
            for j in L.unroll(count // CHUNK):
                v = L.lds_v4_f32(shared, here + CHUNK_BYTES * j)
                for i in L.unroll(CHUNK):
                    sums = sums + (L.add_rn(acc[CHUNK * j + i], v[i]),)
            acc = sums
        return acc

    @L.device
    def end():
        L.cluster_wait()

    return Meeting(leave, add, begin, end)


def dealt(
    bm: int,
    bn: int,
    raster: int,
    across: int,
    down: int,
    split: int,
    warps: int,
    count: int,
    mail_at: int,
    inside: bool = False,
) -> tuple[Walk, Meeting]:
    """How tiles are dealt out, `inside` x as `walk` says, and how sums meet: over a cluster that cuts their K where it
    is `split`, with memory from byte `mail_at` on. Raises ValueError where blocks would share loads too."""
    if split == 1:
        return walk(bm, bn, raster, across, down, inside), meeting(warps, count, across * down)
    if across * down > 1:
        raise ValueError(f"split: found {split} blocks a tile in clusters of {across} x {down}, expected 1 x 1")
    return split_walk(bm, bn, split), split_meeting(warps, count, split, mail_at)
