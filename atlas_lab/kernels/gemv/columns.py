"""What the kernels for up to 16 rows of x share: one warp multiplies tiles of 16 rows of weights by columns of x.

Weights are operand A of m16n8k16 and rows of x are its columns. Lane l = 4·g + t holds rows g and g + 8 of the weights,
row g of each 8 rows of x, and the t-th run of K of a span. K is permuted: a product takes 4 consecutive K of a lane's
run, and both operands agree on which. Sums are 4 registers for each 8 rows of x, tile after tile.
"""

import functools
from typing import Any, NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.activation.gated import gated_of
from atlas_lab.kernels.lang import cuda

TILE = 16  # rows of weights
PADDED = TILE + 4  # a row of x's sums in shared memory, so that the lanes of a warp write to 32 banks


@functools.cache
def activations(
    columns: int,
    run: int,
    *,
    whole: bool = True,
    crossed: bool = False,
    gate: bool = False,
    ordered: bool = False,
    clamp: bool = False,
):
    """Two device functions over x BF16 `[m, k]`, of which launches before are over (`grid_wait_for`).

    `place(m, k)`: where the lane's row of each 8 begins; rows past m repeat the last: their sums are not stored.
    `fetch(x, rows, k, at, kind)`: `run` K of each from `at` on, `columns` times run/2 registers of two BF16: pairs in
    order, or, `crossed`, of each 4 the first and third, then the second and fourth. Unless x is `whole`, `at` may be
    past k: zeros. With `gate` x is `[m, 2k]`, and what is fetched the gated product of its halves, of activation
    `kind` (`gated.kind_of`, with a limit for `clamp`). `ordered` keeps the loads where they are written: fewer
    registers.
    """
    loads = run // 8
    load = L.ld_in_v4_b32 if ordered else L.ld_waited_v4_b32
    width, gated = 2 if gate else 1, gated_of(clamp)

    @L.device
    def place(m, k):
        rows = ()
        for c in L.unroll(columns):
            rows = rows + (L.i32(min((L.lane_id() >> 2) + 8 * c, m - 1) * width * k),)
        return rows

    @L.device
    def one(x, index, k, kind):
        v = load(x, index)
        if gate:
            u = load(x, index + k)
            w = ()
            for j in L.unroll(4):
                low = gated(L.bf16_lo(v[j]), L.bf16_lo(u[j]), kind)
                w = w + (L.bf16x2(low, gated(L.bf16_hi(v[j]), L.bf16_hi(u[j]), kind)),)
            v = w
        if crossed:
            v = (
                L.prmt(v[0], v[1], 0x5410),
                L.prmt(v[0], v[1], 0x7632),
                L.prmt(v[2], v[3], 0x5410),
                L.prmt(v[2], v[3], 0x7632),
            )
        return v

    @L.device
    def fetch(x, rows, k, at, kind):
        found = ()
        for c in L.unroll(columns):
            for i in L.unroll(loads):
                if whole:
                    found = found + one(x, L.i32(rows[c] + at + 8 * i), k, kind)
                else:
                    v = (L.u32(0), L.u32(0), L.u32(0), L.u32(0))
                    if at < k:
                        v = one(x, L.i32(rows[c] + at + 8 * i), k, kind)
                    found = found + v
        return found

    return place, fetch


@functools.cache
def part_of(count: int, begin: int = 0):
    """A device function `(sums, i)`: the i-th `count` of them, from `begin` on."""

    @L.device
    def part(sums, i):
        out = ()
        for s in L.unroll(count):
            out = out + (sums[begin + count * i + s],)
        return out

    return part


class OfUnit(NamedTuple):
    """What a unit multiplies of x. `place(m, k)` as in `activations`; `part(x, rows, k, unit, kind, i)`: the i-th of
    its parts, `registers` registers for each 8 rows of x in all parts together; `take(x, rows, k, unit, kind)`: all
    parts, which `part` is handed as its x where warps keep them."""

    place: Any
    part: Any
    take: Any
    registers: int


