"""The warps that share the units of a row tile, spread over the blocks of a cluster: who they are, and how sums meet.

A block reads the part of x that its own units multiply, so that its SM has the less of it to read. Warps are numbered
through the cluster: units go to the same warps, and sums are added in the same order, however many blocks there are.

Sums meet as the fragments that the lanes hold, four F32 a lane for each row tile and 8 rows of x. Each is added in one
block, by one warp. What its own warps have of it lies where their rings were; what others have comes into a mailbox by
asynchronous stores, which an mbarrier counts. So no block waits for another to read, and the cluster's barrier is met
only when a block begins, where it costs neither a fence of the memory nor what L1 holds of x.
"""

import functools
from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import FRAGMENT, TILE, added, fragment_stored, part_of
from atlas_lab.kernels.lang import cuda

CLUSTERS = (1, 2, 4, 8)  # blocks


class Team(NamedTuple):
    """Device functions. `tile()` is the number of the block's tile group, `warp()` that of the warp among all that
    share it. `begin()` is called by every thread before it does anything else, `meet()` before it waits for anything
    that takes time; `store` ends the kernel, with the arguments of what `columns.finish` returns."""

    tile: Any
    warp: Any
    begin: Any
    meet: Any
    store: Any


@L.device
def _block():
    return L.i32(cuda.blockIdx.x)


@L.device
def _nothing():
    return None


def block(store: Any) -> Team:
    """That of warps which are all in one block."""
    return Team(_block, L.warp_id, _nothing, _nothing, store)


@functools.cache
def cluster_of(
    blocks: int, warps: int, columns: int, tiles: int, ring: int, pair: bool, alpha: Any, lift: float = 1.0
) -> Team:
    """That of `warps` warps, whose rings have `ring` bytes each, over the `blocks` of a cluster; raises ValueError
    where they cannot be shared out, and for a pair, whose two tiles would have to meet."""
    if blocks not in CLUSTERS[1:] or warps % blocks:
        raise ValueError(f"cluster: found {warps} warps over {blocks} blocks, expected 2, 4 or 8 that divide them")
    if pair:
        raise ValueError(f"cluster: found a pair over {blocks} blocks, expected one block")
    own, fragments, four_of = warps // blocks, tiles * columns, part_of(4)
    mail, letters = own * ring, _letters(blocks, columns, tiles)
    bar, out = mail + own * (blocks - 1) * letters * FRAGMENT, fragment_stored(alpha, lift)

    @L.device
    def tile():
        return L.i32(cuda.blockIdx.x // blocks)

    @L.device
    def rank_of():
        # not L.cluster_rank(), which the compiler would keep in a register while units are multiplied
        return L.i32(L.i32(cuda.blockIdx.x) & (blocks - 1))

    @L.device
    def warp():
        return L.i32(rank_of() * own + L.warp_id())

    @L.device
    def begin():
        if cuda.threadIdx.x == 0:
            L.mbarrier_init(L.dynamic_shared(L.u64, bar), 0, own)
            L.fence_mbarrier_init()
        L.cluster_arrive_relaxed()

    @L.device
    def meet():
        L.cluster_wait()

    @L.device
    def box(reader, sender):
        """Where the mail of one block to another begins there, or, past all of them, from a block to itself."""
        return L.i32((reader - sender - 1) & (blocks - 1)) * (own * letters * FRAGMENT)

    @L.device
    def send(sums, rank):
        """Each fragment to the block that adds it."""
        shared, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bar)
        warp, lane = L.warp_id(), L.lane_id()
        for f in L.unroll(fragments):
            reader, letter = f % blocks, f // blocks
            mine = four_of(sums, f)
            if rank == reader:
                L.sts_v4_f32(shared, warp * ring + FRAGMENT * letter + 16 * lane, mine)
            else:
                at = mail + box(reader, rank) + (warp * letters + letter) * FRAGMENT + 16 * lane
                L.st_async_v4_f32(L.mapa(shared, reader), at, mine, L.mapa(bars, reader), 0)

    @L.device
    def total(letter, rank):
        """The sum of a fragment over all warps, in their order."""
        shared, lane = L.dynamic_shared(L.u8, 0), L.lane_id()
        out = (L.f32(0), L.f32(0), L.f32(0), L.f32(0))
        for sender in L.unroll(blocks):
            here, step = mail + box(rank, sender) + letter * FRAGMENT, letters * FRAGMENT
            if rank == sender:
                here, step = letter * FRAGMENT, ring
            for w in L.unroll(own):
                v = L.lds_v4_f32(shared, here + w * step + 16 * lane)
                if sender == 0 and w == 0:
                    out = v
                else:
                    out = added(out, v)
        return out

    @L.device
    def store(y, sums, args, which, row, rows, m, n, kind):
        rank, lane = rank_of(), L.lane_id()
        cuda.syncwarp()  # every lane has read the ring, which lay here
        send(sums, rank)
        cuda.syncwarp()
        bars = L.dynamic_shared(L.u64, bar)
        here = L.i32((fragments + blocks - 1 - rank) // blocks)  # fragments of this block
        if lane == 0:
            if L.warp_id() == 0:
                L.mbarrier_arrive_expect_tx(bars, 0, L.u32(here * ((warps - own) * FRAGMENT)))
            else:
                L.mbarrier_arrive(bars, 0)
        letter = L.i32(L.warp_id())
        if letter < here:
            L.mbarrier_wait(bars, 0, 0)
        while letter < here:
            f = L.i32(letter * blocks + rank)
            t = L.i32(f // columns)
            line, inside = L.i32(8 * (f - t * columns)), L.i32(TILE * t)
            out(y, total(letter, rank), args, which, line, row + inside, rows - inside, m, n)
            letter = L.i32(letter + own)

    return Team(tile, warp, begin, meet, store)


def _letters(blocks: int, columns: int, tiles: int) -> int:
    """Fragments that a block adds at most."""
    return -(-tiles * columns // blocks)


def cluster_bytes(blocks: int, warps: int, columns: int, tiles: int, ring: int) -> int:
    """Dynamic shared memory of each block, bytes: the rings of its warps, its mail and an mbarrier."""
    own = warps // blocks
    return own * (ring + (blocks - 1) * _letters(blocks, columns, tiles) * FRAGMENT) + 8
