"""Parts of the GEMMs on warpgroups: a ring of stages that one thread fills by TMA and warpgroups multiply from.

Dynamic shared memory: the stages, then what a kernel keeps beside them, then mbarriers, a `full` and an `empty` for
every stage, then which part of which tile a stage begins. A stage is full when all its bytes came; it is empty again
when each consumer warp arrived. Tiles of operands are rows of 128 bytes of K, swizzled by 128 bytes.

Blocks of a cluster are neighbours `across` a row of tiles of y, which multiply the same rows of x, and `down` a column,
which multiply the same rows of W: each loads a part of what it shares for all, once the stage is empty in all of them,
so consumers arrive in every such block. They arrive relaxed: a release at cluster scope is a fence of the whole memory
(0.7 us under load), and all that they hand back is memory they have read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

ROW = 128  # bytes of a tile's row: K of one stage
GROUP_ROWS = 64  # rows of a tile that one warpgroup multiplies
GROUP_BYTES = GROUP_ROWS * ROW
SHARED_LIMIT = 232448  # bytes a block may have, compute capability 9.0
MOST_STAGES = 8
LOADS = 56  # registers of a thread that loads
MULTIPLIES = {2: 224, 3: 144}  # of one that multiplies, by warpgroups that do; an SM has 65536
SWIZZLED = 8  # rows after which the swizzle repeats
NOTHING = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
CLEARED = 1  # the named barrier of threads that multiply, when rows are cleared
BARS = 48  # bytes of a stage's mbarriers, and of the part that it begins


def threads_of(rows: int) -> int:
    """A warpgroup for every 64 rows that are multiplied, and a warp that loads; where several multiply, a warpgroup
    that hands them its registers."""
    return 128 * (rows // GROUP_ROWS) + (128 if rows > GROUP_ROWS else 32)


@L.device
def alike(value):
    """A number that is the same in all lanes: now the compiler sees it, and keeps what descriptors of matrices are made
    of in uniform registers, where it would else move them there before each product."""
    return L.i32(L.shfl_idx(L.u32(value), 0))


@L.device
def own_group():
    """The warpgroup's number, seen to be alike."""
    return alike(L.warpgroup_id())


@L.device
def fetch_maps(x, w):
    """Before the block begins: the maps come to where the copy engine reads them, while mbarriers are made."""
    if cuda.threadIdx.x == 0:
        L.tma_prefetch(w)
        L.tma_prefetch(x)


