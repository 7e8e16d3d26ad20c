"""How the accumulators of a transposed product (64 rows of W by bm rows of x) become rows of y."""

from __future__ import annotations

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_addends import eight
from atlas_lab.kernels.gemm.wgmma_ring import ROW, Ring
from atlas_lab.kernels.gemv.mma_lanes import LIFT

HALVES = 2  # tiles of x of a stage of 128 of K
SIDE = 16  # rows of x and columns of y that a warp turns at a time
TURN_BYTES = 2 * SIDE * SIDE  # of a warp
AHEAD = 4  # SIDE rows of addends that are on their way
NOTHING = 0x80008000  # two BF16 that change no number they are added to, not a zero's sign either


def turn_bytes(bn: int) -> int:
    """Bytes of shared memory that stores of bn rows of W go through."""
    return bn // SIDE * TURN_BYTES


@functools.cache
def bring_halves(ring: Ring, bm: int, stage: int):
    """A device function `(s, x, row0, step)` of the loading thread: 128 of K of bm rows of x, two tiles of a stage of
    `stage` bytes, from its start."""

    @L.device
    def run(s, x, row0, step):
        for half in L.unroll(HALVES):
            ring.rows(s * stage + half * (bm * ROW), x, row0, step * ROW + half * (ROW // 2), s)

    return run


@functools.cache
def transposed_storer(bm: int, out_at: int, lift: float = LIFT, by_row: bool = False, adds: bool = False):
    """A device function `(y, acc, warp, row, col, m, n, pitch, odd, alphas)`: y of n columns, its rows `pitch` elements
    apart; `warp` the number among those that consume, `row` and `col` the first of its bm x 16 outputs, which are the
    sums times `lift`, then the alpha of the lane's column of y, that of g or of g + 8; `by_row`: times `lift` and the
    scale of y's row, first, from F32 `[m]`, alphas[2], which a launch before may write. `odd` is a multiple of 8 where
    y's address, n and pitch are multiples of 8 elements. Its memory lies from byte `out_at`, TURN_BYTES a warp. Raises
    ValueError for a bm that is no multiple of 16 and memory not so aligned.

    With `adds` it takes `addends` too, last: `(before, last, both)`, BF16 `[m, n]`, of which `before`, where there are
    `both`, then `last` are added to what is stored.
    """
    if bm % SIDE:
        raise ValueError(f"transposed_storer: found {bm} rows of x, expected a multiple of {SIDE}")
    if out_at % SIDE:
        raise ValueError(f"transposed_storer: found memory from byte {out_at}, expected a multiple of {SIDE}")

    turns = bm // SIDE
    first_turns = min(AHEAD, turns)

    @L.device
    def of_rows(alphas, row, m):
        """What the sums of the lane's four rows of 16 from `row` are multiplied by first."""
        if not by_row:
            return ()
        first = row + 2 * (L.lane_id() & 3)
        out = ()
        for j in L.unroll(4):
            scale = L.ld_in_f32(alphas[2], min(L.i32(first + 8 * (j >> 1) + (j & 1)), L.i32(m - 1)))
            out = out + (L.mul_rn(scale, L.f32(lift)),)
        return out

    @L.device
    def scaled(value, alpha, factors, j):
        if by_row:
            value = L.mul_rn(value, factors[j])
        elif lift != 1:
            value = L.mul_rn(value, L.f32(lift))
        return L.mul_rn(value, alpha)

    @L.device
    def places(warp):
        """Where a lane gives a row of what its warp turns, and where it takes 8 columns of one."""
        lane = L.lane_id()
        # 32 bytes a row of x, the 16-byte halves exchanged in rows 4 to 7 of 8: no two of 8 rows share a bank
        r, h = (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1
        to = warp * TURN_BYTES + 32 * r + ((h ^ ((r >> 2) & 1)) << 4)
        mine, half = lane >> 1, lane & 1
        of = warp * TURN_BYTES + 32 * mine + ((half ^ ((mine >> 2) & 1)) << 4)
        return to, of, mine, half

    @L.device
    def store(y, words, to, of, c, row, mine, column, m, n, pitch, odd):
        """Stores the words of turn c; a lane has 8 columns of its row `mine`."""
        out = L.dynamic_shared(L.u8, out_at)
        L.stmatrix_x4_trans(out, to, words)
        L.cuda.syncwarp()
        v = L.lds_v4_b32(out, of)
        L.cuda.syncwarp()
        here = row + SIDE * c + mine
        if here < m and column < n:
            first = L.i64(here) * pitch + column
            if odd & 7 == 0:
                L.stg_v4_b32(y, first, v)
            else:
                for j in L.unroll(8):
                    if column + j < n:
                        L.stg_b16(y, first + j, L.u32(v[j // 2] >> (16 * (j % 2))) & 0xFFFF)

    @L.device
    def run(y, acc, warp, row, col, m, n, pitch, odd, alphas):
        to, of, mine, half = places(warp)
        column = col + 8 * half
        for c in L.unroll(turns):
            words = ()
            factors = of_rows(alphas, row + SIDE * c, m)
            for j in L.unroll(4):
                at, alpha = 8 * c + 2 * j, alphas[j & 1]
                first, second = 2 * (j >> 1), 2 * (j >> 1) + 1
                pair = L.bf16x2(scaled(acc[at], alpha, factors, first), scaled(acc[at + 1], alpha, factors, second))
                words = words + (pair,)
            store(y, words, to, of, c, row, mine, column, m, n, pitch, odd)

    @L.device
    def turned(chunk, to, of):
        """A lane's four pairs of what lanes loaded, for its sums of a turn."""
        out = L.dynamic_shared(L.u8, out_at)
        L.sts_v4_b32(out, of, chunk)
        L.cuda.syncwarp()
        pairs = L.ldmatrix_x4_trans(out, to)
        L.cuda.syncwarp()
        return pairs

    @L.device
    def added(first, second, pair):
        return L.add_rn(first, L.bf16_lo(pair)), L.add_rn(second, L.bf16_hi(pair))

    @L.device
    def run_adding(y, acc, warp, row, col, m, n, pitch, odd, alphas, addends):
        before, last, both = addends
        to, of, mine, half = places(warp)
        column, some, ahead = L.i32(col + 8 * half), m if both else L.i32(0), ()
        for c in L.unroll(first_turns):
            here = row + SIDE * c + mine
            ahead = ahead + ((eight(before, here, column, some, n, n), eight(last, here, column, m, n, n)),)
        for c in L.unroll(turns):
            if c + AHEAD < turns:
                here = row + SIDE * (c + AHEAD) + mine
                ahead = ahead + ((eight(before, here, column, some, n, n), eight(last, here, column, m, n, n)),)
            a, words = (L.u32(NOTHING), L.u32(NOTHING), L.u32(NOTHING), L.u32(NOTHING)), ()
            if both:
                a = turned(ahead[c][0], to, of)
            b = turned(ahead[c][1], to, of)
            factors = of_rows(alphas, row + SIDE * c, m)
            for j in L.unroll(4):
                at, alpha = 8 * c + 2 * j, alphas[j & 1]
                first, second = 2 * (j >> 1), 2 * (j >> 1) + 1
                p, q = scaled(acc[at], alpha, factors, first), scaled(acc[at + 1], alpha, factors, second)
                p, q = added(p, q, a[j])
                p, q = added(p, q, b[j])
                words = words + (L.bf16x2(p, q),)
            store(y, words, to, of, c, row, mine, column, m, n, pitch, odd)

    return run_adding if adds else run
