"""How a block streams a weight for a few rows of x: tiles of 16 rows of weights, units of K copied ahead of their use.

The warps of a block, or of a cluster of blocks, take the units of its tiles in turn. Each warp has a ring of `depth`
units in shared memory, which cp.async fills: a lane reads what it copied itself, so that waiting for its own copies is
all the synchronisation there is until the warps' sums meet.
"""

from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.cluster import CLUSTERS, block, cluster_of
from atlas_lab.kernels.gemv.columns import TILE, finish
from atlas_lab.kernels.gemv.kept import keeping
from atlas_lab.kernels.lang import cuda


class Reader(NamedTuple):
    """How a format's weights are read; `args` are the kernel's own arguments, in a tuple.

    A unit is 16 rows by `span` K, `size` bytes of a warp's ring. `locate(args, which, row, count, k)` returns the
    pointers of the tile of projection `which` that begins at its row `row` of `count`;
    `copy(ring, at, source, unit, k)` starts the copies of a unit to byte `at`;
    `use(sums, ring, at, source, args, x, rows, k, unit, kind, live, ready)` adds the units of the first `live` tiles,
    whose sources follow each other;
    `place(m, k)` is where the lane's `rows` of x begin, as in `columns.activations`;
    `early(x, rows, k, unit, kind)`, if any, is what `ready` is: of x, loaded before the warp waits for its weights;
    `lift`, then `alpha(args, which)`, are what the sums are multiplied by. `crosses` says that lanes read what others
    copied, `ragged` that `use` heeds `live`; where it does not, all tiles are.

    `ordered`: x is read by loads that keep their order, and its pointer stays a parameter, which takes no registers.

    Where warps keep x in registers, `take(x, rows, k, unit, kind)` is what of it a unit multiplies, `registers` for
    each 8 rows of x: `use` is handed that as its x, and nothing as `source` and `ready`.
    """

    span: int
    size: int
    pointers: int
    locate: Any
    copy: Any
    use: Any
    alpha: Any
    crosses: bool = False
    ragged: bool = False
    lift: float = 1.0
    early: Any = None
    place: Any = None
    take: Any = None
    registers: int = 0
    ordered: bool = False


@L.device
def segment(row, n, first, second):
    """Which projection column `row` of y belongs to, the row of that projection's weight, and how many it has."""
    which, begin, end = 0, 0, first
    if row >= second:
        which, begin, end = 2, second, n
    elif row >= first:
        which, begin, end = 1, first, second
    return which, L.i32(row - begin), L.i32(end - begin)


@L.device
def one_of(which, a, b, c):
    """a, b or c."""
    if which == 1:
        a = b
    if which == 2:
        a = c
    return a


@L.device
def no_alpha(args, which):
    return L.f32(1)


@L.device
def wait_in_order(x):
    """Wait for the launches before this one; x for loads that keep their order."""
    L.grid_wait()
    return x


@L.device
def existing(unit, units):
    """The unit, or the first where there is none such."""
    return unit if unit < units else L.i32(0)


@L.device
def not_early(x, rows, k, unit, kind):
    return ()


def stream(
    reader: Reader,
    warps: int,
    depth: int,
    tiles: int,
    columns: int,
    joined: bool = False,
    pair: bool = False,
    clamp: bool = False,
    cluster: int = 1,
    kept: int = 0,
):
    """A device function `(args, x, y, m, n, k, first, second, kind, full)`: all that the kernel does. `warps` are
    those of all blocks of a cluster; if `kept` is not 0, each keeps x of so many units in registers. Raises ValueError
    where that is asked of anything but a plain product of one tile, or of fewer warps a block than `columns`."""
    if kept:
        asked = {"joined": joined, "pair": pair, "clamp": clamp}
        shared = cluster in CLUSTERS and warps % cluster == 0 and warps >= columns * cluster
        if any(asked.values()) or tiles > 1 or not shared:
            more = " ".join(name for name, value in asked.items() if value) or "plain"
            found = f"a {more} product, {tiles} tiles, {warps} warps over {cluster} blocks"
            raise ValueError(f"kept: found {found}, expected a plain one, 1 tile, {columns} or more warps a block")
        return keeping(reader, warps, depth, columns, kept, cluster)
    span, size = reader.span, reader.size * tiles
    locate, copy, use, place = reader.locate, reader.copy, reader.use, reader.place
    alpha, lift = reader.alpha, reader.lift
    if cluster == 1:
        team = block(finish(warps, columns, tiles, pair, alpha, lift, clamp))
    else:
        team = cluster_of(cluster, warps, columns, tiles, depth * size, pair, alpha, lift)
    number, warp, begin, meet, store = team
    each, crosses, ragged = reader.pointers, reader.crosses, reader.ragged
    early = reader.early or not_early
    waited = wait_in_order if reader.ordered else L.grid_wait_for

    @L.device
    def start(ring, slot, source, unit, units, k, live):
        if unit < units:
            for t in L.unroll(tiles):
                mine = ()
                for p in L.unroll(each):
                    mine = mine + (source[each * t + p],)
                if not ragged or t < live:
                    copy(ring, L.i32(slot + reader.size * t), mine, unit, k)
        L.cp_async_commit()

    @L.device
    def run(args, x, y, m, n, k, first, second, kind, full):
        L.grid_launch_dependents()  # the next launch may fetch its first weights as soon as it finds room
        begin()
        block = number()
        row, live = L.i32(block * (TILE if pair else TILE * tiles)), L.i32(tiles)
        if ragged and tiles > 1 and not pair and block >= full:
            row, live = L.i32(full * (TILE * tiles) + (block - full) * TILE), L.i32(1)
        which, inside, count = 0, row, n
        if joined:
            which, inside, count = segment(row, n, first, second)
        source = ()
        for t in L.unroll(tiles):
            source = source + locate(args, t if pair else which, inside + (0 if pair else TILE * t), count, k)
        units = L.i32((k + span - 1) // span)
        ring = L.offset(L.dynamic_shared(L.u8, 0), L.warp_id() * depth * size)
        for u in L.unroll(depth):
            start(ring, u * size, source, L.i32(warp() + u * warps), units, k, live)
        meet()
        x = waited(x)
        rows = place(m, k)
        sums = L.zeros(4 * columns * tiles)
        unit, slot = L.i32(warp()), L.i32(0)
        ready = early(x, rows, k, existing(unit, units), kind)
        while unit < units:
            L.cp_async_wait(depth - 1)
            if crosses:
                cuda.syncwarp()
            sums = use(sums, ring, slot, source, args, x, rows, k, unit, kind, live, ready)
            if crosses:
                cuda.syncwarp()
            start(ring, slot, source, L.i32(unit + depth * warps), units, k, live)
            slot = L.i32(slot + size)
            if slot == depth * size:
                slot = L.i32(0)
            unit = L.i32(unit + warps)
            ready = early(x, rows, k, existing(unit, units), kind)
        store(y, sums, args, which, row, min(count - inside, TILE * live), m, n, kind)

    return run
