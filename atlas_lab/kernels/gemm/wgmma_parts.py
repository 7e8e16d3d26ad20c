"""How the sums of a tile that blocks share along K meet: all but the last leave theirs in memory, the last adds them.

A warp of one block meets the same warp of the others, lane by lane: nothing else is ordered. `parts` F32 has, for each
block of the launch, the accumulators of its warps, four a lane at a time, and `flags` U32 a word for each warp, 0
before the launch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_walk import share
from atlas_lab.kernels.lang import cuda
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import WRITABLE

CHUNK = 4  # accumulators of a lane that lie together; the lanes of a warp follow each other
STEP = 32 * CHUNK
CLEARED = 256  # flags that a block clears


class Meeting(NamedTuple):
    """Device functions of a consumer warp, number `warp` of those that multiply.

    `leave(parts, flags, acc, warp)`: its sums of a part that does not end its tile. `add(parts, flags, acc, warp,
    shares, tile, begin, steps)`: its sums of the part that ends a tile, from step `begin` on, plus those of the blocks
    before it, the nearest first; `shares` is what the walk's says. Flags, where there are any, were cleared by a
    launch before, for which `wgmma_ring.roles` waits. `begin()`: every thread, before it does either; `end()`: those
    that do neither, before they exit.
    """

    leave: L.DeviceFunction
    add: L.DeviceFunction
    begin: L.DeviceFunction
    end: L.DeviceFunction


def part_floats(warps: int, count: int) -> int:
    """Elements of `parts` for a block of `warps` that multiply, with `count` accumulators a thread."""
    return warps * 32 * count


@functools.cache
def _store(count: int) -> L.Op:
    """Stores a lane's accumulators, CHUNK of them every STEP elements."""

    def emit(e: Any, address: Any, *acc: Any) -> None:
        for j in range(0, count, CHUNK):
            text = f"st.global.v4.f32 [$0 + {j * STEP}], {{$1, $2, $3, $4}};"
            e.asm(text, [], [address, *acc[j : j + CHUNK]])

    def run(p: L.Pointer, i: int, acc: Any) -> None:
        for j in range(0, count, CHUNK):
            current().write(p, i + j // CHUNK * STEP, L.f32, tuple(acc[j : j + CHUNK]))

    operands = (WRITABLE, L.Vec(L.f32, count))
    return L.intrinsic(f"store_part_{count}", operands, ptx=emit, numpy=run, effect="writes", section="9.7.9 st")


@functools.cache
def _add(count: int) -> L.Op:
    """Accumulators plus those that `_store` left."""

    def emit(e: Any, address: Any, *acc: Any) -> list[Any]:
        out = []
        for j in range(0, count, CHUNK):
            text = f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4 + {j * STEP}];"
            chunk = acc[j : j + CHUNK]
            loaded = e.asm(text, [a.type for a in chunk], [address])
            out += [e.f32("add.rn.f32 $0, $1, $2;", a, v) for a, v in zip(chunk, loaded, strict=True)]
        return out

    def run(p: L.Pointer, i: int, acc: Any) -> tuple[Any, ...]:
        left = [v for j in range(count // CHUNK) for v in current().read(p, i + j * STEP, L.f32, CHUNK)]
        return tuple(L.add_rn(a, v) for a, v in zip(acc, left, strict=True))

    vec = L.Vec(L.f32, count)
    return L.intrinsic(
        f"add_part_{count}", (WRITABLE, vec), vec, ptx=emit, numpy=run, effect="reads", section="9.7.9 ld, 9.7.3 add"
    )


@L.device
def _nothing():
    return None


@functools.cache
def meeting(warps: int, count: int, cluster: int) -> Meeting:
    """For blocks of `warps` that multiply, with `count` accumulators a thread."""
    of_warp, store_part, add_part = 32 * count, _store(count), _add(count)

    @L.device
    def leave(parts, flags, acc, warp):
        slot = L.i32(cuda.blockIdx.x * warps + warp)
        store_part(parts, L.i64(slot) * of_warp + CHUNK * L.lane_id(), acc)
        cuda.syncwarp()
        if L.lane_id() == 0:
            L.st_release_b32(flags, slot, L.u32(1))

    @L.device
    def add(parts, flags, acc, warp, shares, tile, begin, steps):
        common, rows = shares
        groups, group = L.i32(cuda.gridDim.x // cluster // rows), L.i32(cuda.blockIdx.x // cluster // rows)
        first = L.i32(tile // rows * steps)
        done = L.i32(first + begin)
        back = L.i32(0)
        while done > first:
            back = L.i32(back + 1)
            slot = L.i32(L.i32(cuda.blockIdx.x - back * rows * cluster) * warps + warp)
            if L.lane_id() == 0:
                while L.ld_acquire_b32(flags, slot) == 0:
                    pass
            cuda.syncwarp()
            acc = add_part(parts, L.i64(slot) * of_warp + CHUNK * L.lane_id(), acc)
            done = share(L.i32(group - back), common, groups)
        return acc

    return Meeting(leave, add, _nothing, _nothing)


@L.kernel(launch_bounds=(CLEARED, 1))
def clear_flags(flags: L.Out[L.u32], count: L.i32):
    """`count` words become 0, CLEARED a block. A dependent launch may start at once."""
    L.grid_launch_dependents()
    L.grid_wait()
    i = L.i32(cuda.blockIdx.x * CLEARED + cuda.threadIdx.x)
    if i < count:
        L.stg_b32(flags, i, L.u32(0))
