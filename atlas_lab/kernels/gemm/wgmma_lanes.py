"""Repacked NVFP4 as operand A of warpgroup products: weights `repacked_nvfp4` makes for mma.sync.

There a lane owns a group of 16 K and permutes x alike: product j of a half unit takes 4 K, from 4·j on, of each of the
groups of a quad. Here x is operand B, which a descriptor reads in chunks of 8 K, pair t of every chunk for lane 4g + t;
a copy engine cannot move pairs about.

`in_lanes_order`: x was put into that order by a launch before, and a lane loads what it owns. `in_order`: x is as it
was, and a lane takes its pairs from what all four lanes of its quad own, four times the shared memory's bandwidth and a
third more instructions, which many rows of x hide: 16 bytes are the group of 16 that one product covers, of which
registers 2t and 2t + 1 of either pair of words are pair t of the group's first and second chunk, rows g and g + 8.

`rounded_weights` makes E4M3 of them, for products of 32 of K: a pair of words, 8 K of the lane's group, is what a lane
has of one product, its first 4 K in the product's first half, the others in its second.

`codes_of_groups` makes E4M3 of codes alone, for products of 32 of K that cover one group each, 16 of K in the order of
x: lane t takes K 4t to 4t + 3, which registers 0 to 3 or 4 to 7 of the group's pair of words t / 2 hold.
`integers_of_groups` makes int8 of them, twice the codes.
"""

import functools
from typing import NamedTuple

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.mma_lanes import SCALE_BIAS
from atlas_lab.kernels.lang.lanes import CODE, FIRST, ROTATIONS

SCALES_AT = 1024  # bytes of a unit before its block scales
# Codes come as 2^-126 of themselves: under scales made 2^3 of theirs, weights are 2^-120 of an eighth of themselves.
ROUNDED_BIAS, ROUNDED_LIFT = 0x3C003C00, 8.0
SCALE_BITS = 117 << 23  # scales are 5 and 3 bits of 2^(e - 10): the exponent of a float32 less theirs
# f16 2^15 makes 2^-14 of a code twice the code; 1536 has a low byte of 0, which becomes that of what is added
INTEGER_LIFT, INTEGER_BASE = 0x78007800, 0x66006600
INTEGERS_LIFT = 0.5
CODES_LIFT = 64.0  # the same 2^-126 of a code are 2^-120 of a 64th of it, exact in E4M3


@L.device
def _of_lane(t, table):
    return (table[0] if t == 0 else table[1]) if t < 2 else (table[2] if t == 2 else table[3])


def _masked(rotation: int, mask: int) -> int:
    """The bits of a word that a register takes, `mask` of its code's."""
    code = (CODE >> rotation | CODE << (32 - rotation)) & 0xFFFFFFFF
    return code & mask


_TURNS = tuple(tuple(ROTATIONS[h::2]) for h in range(2))
_FROM_FIRST = tuple(tuple(_masked(r, f) for r, f in zip(ROTATIONS[h::2], FIRST[h::2], strict=True)) for h in range(2))
_FROM_SECOND = tuple(tuple(_masked(r, ~f) for r, f in zip(ROTATIONS[h::2], FIRST[h::2], strict=True)) for h in range(2))
_TURN_0, _TURN_8 = _TURNS
_FIRST_0, _FIRST_8 = _FROM_FIRST
_SECOND_0, _SECOND_8 = _FROM_SECOND


@L.device
def _pick_of(lane):
    """For rows g and g + 8, the bits of both words and their rotation."""
    t = lane & 3
    return (
        L.u32(_of_lane(t, _FIRST_0)),
        L.u32(_of_lane(t, _SECOND_0)),
        L.u32(_of_lane(t, _TURN_0)),
        L.u32(_of_lane(t, _FIRST_8)),
        L.u32(_of_lane(t, _SECOND_8)),
        L.u32(_of_lane(t, _TURN_8)),
    )


@L.device
def _codes(first, second, from_first, from_second, turn):
    """A pair of codes as bf16, times 2^-126."""
    word = L.lop3(first, from_first, second & from_second, 0xEA)  # a & b | c
    return L.shf_l(word, word, turn)


@L.device
def _factors(s, half, bias):
    """The block scales of word s for a lane's upper and lower row, twice each, made BF16."""
    low = L.u32(L.prmt(s, 0, 0x4040 + 0x202 * half) * 16 + bias)
    return low, L.u32(L.prmt(s, 0, 0x4141 + 0x202 * half) * 16 + bias)


@L.device
def _weights_in_order(unit, at, half, pick, scales):
    out = ()
    for group in L.unroll(4):
        q = L.lds_v4_b32(unit, at + 512 * half + 64 * (L.lane_id() >> 2) + 16 * group)
        low, high = _factors(scales[group], half, SCALE_BIAS)
        made = (
            L.bmul2(_codes(q[0], q[1], pick[0], pick[1], pick[2]), low),
            L.bmul2(_codes(q[0], q[1], pick[3], pick[4], pick[5]), high),
            L.bmul2(_codes(q[2], q[3], pick[0], pick[1], pick[2]), low),
            L.bmul2(_codes(q[2], q[3], pick[3], pick[4], pick[5]), high),
        )
        out = out + (made,)
    return out


