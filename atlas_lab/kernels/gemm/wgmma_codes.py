"""How the accumulators of a warpgroup's tile become E4M3 rows of y with a scale for 128 columns: what
`quantize_fp8_groups` makes of y in BF16, bit for bit.

The four lanes of a quad have a row of a warp's 16, so that a scale takes two exchanges. Rows leave through a warp's own
memory, as BF16 does, 16 codes a lane.
"""

from __future__ import annotations

import functools

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.wgmma_ring import ROW
from atlas_lab.kernels.gemm.wgmma_store import OUT_ROWS, ROWS, WARP_BYTES
from atlas_lab.kernels.quantize.fp8_groups import GROUP, scale_of

CODES = "fp8_groups"
"""The parameter `epilogue` of a kernel that makes them."""
EACH = 16  # columns of 16 bytes


@L.device
def largest(words, h):
    """The largest magnitude in a quad's row h of pairs of BF16."""
    most = L.f32(0)
    for j in L.unroll(GROUP // 8):
        pair = words[2 * j + h]
        most = L.max_f32(most, L.max_f32(L.abs_f32(L.bf16_lo(pair)), L.abs_f32(L.bf16_hi(pair))))
    most = L.max_f32(most, L.shfl_xor_f32(most, 1))
    return L.max_f32(most, L.shfl_xor_f32(most, 2))


@L.device
def coded(pair, by):
    return L.e4m3x2(L.div_rn(L.bf16_lo(pair), by), L.div_rn(L.bf16_hi(pair), by))


@L.device
def in_order(v):
    """16 codes of a row whose even pairs are the first 8."""
    first = L.u32(v[0] & 0xFFFF | v[1] << 16), L.u32(v[2] & 0xFFFF | v[3] << 16)
    return (*first, L.u32(v[0] >> 16 | v[1] & 0xFFFF0000), L.u32(v[2] >> 16 | v[3] & 0xFFFF0000))


@functools.cache
def code_storer(bn: int, out_at: int) -> L.DeviceFunction:
    """A device function as `row_storer(bn, out_at)`, over the same memory, but y is `(codes, scales, apart)`:
    codes E4M3 `[m, n]`, n a multiple of 16, scales F32 `[ceil(n/128), m]`, rows of which lie `apart`; col is a multiple
    of 128. Raises ValueError for a bn that is no multiple of 128."""
    if bn % GROUP:
        raise ValueError(f"code_storer: found {bn} columns, expected a multiple of {GROUP}")
    pack, words_of = L.pack_tile(L.bf16, bn // 2), GROUP // 4

    @L.device
    def store(into, words, warp, row, col, m, n):
        codes, scales, apart = into
        out = L.dynamic_shared(L.u8, out_at)
        lane = L.lane_id()
        r, chunk = lane & 15, lane & 7
        upper, lower = scale_of(largest(words, 0)), scale_of(largest(words, 1))
        # rows of 128 bytes; the 16-byte chunks of row r are exchanged by XOR with r % 8
        to = warp * WARP_BYTES + r * ROW + (((lane >> 4) ^ (r & 7)) << 4)
        for j in L.unroll(GROUP // (2 * EACH)):
            four = ()
            for i in L.unroll(4):
                at, by = 8 * j + 4 * (i // 2) + i % 2, lower if i % 2 else upper
                four = four + (L.u32(coded(words[at], by) | coded(words[at + 2], by) << 16),)
            L.stmatrix_x4(out, to ^ (32 * j), four)
        L.cuda.syncwarp()
        for i in L.unroll(OUT_ROWS // ROWS):
            mine, column = ROWS * i + (lane >> 3), col + EACH * chunk
            if row + mine < m and column < n:
                v = L.lds_v4_b32(out, warp * WARP_BYTES + mine * ROW + ((chunk ^ (mine & 7)) << 4))
                L.stg_v4_b32(codes, L.i64(row + mine) * n + column, in_order(v))
        L.cuda.syncwarp()
        if lane & 3 == 0 and col < n:
            mine = row + (lane >> 2)
            at = L.i64(col >> 7) * apart + mine
            if mine < m:
                L.stg_f32(scales, at, upper)
            if mine + 8 < m:
                L.stg_f32(scales, at + 8, lower)

    @L.device
    def run(into, acc, warp, row, col, m, n, pitch, odd):
        words = pack(acc)
        for g in L.unroll(bn // GROUP):
            some = ()
            for j in L.unroll(words_of):
                some = some + (words[g * words_of + j],)
            store(into, some, warp, row, L.i32(col + GROUP * g), m, n)

    return run
