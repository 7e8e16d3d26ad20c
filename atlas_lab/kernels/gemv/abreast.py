"""How a block streams several row tiles abreast: weights go straight into registers, x lies in shared memory.

An SM has one block, whose warps have all row tiles of the SM at once where the card is filled once: `warps` of them a
tile, which take its units of K in turn as in `stream` and whose sums are added in their order: the same bits. A warp
has one unit on its way, and asks for the next as soon as the codes of the last are in other registers; before the block
waits for x, L2 is asked for AHEAD more, since nothing else would be until x is there. The copy engine brings the rows
of x while the first weights are on their way, CHUNK of K after CHUNK, and a warp waits only for the chunk that its unit
is of. Where no row tiles follow in turn, sums meet where x was: what is left of an SM's memory is L1, through which the
weights come, and at K = 5120 of 16 rows 160 KB leave 92 KB of it, 164 KB only 60.

x lies in shared memory as the copy engine swizzles it: BLOCK of K of all rows, then the next, the 16-byte chunk c of
row r where c ^ (r % 8) would be. Eight lanes that load at once, of two rows, meet each bank once. Rows past m are zero.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.columns import FRAGMENT, TILE, added, fragment_stored, part_of
from atlas_lab.kernels.lang import cuda

CHUNK, CHUNKS = 512, 16  # K that arrives together, a multiple of every span; as many at most
ROW = 128  # bytes of a row of x that lie together: BLOCK of K, swizzled
BLOCK = ROW // 2
AHEAD = 3  # units of a warp that L2 fetches beyond the first
RUN = 16  # K of a lane in a BLOCK
BARRIERS = 15  # named ones of a block: as many row tiles at most
WARPS = 32  # of a block


class Straight(NamedTuple):
    """How a format's weights are read into registers and multiplied; `args` are the kernel's own arguments, in a tuple.

    A unit is 16 rows by `span` K, a multiple of BLOCK, of which a lane has RUN of each BLOCK. `locate(args, which, row,
    count, k)`: what is found once of the tile of projection `which` that begins at its row `row` of `count`;
    `load(source, unit, k)`: the lane's `words` of a unit, `first` likewise, by loads that stay before the wait for x;
    `spread(words)`: their codes in other registers;
    `use(sums, codes, source, args, of_x, unit)` adds the unit, with `of_x(unit, i)`: the lane's i-th run of each 8 rows
    of x, as `columns.activations` lays them out; `alpha(args, which)` is what the sums are multiplied by;
    `fetch(source, unit, k)` has L2 fetch the lines of a unit.
    """

    span: int
    words: int
    locate: Any
    first: Any
    load: Any
    spread: Any
    use: Any
    alpha: Any
    fetch: Any


def abreast_of(reader: Straight, warps: int, abreast: int, columns: int, turns: bool):
    """A device function as `stream.stream` returns, of one projection and K a multiple of `span`, at most
    `CHUNK·CHUNKS`; its x is a map of boxes of CHUNK of K of 8·columns rows, BLOCK after BLOCK. `abreast` row tiles of
    `warps` warps, and with `turns` more that follow. Raises ValueError where a block has no barrier for each, or not so
    many warps."""
    if not 1 <= abreast <= BARRIERS:
        raise ValueError(f"abreast: found {abreast} row tiles a block, expected 1 to {BARRIERS}")
    if not 1 <= warps * abreast <= WARPS:
        raise ValueError(f"abreast: found {warps * abreast} warps a block, expected 1 to {WARPS}")
    locate, load, spread, use, four_of = reader.locate, reader.load, reader.spread, reader.use, part_of(4)
    first, fetch = reader.first, reader.fetch
    store = fragment_stored(reader.alpha)
    span, count = reader.span, reader.words
    mine = warps * columns * FRAGMENT  # bytes of a tile's sums
    bar, block = abreast * mine if turns else 0, 8 * columns * ROW  # block: bytes of BLOCK of K of x
    x_at = _x_at(bar)
    sums_at = 0 if turns else x_at

    @L.device
    def bring(x, k):
        """One thread starts the copies of x."""
        bars, shared, chunk = L.dynamic_shared(L.u64, bar), L.dynamic_shared(L.u8, x_at), L.i32(0)
        while chunk * CHUNK < k:
            L.mbarrier_arrive_expect_tx(bars, chunk, CHUNK // BLOCK * block)
            L.tma_load_3d(shared, chunk * (CHUNK // BLOCK * block), x, (chunk * (CHUNK // BLOCK), 0, 0), bars, chunk)
            chunk = L.i32(chunk + 1)

    @L.device
    def of_x(unit, i):
        shared, lane, found = L.dynamic_shared(L.u8, x_at), L.lane_id(), ()
        row, swizzle = L.i32((lane >> 2) * ROW), L.i32((lane >> 2 & 7) << 4)
        at = L.i32(unit * (span // BLOCK) * block + row)
        for c in L.unroll(columns):
            for j in L.unroll(RUN // 8):
                inside = L.i32((16 * j + 2 * RUN * (lane & 3)) ^ swizzle)
                found = found + L.lds_v4_b32(shared, L.i32(at + i * block + 8 * c * ROW + inside))
        return found

    @L.device
    def first_of(args, row, n, unit, k):
        """What is found of the tile, and the words of the warp's first unit; zeros where there is none such."""
        source, words = locate(args, 0, row, n, k), ()
        for _ in L.unroll(count):
            words = words + (L.u32(0),)
        if row < n and unit * span < k:
            words = first(source, unit, k)
        return source, words

    @L.device
    def tile(source, words, args, bars, warp, units, k):
        """The warp's sums of a row tile, of whose first unit it has the words."""
        sums, unit = L.zeros(4 * columns), warp
        while unit < units:
            codes = spread(words)
            later = L.i32(unit + warps)
            words = load(source, later if later < units else unit, k)  # whatever happens: no branch holds it up
            L.mbarrier_wait(bars, L.i32(unit * span // CHUNK), L.u32(0))
            sums = use(sums, codes, source, args, of_x, unit)
            unit = later
        return sums

    @L.device
    def place_of():
        """The row tile among those of the block, and the warp's number of those that have it."""
        slot = L.i32(L.warp_id() // warps)
        return slot, L.i32(L.warp_id() - slot * warps)

    @L.device
    def end(sums, args, y, row, m, n):
        """The tile's sums are added and stored."""
        shared, lane = L.dynamic_shared(L.u8, sums_at), L.lane_id()
        slot, warp = place_of()
        for c in L.unroll(columns):
            L.sts_v4_f32(shared, L.i32(slot * mine + (warp * columns + c) * FRAGMENT + 16 * lane), four_of(sums, c))
        L.barrier_sync(slot + 1, 32 * warps)
        L.grid_wait()  # it is over, since x was there; what is stored may have been stored before
        c = warp
        while c < columns:
            at = L.i32(slot * mine + c * FRAGMENT + 16 * lane)
            out = L.lds_v4_f32(shared, at)
            for w in L.unroll(1, warps):
                out = added(out, L.lds_v4_f32(shared, at + w * columns * FRAGMENT))
            store(y, out, args, 0, L.i32(8 * c), row, n - row, m, n)
            c = L.i32(c + warps)
        if turns:
            L.barrier_sync(slot + 1, 32 * warps)  # the next tile's sums lie in the same place

    @L.device
    def run(args, x, y, m, n, k, first, second, kind, full):
        L.grid_launch_dependents()
        slot, warp = place_of()
        row, step = L.i32((slot * cuda.gridDim.x + cuda.blockIdx.x) * TILE), L.i32(cuda.gridDim.x * abreast * TILE)
        source, words = first_of(args, row, n, warp, k)
        bars = L.dynamic_shared(L.u64, bar)
        if cuda.threadIdx.x == 0:
            L.tma_prefetch(x)
            for i in L.unroll(CHUNKS):
                L.mbarrier_init(bars, i, 1)
            L.fence_mbarrier_init()
        cuda.syncthreads()
        for u in L.unroll(1, 1 + AHEAD):
            later = L.i32(warp + u * warps)
            if row < n and later * span < k:
                fetch(source, later, k)
        if cuda.threadIdx.x == 0:
            L.grid_wait()
            bring(x, k)
        units = L.i32(k // span)
        if turns:
            while row < n:
                sums = tile(source, words, args, bars, warp, units, k)
                following = L.i32(row + step)
                source, words = first_of(args, following, n, warp, k)
                end(sums, args, y, row, m, n)
                row = following
        else:
            sums = tile(source, words, args, bars, warp, units if row < n else L.i32(0), k)
            cuda.syncthreads()  # nobody reads x any more
            if row < n:
                end(sums, args, y, row, m, n)

    return run


def refuse_all_but_plain(what: str, asked: Mapping[str, bool], tiles: int, cluster: int) -> None:
    """Raise ValueError unless nothing is asked for but one tile of one block: there is no such kernel for more."""
    found = [name for name, value in asked.items() if value]
    found += [f"{tiles} tiles"] * (tiles > 1) + [f"a cluster of {cluster}"] * (cluster > 1)
    if found:
        raise ValueError(f"{what}: found {', '.join(found)}, expected a plain product, 1 tile, 1 block")


def _x_at(bar: int) -> int:
    """Where x begins in shared memory, behind the mbarriers from byte `bar` on: at a whole repeat of its swizzle."""
    return -(-(bar + 8 * CHUNKS) // (8 * ROW)) * 8 * ROW


def abreast_bytes(warps: int, abreast: int, columns: int, k: int, turns: bool) -> int:
    """Dynamic shared memory of a block, bytes."""
    sums, x = abreast * warps * columns * FRAGMENT, -(-k // CHUNK) * CHUNK // BLOCK * 8 * columns * ROW
    return _x_at(sums) + x if turns else _x_at(0) + max(sums, x)