@L.device
def scales_in_order(unit, at):
    """The block scales of rows g and g + 8, a word for each of the four groups of a half, as a lane's own."""
    return L.lds_v4_b32(unit, at + SCALES_AT + 16 * (L.lane_id() >> 2))


@L.device
def _weights_in_lanes_order(unit, at, half, pick, scales):
    q = L.lds_v4_b32(unit, at + 512 * half + 16 * L.lane_id())
    low, high = _factors(scales, half, SCALE_BIAS)
    out = ()
    for p in L.unroll(2):
        c = L.e2m1x16_small(q[2 * p], q[2 * p + 1])
        for j in L.unroll(2):
            made = (
                L.bmul2(c[4 * j], low),
                L.bmul2(c[4 * j + 1], high),
                L.bmul2(c[4 * j + 2], low),
                L.bmul2(c[4 * j + 3], high),
            )
            out = out + (made,)
    return out


@L.device
def rounded_weights(unit, at, half, scales):
    """The two fragments (m64n*k32) of a half of 64 K of the unit at byte `at`, whose lane's scales are `scales`: an
    eighth of the weights without their tensor scale, rounded to E4M3, which holds the largest, 6·448 / 8."""
    q = L.lds_v4_b32(unit, at + 512 * half + 16 * L.lane_id())
    low, high = _factors(scales, half, ROUNDED_BIAS)
    out = ()
    for p in L.unroll(2):
        c = L.e2m1x16_small(q[2 * p], q[2 * p + 1])
        made = ()
        for j in L.unroll(2):
            upper = L.bf16x4_e4m3_small(L.bmul2(c[4 * j], low), L.bmul2(c[4 * j + 2], low))
            lower = L.bf16x4_e4m3_small(L.bmul2(c[4 * j + 1], high), L.bmul2(c[4 * j + 3], high))
            made = made + (upper, lower)
        out = out + (made,)
    return out


@L.device
def _integers(low, high):
    """Twice four codes, given as bf16 times 2^-126: int8."""
    # the three bits of a magnitude are an f16's, subnormals too, three places further up: 2^-14 of the code
    v = L.hfma2(L.u32(low << 3) & 0x0E000E00 | low & 0x80008000, INTEGER_LIFT, INTEGER_BASE)
    w = L.hfma2(L.u32(high << 3) & 0x0E000E00 | high & 0x80008000, INTEGER_LIFT, INTEGER_BASE)
    return L.prmt(v, w, 0x6420)


@functools.cache
def _of_groups(four_of: L.DeviceFunction):
    """A device function `(unit, at, half)`: for each of the four groups of a half of 64 K of the unit at byte `at`,
    what `four_of(low, high)` makes of four codes of a row, bf16 times 2^-126: of rows g and g + 8, the two registers of
    one half of a fragment (m64n*k32)."""

    @L.device
    def run(unit, at, half):
        t = L.lane_id() & 3
        out = ()
        for group in L.unroll(4):
            q = L.lds_v2_b32(unit, at + 512 * half + 64 * (L.lane_id() >> 2) + 16 * group + 8 * (t >> 1))
            c = L.e2m1x16_small(q[0], q[1])
            mine = ()
            for i in L.unroll(4):
                mine = mine + (c[4 + i] if t & 1 else c[i],)
            out = out + ((four_of(mine[0], mine[2]), four_of(mine[1], mine[3])),)
        return out

    return run


@L.device
def _sixty_fourths(low, high):
    """A 64th of four codes: E4M3."""
    return L.bf16x4_e4m3_small(low, high)


codes_of_groups, integers_of_groups = _of_groups(_sixty_fourths), _of_groups(_integers)


@L.device
def scales_of_group(s, half):
    """The block scales of word s for rows g and g + 8 of a half of 64 K, as float32."""
    upper = L.bits_f32(L.u32(L.prmt(s, 0, 0x4044 + 0x200 * half) * 16 + SCALE_BITS))
    return upper, L.bits_f32(L.u32(L.prmt(s, 0, 0x4144 + 0x200 * half) * 16 + SCALE_BITS))


@L.device
def scales_in_lanes_order(unit, at):
    """The four block scales of a lane: of both rows in the unit's first half, then in its second."""
    return L.lds_b32(unit, at + SCALES_AT + 4 * L.lane_id())


@L.device
def _nothing(lane):
    return L.u32(0)


class Lanes(NamedTuple):
    """Device functions over the unit at byte `at` of `unit`: `pick(lane)`, what `weights` needs to know of a lane;
    `scales(unit, at)`, the block scales of its rows; `weights(unit, at, half, pick, scales)`, the four fragments
    (m64n*k16) of a half of 64 K, times 2^-8: exact in BF16."""

    pick: L.DeviceFunction
    scales: L.DeviceFunction
    weights: L.DeviceFunction


in_order = Lanes(_pick_of, scales_in_order, _weights_in_order)
in_lanes_order = Lanes(_nothing, scales_in_lanes_order, _weights_in_lanes_order)