@functools.cache
def of_unit(columns: int, run: int, span: int, *, kept: bool = False, **how: bool) -> OfUnit:
    """Of units of `span` K in which a lane has `run` K of each part; `how` as in `activations`."""
    place, fetch = activations(columns, run, ordered=how.pop("ordered", False) or kept, **how)
    parts, mine = span // (4 * run), part_of(columns * run // 2)

    @L.device
    def load(x, rows, k, unit, kind, i):
        return fetch(x, rows, k, L.i32(unit * span + 4 * run * i + run * (L.lane_id() & 3)), kind)

    @L.device
    def held(x, rows, k, unit, kind, i):
        return mine(x, i)

    @L.device
    def take(x, rows, k, unit, kind):
        found = ()
        for i in L.unroll(parts):
            found = found + load(x, rows, k, unit, kind, i)
        return found

    return OfUnit(place, held if kept else load, take, parts * run // 2)


@L.device
def rows_of_tile(row, count):
    """The lane's two rows of the tile that begins at `row` of `count`: rows past the last repeat it, unstored."""
    upper = L.i32(row + (L.lane_id() >> 2))
    return min(upper, count - 1), min(upper + 8, count - 1)


@L.device
def rows_at(array, upper, lower, stride):
    """Where those two rows, `stride` elements apart from row to row, begin."""
    return L.offset(array, L.i64(upper) * stride), L.offset(array, L.i64(lower) * stride)


@L.device
def tile_of(row, count):
    """The number of the tile that holds `row` of `count`: one past the last repeats it, unstored."""
    return min(L.i32(row >> 4), L.i32((count - 1) >> 4))


@L.device
def opaque(mask, k):
    """A U32 that is no constant to the compiler, which would otherwise move it into a register each time; k < 2^30."""
    return L.u32(mask + (k >> 30))


@functools.cache
def product(columns: int, tiles: int, run: int):
    """A device function `(sums, tile, a, v, j)`: sums plus 16 rows of weights of that tile (four registers of A) times
    the j-th 4 K of the activations `v` that `fetch` found."""
    registers = run // 2
    multiply = L.mma_m16n8k16_bf16

    @L.device
    def add(sums, tile, a, v, j):
        out = ()
        for i in L.unroll(tiles):
            for c in L.unroll(columns):
                s = 4 * (i * columns + c)
                one = (sums[s], sums[s + 1], sums[s + 2], sums[s + 3])
                if i == tile:
                    one = multiply(one, a, (v[registers * c + 2 * j], v[registers * c + 2 * j + 1]))
                out = out + one
        return out

    return add


@functools.cache
def first_product(columns: int, run: int):
    """A device function `(a, v, j)`: the first product of a tile's sums, as `product` adds the next ones."""
    registers = run // 2
    multiply = L.mma_m16n8k16_bf16_first

    @L.device
    def begin(a, v, j):
        out = ()
        for c in L.unroll(columns):
            out = out + multiply(a, (v[registers * c + 2 * j], v[registers * c + 2 * j + 1]))
        return out

    return begin


@functools.cache
def ones(columns: int, run: int):
    """A device function `(v)`: the sums of `run` K of each row of x, laid out as the sums of a tile of ones."""
    begin, add = first_product(columns, run), product(columns, 1, run)
    one = 0x3F803F80

    @L.device
    def total(v):
        out = begin((one, one, one, one), v, 0)
        for j in L.unroll(1, run // 4):
            out = add(out, 0, (one, one, one, one), v, j)
        return out

    return total


@functools.cache
def scaled_rows(columns: int):
    """A device function `(total, part, upper, lower)`: total plus part times the scale of the lane's upper or lower
    row."""

    @L.device
    def add(total, part, upper, lower):
        out = ()
        for i in L.unroll(4 * columns):
            out = out + (L.fma_rn(part[i], upper if i % 4 < 2 else lower, total[i]),)
        return out

    return add


FRAGMENT = 512  # bytes of a warp's sums of 16 rows of weights and 8 of x: four F32 a lane


@functools.cache
def fragment_stored(alpha: Any, lift: float = 1.0):
    """A device function `(y, found, args, which, line, row, rows, m, n)`: stores what exists of a fragment of sums that
    the warp's lanes hold, times `lift`, times `alpha(args, which)`: lines `line` and on, columns `row` and on of y BF16
    `[m, n]`, of which `rows` are left."""

    @L.device
    def store(y, found, args, which, line, row, rows, m, n):
        lane = L.lane_id()
        scale = alpha(args, which)
        for i in L.unroll(4):
            value = found[i]
            if lift != 1:
                value = L.mul_rn(value, L.f32(lift))
            value = L.mul_rn(value, scale)
            here = L.i32(line + 2 * (lane & 3) + (i & 1))
            column = L.i32((lane >> 2) + 8 * (i >> 1))
            if here < m and column < rows:
                L.stg_bf16(y, L.i64(here) * n + row + column, value)

    return store


@L.device
def added(a, b):
    """The sums of two fragments."""
    return L.add_rn(a[0], b[0]), L.add_rn(a[1], b[1]), L.add_rn(a[2], b[2]), L.add_rn(a[3], b[3])


@functools.cache
def finish(warps: int, columns: int, tiles: int, pair: bool, alpha: Any, lift: float = 1.0, clamp: bool = False):
    """A device function `(y, sums, args, which, row, rows, m, n, kind)`: adds the warps' sums in their order, times
    `lift`, times `alpha(args, which)`, and stores what exists of this block's columns of y BF16 `[m, n]`: column `row`
    and on, of which `rows` are left. With `pair` the two tiles are of projections 0 and 1, gate and up: both are
    rounded to BF16, and y is their gated product, of activation `kind` (with a limit for `clamp`). It takes
    `finish_bytes` of the launch's dynamic shared memory, from its start."""
    line, size = PADDED * tiles, _floats(columns, tiles)
    width, gated = TILE if pair else TILE * tiles, gated_of(clamp)

    @L.device
    def total(shared, at):
        value = L.lds_f32(shared, at)
        for w in L.unroll(1, warps):
            value = L.add_rn(value, L.lds_f32(shared, at + w * size))
        if lift != 1:
            value = L.mul_rn(value, L.f32(lift))
        return value

    @L.device
    def store(y, sums, args, which, row, rows, m, n, kind):
        cuda.syncthreads()  # every warp has read its ring, which lay here
        shared = L.dynamic_shared(L.f32, 0)
        lane = L.lane_id()
        first = L.warp_id() * size + (lane >> 2) + 2 * (lane & 3) * line
        for t in L.unroll(tiles):
            for c in L.unroll(columns):
                for i in L.unroll(4):
                    at = first + (8 * c + (i & 1)) * line + PADDED * t + 8 * (i >> 1)
                    L.sts_f32(shared, at, sums[4 * (t * columns + c) + i])
        cuda.syncthreads()
        i = L.i32(cuda.threadIdx.x)
        while i < m * width:
            line_of = L.i32(i // width)
            column = L.i32(i - line_of * width)
            at = L.i32(line_of * line + (column >> 4) * PADDED + (column & 15))
            if pair:
                g = L.mul_rn(total(shared, at), alpha(args, 0))
                u = L.mul_rn(total(shared, at + PADDED), alpha(args, 1))
                value = gated(L.bf16_lo(L.bf16x2(g, g)), L.bf16_lo(L.bf16x2(u, u)), kind)
            else:
                value = L.mul_rn(total(shared, at), alpha(args, which))
            if column < rows:
                L.stg_bf16(y, L.i64(line_of) * n + row + column, value)
            i = L.i32(i + 32 * warps)

    return store


def _floats(columns: int, tiles: int) -> int:
    """The sums of a warp."""
    return 8 * columns * PADDED * tiles


def finish_bytes(warps: int, columns: int, tiles: int) -> int:
    """Shared memory that `finish` takes."""
    return 4 * warps * _floats(columns, tiles)
