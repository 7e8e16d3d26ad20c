"""Parts of the GEMMs on warpgroups: a ring of stages that one thread fills by TMA and warpgroups multiply from.

Dynamic shared memory: the stages, then what a kernel keeps beside them, then an mbarrier `full` and one `empty` for
every stage. A stage is full when all its bytes came; it is empty again when each consumer warp arrived. Blocks of a
cluster multiply the same rows of x: each loads a part of them for all, so that a stage is empty when the consumers of
every block arrived. Tiles of operands are rows of 128 bytes of K, swizzled by 128 bytes.
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
LOADING, MULTIPLYING = 40, 232  # registers a thread of three warpgroups
BARS = 16  # bytes of a stage's two mbarriers


def threads_of(bm: int) -> int:
    """A warpgroup for every 64 rows, and the warp that loads; where two multiply, one that hands them its registers."""
    return 128 * (bm // GROUP_ROWS) + (128 if bm > GROUP_ROWS else 32)


@functools.cache
def roles(bm: int) -> tuple[L.DeviceFunction, L.DeviceFunction]:
    """What warpgroups call first where they load and where they multiply: who has how many registers (of 65536)."""
    several = bm > GROUP_ROWS

    @L.device
    def loading():
        if several:
            L.setmaxnreg_dec(LOADING)

    @L.device
    def multiplying():
        if several:
            L.setmaxnreg_inc(MULTIPLYING)

    return loading, multiplying


def stages_of(stage: int, beside: int = 0) -> int:
    """How many stages of `stage` bytes fit a block beside `beside` bytes."""
    return min(MOST_STAGES, (SHARED_LIMIT - beside) // (stage + BARS))


def shared_of(stages: int, stage: int, beside: int = 0) -> int:
    """Bytes of dynamic shared memory."""
    return beside + stages * (stage + BARS)


def warps_of(bm: int, cluster: int) -> int:
    """Warps that consume a stage."""
    return 4 * (bm // GROUP_ROWS) * cluster


class Ring(NamedTuple):
    """Device functions of a ring; `s` is a stage's number and `phase` the parity of its round, from (0, 0).

    `begin()`: the whole block, once. `fill(s, phase)`: the loading thread, until the stage is empty; then it expects
    its bytes at mbarrier `(full(), s)`. `rows(at, x, row0, k0, s)`: it loads rows of x to byte `at` of a stage, with a
    map whose box is the rows of a tile over the blocks of a cluster. `drain(s, phase)`: it exits only after this.
    `take(s, phase)`: a consumer, until the stage is full. `release(s)`: every thread of a consumer, which will not read
    it again. `after(s, phase)` and `before(s)`: the stages around it.
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
def ring(stages: int, expected: int, bars_at: int, bm: int, cluster: int) -> Ring:
    """`expected` bytes come to each stage, for tiles of `bm` rows of x; the mbarriers lie from byte `bars_at`."""
    empty_at = bars_at + 8 * stages
    warps = warps_of(bm, cluster)
    part = bm // cluster
    everyone = (1 << cluster) - 1
    load, load_for_all = L.tma_load_2d, L.tma_load(2, multicast=True)
    wait_empty = L.mbarrier_wait_cluster if cluster > 1 else L.mbarrier_wait

    @L.device
    def begin():
        full, empty = L.dynamic_shared(L.u64, bars_at), L.dynamic_shared(L.u64, empty_at)
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                L.mbarrier_init(full, s, 1)
                L.mbarrier_init(empty, s, warps)
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
        wait_empty(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
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
                wait_empty(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
                s, phase = after(s, phase)

    @L.device
    def take(s, phase):
        L.mbarrier_wait(L.dynamic_shared(L.u64, bars_at), s, phase)

    @L.device
    def release(s):
        if cluster > 1:
            if L.lane_id() < cluster:
                L.mbarrier_arrive_remote(L.mapa(L.dynamic_shared(L.u64, empty_at), L.u32(L.lane_id())), s)
        else:
            if L.lane_id() == 0:
                L.mbarrier_arrive(L.dynamic_shared(L.u64, empty_at), s)

    @L.device
    def after(s, phase):
        last = s == stages - 1
        return (L.i32(0) if last else L.i32(s + 1)), (L.u32(phase ^ 1) if last else phase)

    @L.device
    def before(s):
        return L.i32(s - 1) if s > 0 else L.i32(stages - 1)

    return Ring(begin, full, fill, rows, drain, take, release, after, before)