def stages_of(stage: int, beside: int = 0) -> int:
    """How many stages of `stage` bytes fit a block beside `beside` bytes."""
    return min(MOST_STAGES, (SHARED_LIMIT - beside) // (stage + BARS))


def shared_of(stages: int, stage: int, beside: int = 0) -> int:
    """Bytes of dynamic shared memory."""
    return beside + stages * (stage + BARS)


def warps_of(rows: int) -> int:
    """Warps that consume a stage."""
    return 4 * (rows // GROUP_ROWS)


class Ring(NamedTuple):
    """Device functions of a ring; `s` is a stage's number and `phase` the parity of its round, from (0, 0).

    `begin()`: the whole block, once. `clear(m)`: all threads that consume, once, before they do, for m rows of x.
    `fill(s, phase, m)`: the loading thread, until the stage is
    empty; then it expects its bytes at mbarrier `(full(), s)`, but for those of rows that no box brings.
    `start(s, phase, m, part)`: the same for the first stage of a part, five numbers that `part(s)` gives each thread
    of a consumer warp; `stop(s, phase, part)`: of the last part, for which no bytes come. `rows(at, x, row0, k0, s)`:
    it loads rows of x to byte `at` of a stage, with a map whose box is those that there are of a tile's (`boxed`);
    `columns(at, w, col0, k0, s)`: rows of W, with a map whose box is the columns of a tile over the blocks down.
    `drain(s, phase)`: it exits only after this.
    `take(s, phase)`: a consumer, until the stage is full. `release(s)`: every thread of a consumer warp, which will not
    read it again. `after(s, phase)` and `before(s)`: the stages around it.
    """

    begin: L.DeviceFunction
    clear: L.DeviceFunction
    full: L.DeviceFunction
    fill: L.DeviceFunction
    start: L.DeviceFunction
    stop: L.DeviceFunction
    part: L.DeviceFunction
    rows: L.DeviceFunction
    columns: L.DeviceFunction
    drain: L.DeviceFunction
    take: L.DeviceFunction
    release: L.DeviceFunction
    after: L.DeviceFunction
    before: L.DeviceFunction


def boxed(bm: int, across: int, m: int) -> int:
    """Rows of the boxes of x that `Ring.rows` loads, for m rows of x: no more than there are, since boxes that reach
    past their end take longer; where blocks across share a tile's, each has its part."""
    return min(bm, m) if across == 1 else bm // across


def _part(of: int, blocks: int, what: str) -> int:
    """What each of `blocks` loads of `of` rows: whole repeats of a swizzle, or all; raises ValueError."""
    if blocks > 1 and of % (SWIZZLED * blocks):
        raise ValueError(f"ring: found {of} rows of {what} for {blocks} blocks, expected a multiple of {SWIZZLED} each")
    return of // blocks


@functools.cache
def ring(
    stages: int,
    expected: int,
    bars_at: int,
    bm: int,
    across: int = 1,
    consumers: int = 0,
    bn: int = 0,
    down: int = 1,
    tiles: int = 1,
    apart: int = 0,
) -> Ring:
    """`expected` bytes come to each stage, for tiles of `bm` rows of x and, where `columns` is called, `bn` of W; the
    mbarriers lie from byte `bars_at`. `consumers`: warpgroups of a block that multiply, where they are not one for
    every 64 rows of x. A stage begins with `tiles` of x, `apart` bytes from the next (0: `expected`). Raises ValueError
    for rows that warpgroups or blocks cannot share."""
    if not consumers and bm % GROUP_ROWS:
        raise ValueError(f"ring: found tiles of {bm} rows of x, expected a multiple of {GROUP_ROWS}")
    if bars_at % 16:
        raise ValueError(f"ring: found mbarriers from byte {bars_at}, expected a multiple of 16")
    if across * down not in (1, 2, 4, 8):
        raise ValueError(f"ring: found clusters of {across} x {down} blocks, expected 1, 2, 4 or 8")
    empty_at, parts_at, cluster = bars_at + 8 * stages, bars_at + 16 * stages, across * down
    # a stage is handed back to those that load into it: the block's row and its column of the cluster
    arrivals = (across + down - 1) * warps_of(GROUP_ROWS * consumers or bm)
    threads = 128 * (consumers or bm // GROUP_ROWS)  # that consume
    x_rows, w_rows = _part(bm, across, "x"), _part(bn, down, "W")
    in_row, in_column = (1 << across) - 1, sum(1 << across * i for i in range(down))
    load, load_for_all = L.tma_load_2d, L.tma_load(2, multicast=True)

    every = apart or expected

    @L.device
    def coming(m):
        """Bytes that come to a stage."""
        return L.u32(expected - max(bm - m, 0) * (tiles * ROW)) if across == 1 else L.u32(expected)

    @L.device
    def clear(m):
        """Rows that no box brings, of which products are made that nobody stores: while the first stages come. In a
        branch the barrier kept the assembler from overlapping products (C7511)."""
        if across == 1:
            if m < bm:
                words, own = L.dynamic_shared(L.u32, 0), L.i32(4 * cuda.threadIdx.x)
                for i in range(stages * tiles):
                    at = L.i32(i // tiles * (every // 4) + i % tiles * (bm * ROW // 4))
                    for word in range(m * (ROW // 4) + own, bm * (ROW // 4), 4 * threads):
                        L.sts_v4_b32(words, at + word, NOTHING)
                L.fence_proxy_async()
            L.barrier_sync(CLEARED, threads)

    @L.device
    def begin():
        full, empty = L.dynamic_shared(L.u64, bars_at), L.dynamic_shared(L.u64, empty_at)
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                L.mbarrier_init(full, s, 1)
                L.mbarrier_init(empty, s, arrivals)
            L.fence_mbarrier_init()
        if cluster > 1:
            L.cluster_arrive()
            L.cluster_wait()
        else:
            cuda.syncthreads()

    @L.device
    def full():
        return L.dynamic_shared(L.u64, bars_at)

    @L.device
    def fill(s, phase, m):
        L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
        L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, bars_at), s, coming(m))

    @L.device
    def say(s, part):
        parts = L.dynamic_shared(L.u32, parts_at)
        L.sts_v4_b32(parts, 8 * s, (L.u32(part[0]), L.u32(part[1]), L.u32(part[2]), L.u32(part[3])))
        L.sts_b32(parts, 8 * s + 4, L.u32(part[4]))

    @L.device
    def start(s, phase, m, part):
        L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
        say(s, part)
        L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, bars_at), s, coming(m))

    @L.device
    def stop(s, phase, part):
        L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
        say(s, part)
        L.mbarrier_arrive(L.dynamic_shared(L.u64, bars_at), s)

    @L.device
    def part(s):
        parts = L.dynamic_shared(L.u32, parts_at)
        v = L.lds_v4_b32(parts, 8 * s)
        return alike(v[0]), alike(v[1]), alike(v[2]), alike(v[3]), alike(L.lds_b32(parts, 8 * s + 4))

    @L.device
    def rows(at, x, row0, k0, s):
        tiles, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bars_at)
        if across > 1:
            rank = L.i32(L.cluster_rank())
            first = L.i32(rank % across * x_rows)
            everyone = L.u32(in_row << (rank // across * across))
            load_for_all(tiles, at + first * ROW, x, (row0 + first, k0), bars, s, everyone)
        else:
            load(tiles, at, x, (row0, k0), bars, s)

    @L.device
    def columns(at, w, col0, k0, s):
        tiles, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bars_at)
        if down > 1:
            rank = L.i32(L.cluster_rank())
            first = L.i32(rank // across * w_rows)
            everyone = L.u32(in_column << (rank % across))
            load_for_all(tiles, at + first * ROW, w, (col0 + first, k0), bars, s, everyone)
        else:
            load(tiles, at, w, (col0, k0), bars, s)

    @L.device
    def drain(s, phase):
        if cluster > 1:  # the other blocks still arrive here
            for _ in range(stages):
                L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
                s, phase = after(s, phase)

    @L.device
    def take(s, phase):
        L.mbarrier_wait(L.dynamic_shared(L.u64, bars_at), s, phase)

    @L.device
    def release(s):
        empty = L.dynamic_shared(L.u64, empty_at)
        if cluster > 1:
            lane, rank = L.lane_id(), L.i32(L.cluster_rank())
            mine = lane // across == rank // across or lane % across == rank % across
            if lane < cluster and mine:
                L.mbarrier_arrive_remote_relaxed(L.mapa(empty, L.u32(L.lane_id())), s)
        elif L.lane_id() == 0:
            L.mbarrier_arrive(empty, s)

    @L.device
    def after(s, phase):
        last = s == stages - 1
        return (L.i32(0) if last else L.i32(s + 1)), (L.u32(phase ^ 1) if last else phase)

    @L.device
    def before(s):
        return L.i32(s - 1) if s > 0 else L.i32(stages - 1)

    return Ring(begin, clear, full, fill, start, stop, part, rows, columns, drain, take, release, after, before)


@functools.cache
def roles(rows: int, of_stages: Ring, moved: int = 0) -> tuple[L.DeviceFunction, L.DeviceFunction]:
    """What warpgroups call first where they load, `loading()`, and where they multiply `rows`, `multiplying(m)`: who
    has how many registers, `moved` of them from each thread that loads, half as many to each of two that multiply.
    Those that multiply clear what they multiply and nobody loads, and wait for the launches before."""
    several = rows > GROUP_ROWS
    few, many = LOADS - moved, MULTIPLIES.get(rows // GROUP_ROWS, 0) + moved // 2 * (rows == 2 * GROUP_ROWS)

    @L.device
    def loading():
        if several:
            L.setmaxnreg_dec(few)

    @L.device
    def multiplying(m):
        if several:
            L.setmaxnreg_inc(many)
        of_stages.clear(m)
        L.grid_wait()  # x comes after it anyway, and what they store a launch before may have stored, too

    return loading, multiplying
