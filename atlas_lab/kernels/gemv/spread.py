"""Where the warps that share the units of a tile group are: in one block, or spread over the blocks of a cluster.

A block of a cluster reads its own units' part of x, and its SM no more of it. Warps are numbered through the cluster,
so that units go to the same warps, and sums are added in the same order, however many blocks there are.
"""

import functools
from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

CLUSTERS = (1, 2, 4, 8)  # blocks


class Spread(NamedTuple):
    """`own` warps in a block. Device functions: `group()` is the number of the block's tile group, `warp()` and
    `thread()` those of the warp and the thread among all that share it.

    `met()`: what each thread stored in its block's shared memory is visible to all of them;
    `load(shared, at, warp, size)`: element `at` of the `size` F32 that the warp with that number stored, those of its
    block's warps one after another from `shared` on; `leave()`: nobody reads this block's any more.
    """

    own: int
    group: Any
    warp: Any
    thread: Any
    met: Any
    load: Any
    leave: Any


@L.device
def _block():
    return L.i32(cuda.blockIdx.x)


@L.device
def _thread():
    return L.i32(cuda.threadIdx.x)


@L.device
def _block_meets():
    cuda.syncthreads()


@L.device
def _near(shared, at, warp, size):
    return L.lds_f32(shared, at + warp * size)


@L.device
def _nothing():
    return None


@L.device
def _cluster_meets():
    L.cluster_arrive()
    L.cluster_wait()


@functools.cache
def spread(warps: int, cluster: int) -> Spread:
    """That of `warps` warps over `cluster` blocks; raises ValueError for what cannot be."""
    if cluster not in CLUSTERS or warps % cluster:
        raise ValueError(
            f"spread: found {warps} warps over a cluster of {cluster}, expected 1, 2, 4 or 8 that divide them"
        )
    own = warps // cluster

    if cluster == 1:
        return Spread(own, _block, L.warp_id, _thread, _block_meets, _near, _nothing)

    @L.device
    def group():
        return L.i32(cuda.blockIdx.x // cluster)

    @L.device
    def warp():
        return L.i32(L.i32(L.cluster_rank()) * own + L.warp_id())

    @L.device
    def thread():
        return L.i32(L.i32(L.cluster_rank()) * (32 * own) + cuda.threadIdx.x)

    @L.device
    def far(shared, at, warp, size):
        return L.ld_cluster_f32(L.mapa(shared, warp // own), at + (warp % own) * size)

    return Spread(own, group, warp, thread, _cluster_meets, far, _cluster_meets)
