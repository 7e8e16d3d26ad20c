"""How a block streams a weight while its warps keep x in registers: row tiles follow each other, x is read once.

An SM has one block. A warp keeps what its units of K multiply of x, the same for all row tiles, so that the loop reads
nothing but weights: no x through L1, and all of shared memory for their rings. Units go to the warps as in `stream`,
and the warps' sums of a row tile are added in their order: the same bits.

No warp waits for another: sums are put down in one of TURNS places and added, by one warp a fragment and another one
each time, LATER row tiles after. Mbarriers say that a place is full, and that it is empty again.

Blocks of a cluster cut K, so that each reads and keeps a part of x. One hands its sums of a row tile to the next by
asynchronous stores, which adds its own to them; the last one stores.
"""

from typing import Any

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import FRAGMENT, TILE, added, fragment_stored, part_of
from atlas_lab.kernels.lang import cuda

TURNS, LATER = 4, 2  # the former a power of two


def keeping(reader: Any, warps: int, depth: int, columns: int, kept: int, blocks: int):
    """A device function as `stream` returns, of one projection, for K of exactly `warps` times `kept` units; `warps`
    are those of all `blocks` of a cluster. Blocks or clusters take row tiles in turn; `depth` units of a warp are in
    flight."""
    size, own = reader.size, warps // blocks
    locate, copy, use, take, rows_of = reader.locate, reader.copy, reader.use, reader.take, reader.place
    crosses, x_of, four_of = reader.crosses, part_of(reader.registers * columns), part_of(4)
    store = fragment_stored(reader.alpha, reader.lift)
    mail = own * columns * FRAGMENT  # of a place: what comes from the block before
    room = _room(own, columns, blocks)
    bar = own * depth * size + TURNS * room
    empty, free = TURNS, 2 * TURNS  # where those mbarriers begin; `free`: the place for mail in the next block is

    @L.device
    def rank_of():
        return L.i32(cuda.blockIdx.x & blocks - 1)

    @L.device
    def unit_of(u):
        """The warp's u-th unit."""
        if blocks == 1:
            return L.i32(L.warp_id() + u * warps)
        return L.i32(rank_of() * own + L.warp_id() + u * warps)

    @L.device
    def start(ring, slot, u, args, row, n, k):
        if row < n:
            copy(ring, slot, locate(args, 0, row, n, k), unit_of(u), k)
        L.cp_async_commit()

    @L.device
    def begin():
        """Mbarriers; those of a cluster are there before another block uses them."""
        bars = L.dynamic_shared(L.u64, bar)
        if cuda.threadIdx.x == 0:
            for i in L.unroll(TURNS):
                L.mbarrier_init(bars, i, own)
                L.mbarrier_init(bars, empty + i, columns)
                if blocks > 1:
                    L.mbarrier_init(bars, free + i, columns)
            if blocks > 1:
                L.fence_mbarrier_init()
        if blocks > 1:
            L.cluster_arrive()

    @L.device
    def total(at):
        """A fragment's sums over all warps so far, in their order; the first begins at byte `at`."""
        shared, lane = L.dynamic_shared(L.u8, 0), L.lane_id()
        out = L.lds_v4_f32(shared, at + 16 * lane)
        if blocks > 1 and rank_of() > 0:
            out = added(L.lds_v4_f32(shared, at + mail + 16 * lane), out)
        for w in L.unroll(1, own):
            out = added(out, L.lds_v4_f32(shared, at + w * columns * FRAGMENT + 16 * lane))
        return out

    @L.device
    def hand_on(found, place, c, number):
        """A fragment's sums to the next block."""
        shared, bars, to = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bar), L.i32(rank_of() + 1)
        L.mbarrier_wait_cluster(bars, free + place, L.u32(number // TURNS & 1 ^ 1))
        at = L.i32(place * room + mail + c * FRAGMENT + 16 * L.lane_id())
        L.st_async_v4_f32(L.mapa(shared, to), at, found, L.mapa(bars, to), place)

    @L.device
    def add(number, turn, args, y, row, m, n):
        """The sums of the row tile of that number, by the warps from `turn` on."""
        c = L.i32(L.warp_id() - turn)
        c = c if c >= 0 else L.i32(c + own)
        if c < columns:
            place, bars = L.i32(number & TURNS - 1), L.dynamic_shared(L.u64, bar)
            L.mbarrier_wait(bars, place, L.u32(number // TURNS & 1))
            found = total(L.i32(place * room + c * FRAGMENT))
            if blocks > 1 and rank_of() < blocks - 1:
                hand_on(found, place, c, number)
            else:
                store(y, found, args, 0, L.i32(8 * c), row, n - row, m, n)
            cuda.syncwarp()
            if L.lane_id() == 0:
                L.mbarrier_arrive(bars, empty + place)
                if blocks > 1 and rank_of() > 0:
                    L.mbarrier_arrive_remote(L.mapa(bars, L.i32(rank_of() - 1)), free + place)

    @L.device
    def put(number, sums):
        """A warp's sums of a row tile, where others can add them."""
        place = L.i32(number & TURNS - 1)
        shared, bars = L.dynamic_shared(L.u8, 0), L.dynamic_shared(L.u64, bar)
        L.mbarrier_wait(bars, empty + place, L.u32(number // TURNS & 1 ^ 1))
        at = L.i32(place * room + L.warp_id() * columns * FRAGMENT + 16 * L.lane_id())
        for c in L.unroll(columns):
            L.sts_v4_f32(shared, at + c * FRAGMENT, four_of(sums, c))
        cuda.syncwarp()
        if L.lane_id() == 0:
            if blocks > 1 and cuda.threadIdx.x == 0 and rank_of() > 0:  # it is full once mail has come, too
                L.mbarrier_arrive_expect_tx(bars, place, L.u32(columns * FRAGMENT))
            else:
                L.mbarrier_arrive(bars, place)

    @L.device
    def run(args, x, y, m, n, k, first, second, kind, full):
        row = L.i32(cuda.blockIdx.x // blocks * TILE)
        step = L.i32(cuda.gridDim.x // blocks * TILE)
        ring = L.offset(L.dynamic_shared(L.u8, 0), TURNS * room + L.warp_id() * depth * size)
        rows, mine = rows_of(m, k), ()
        L.grid_launch_dependents()
        for d in L.unroll(depth):
            start(ring, d * size, d % kept, args, L.i32(row + d // kept * step), n, k)
        L.grid_wait()
        for d in L.unroll(kept):
            mine = mine + take(x, rows, k, unit_of(d), kind)
        begin()
        cuda.syncthreads()
        if blocks > 1:
            L.cluster_wait()
        slot, number, turn = L.i32(0), L.i32(-LATER), L.i32(0)
        end = L.i32(n + LATER * step)
        while row < end:
            if row < n:
                sums = L.zeros(4 * columns)
                for u in L.unroll(kept):
                    L.cp_async_wait(depth - 1)
                    if crosses:
                        cuda.syncwarp()
                    sums = use(sums, ring, slot, (), args, x_of(mine, u), rows, k, unit_of(u), kind, 1, ())
                    if crosses:
                        cuda.syncwarp()
                    later = L.i32(row + (u + depth) // kept * step)
                    start(ring, slot, (u + depth) % kept, args, later, n, k)
                    slot = L.i32(slot + size)
                    if (depth % kept > 0 or u == kept - 1) and slot == depth * size:
                        slot = L.i32(0)
                put(L.i32(number + LATER), sums)
            if number >= 0:
                add(number, turn, args, y, L.i32(row - LATER * step), m, n)
                turn = L.i32(turn + columns)
                turn = turn if turn < own else L.i32(turn - own)
            row, number = L.i32(row + step), L.i32(number + 1)
        if blocks > 1:  # what others say to a block finds it there
            L.cluster_arrive()
            L.cluster_wait()

    return run


def _room(own: int, columns: int, blocks: int) -> int:
    """Bytes of a place for the sums of a block's warps, and for those that come from another block."""
    return (own + (blocks > 1)) * columns * FRAGMENT


def kept_bytes(warps: int, depth: int, columns: int, unit: int, blocks: int) -> int:
    """Dynamic shared memory of each of a cluster's `blocks`, bytes."""
    own = warps // blocks
    return own * depth * unit + TURNS * (_room(own, columns, blocks) + 8 * (3 if blocks > 1 else 2))
