"""Parts of the GEMMs on warpgroups: a ring of stages that one thread fills by TMA and warpgroups multiply from.

Dynamic shared memory: the stages, then what a kernel keeps beside them, then mbarriers, a `full` and an `empty` for
every stage. A stage is full when all its bytes came; it is empty again when each consumer warp arrived. Tiles of
operands are rows of 128 bytes of K, swizzled by 128 bytes.

Blocks of a cluster multiply the same rows of x: each loads a part of them for all, once the stage is empty in all of
them, so consumers arrive in every block. They arrive relaxed: a release at cluster scope is a fence of the whole memory
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
# of a thread that loads and of one that multiplies, by warpgroups that multiply; an SM has 65536
REGISTERS = {2: (56, 224), 3: (56, 144)}
BARS = 16  # bytes of a stage's mbarriers


def threads_of(rows: int) -> int:
    """A warpgroup for every 64 rows that are multiplied, and a warp that loads; where several multiply, a warpgroup
    that hands them its registers."""
    return 128 * (rows // GROUP_ROWS) + (128 if rows > GROUP_ROWS else 32)


@functools.cache
def roles(rows: int) -> tuple[L.DeviceFunction, L.DeviceFunction]:
    """What warpgroups call first where they load and where they multiply `rows`: who has how many registers."""
    several = rows > GROUP_ROWS
    few, many = REGISTERS.get(rows // GROUP_ROWS, (0, 0))

    @L.device
    def loading():
        if several:
            L.setmaxnreg_dec(few)

    @L.device
    def multiplying():
        if several:
            L.setmaxnreg_inc(many)

    return loading, multiplying


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

    `begin()`: the whole block, once. `fill(s, phase)`: the loading thread, until the stage is empty; then it expects
    its bytes at mbarrier `(full(), s)`. `rows(at, x, row0, k0, s)`: it loads rows of x to byte `at` of a stage, with a
    map whose box is the rows of a tile over the blocks of a cluster. `drain(s, phase)`: it exits only after this.
    `take(s, phase)`: a consumer, until the stage is full. `release(s)`: every thread of a consumer warp, which will not
    read it again. `after(s, phase)` and `before(s)`: the stages around it.
    """

    begin: L.DeviceFunction
    full: L.DeviceFunction
    fill: L.DeviceFunction
    rows: L.DeviceFunction
    drain: L.DeviceFunction
    take: L.DeviceFunction
    release: L.DeviceFunction
    after: L.DeviceFunction
    before: L.DeviceFunction


@functools.cache
def ring(stages: int, expected: int, bars_at: int, bm: int, cluster: int, consumers: int = 0) -> Ring:
    """`expected` bytes come to each stage, for tiles of `bm` rows of x; the mbarriers lie from byte `bars_at`.
    `consumers`: warpgroups of a block that multiply, where they are not one for every 64 rows of x. Raises ValueError
    for rows that warpgroups or blocks cannot share."""
    if not consumers and bm % GROUP_ROWS:
        raise ValueError(f"ring: found tiles of {bm} rows of x, expected a multiple of {GROUP_ROWS}")
    if cluster not in (1, 2, 4, 8) or bm % cluster:
        raise ValueError(
            f"ring: found {bm} rows of x for a cluster of {cluster}, expected 1, 2, 4 or 8 that divide them"
        )
    empty_at = bars_at + 8 * stages
    arrivals = cluster * warps_of(GROUP_ROWS * consumers or bm)
    part = bm // cluster
    everyone = (1 << cluster) - 1
    load, load_for_all = L.tma_load_2d, L.tma_load(2, multicast=True)

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
    def fill(s, phase):
        L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
        L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, bars_at), s, expected)

    @L.device
    def rows(at, x, row0, k0, s):
        tiles, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bars_at)
        if cluster > 1:
            first = L.i32(L.cluster_rank()) * part
            load_for_all(tiles, at + first * ROW, x, (row0 + first, k0), bars, s, everyone)
        else:
            load(tiles, at, x, (row0, k0), bars, s)

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
            if L.lane_id() < cluster:
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

    return Ring(begin, full, fill, rows, drain, take, release, after, before)
