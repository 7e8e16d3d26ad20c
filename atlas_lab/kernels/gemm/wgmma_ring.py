"""Parts of the GEMMs on warpgroups: a ring of stages that one thread fills by TMA and warpgroups multiply from.

Dynamic shared memory: the stages, then what a kernel keeps beside them, then an mbarrier `full` and one `empty` for
every stage. A stage is full when all its bytes came; it is empty again when each consumer warp arrived. Tiles of
operands are rows of 128 bytes of K, swizzled by 128 bytes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import tile_at
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


class Ring(NamedTuple):
    """Device functions of a ring; `s` is a stage's number and `phase` the parity of its round, from (0, 0).

    `begin()`: the whole block, once. `fill(s, phase)`: the loading thread, until the stage is empty; then it expects
    its bytes at mbarrier `(full(), s)`. `take(s, phase)`: a consumer, until the stage is full. `release(s)`: every
    thread of a consumer, which will not read it again. `after(s, phase)` and `before(s)`: the stages around it.
    """

    begin: L.DeviceFunction
    full: L.DeviceFunction
    fill: L.DeviceFunction
    take: L.DeviceFunction
    release: L.DeviceFunction
    after: L.DeviceFunction
    before: L.DeviceFunction


@functools.cache
def ring(stages: int, expected: int, bars_at: int, warps: int) -> Ring:
    """`expected` bytes come to each stage; the mbarriers lie from byte `bars_at`; `warps` consume."""
    empty_at = bars_at + 8 * stages

    @L.device
    def begin():
        full, empty = L.dynamic_shared(L.u64, bars_at), L.dynamic_shared(L.u64, empty_at)
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                L.mbarrier_init(full, s, 1)
                L.mbarrier_init(empty, s, warps)
            L.fence_mbarrier_init()
        cuda.syncthreads()

    @L.device
    def full():
        return L.dynamic_shared(L.u64, bars_at)

    @L.device
    def fill(s, phase):
        L.mbarrier_wait(L.dynamic_shared(L.u64, empty_at), s, L.u32(phase ^ 1))
        L.mbarrier_arrive_expect_tx(L.dynamic_shared(L.u64, bars_at), s, expected)

    @L.device
    def take(s, phase):
        L.mbarrier_wait(L.dynamic_shared(L.u64, bars_at), s, phase)

    @L.device
    def release(s):
        if L.lane_id() == 0:
            L.mbarrier_arrive(L.dynamic_shared(L.u64, empty_at), s)

    @L.device
    def after(s, phase):
        last = s == stages - 1
        return (L.i32(0) if last else L.i32(s + 1)), (L.u32(phase ^ 1) if last else phase)

    @L.device
    def before(s):
        return L.i32(s - 1) if s > 0 else L.i32(stages - 1)

    return Ring(begin, full, fill, take, release, after, before)


@L.device
def tiles_of(m, n, bm, bn):
    """How many tiles y has."""
    return L.i32((m + bm - 1) // bm) * L.i32((n + bn - 1) // bn)


@functools.cache
def loader(ring: Ring, bm: int, bn: int, raster: int, per_row: int, bring: L.DeviceFunction):
    """A device function of the loading thread, `(maps, m, n, k)`: fills the ring, stage by stage, for every tile of y
    that is this block's, by `bring(s, maps, row0, col0, step)`; `per_row` elements of K are a stage."""

    @L.device
    def run(maps, m, n, k):
        s, phase = L.i32(0), L.u32(0)
        steps = L.i32((k + per_row - 1) // per_row)
        tile, count = L.i32(cuda.blockIdx.x), tiles_of(m, n, bm, bn)
        while tile < count:
            row0, col0 = tile_at(tile, m, n, bm, bn, raster)
            for step in range(steps):
                ring.fill(s, phase)
                bring(s, maps, row0, col0, step)
                s, phase = ring.after(s, phase)
            tile = L.i32(tile + cuda.gridDim.x)

    return run
