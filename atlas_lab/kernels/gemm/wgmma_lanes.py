"""Repacked NVFP4 as operand A of warpgroup products, in ascending K: weights `repacked_nvfp4` makes for mma.sync.

There a lane owns a group of 16 K and permutes x alike. Here x is operand B, which a descriptor reads in chunks of 8 K,
pair t of every chunk for lane 4g + t; a copy engine cannot move pairs about, a launch that does costs a read and a
write of x, and a second copy of the weights their size. But a lane can take its pairs from what all four lanes of its
quad own: 16 bytes are the group of 16 that one product covers, of which registers 2t and 2t + 1 of either pair of words
are pair t of the group's first and second chunk, rows g and g + 8.
"""

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemv.mma_lanes import SCALE_BIAS
from atlas_lab.kernels.lang.lanes import CODE, FIRST, ROTATIONS

SCALES_AT = 1024  # bytes of a unit before its block scales


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
def pick_of(lane):
    """What `weights` needs to know of a lane: for rows g and g + 8, the bits of both words and their rotation."""
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
def weights(unit, at, group, pick, scales):
    """A fragment (m64n*k16) of group 0 to 7 of the unit at byte `at` of `unit`, times 2^-8: exact in BF16. `scales` are
    the unit's for the lane's rows, four words."""
    q = L.lds_v4_b32(unit, at + 512 * (group // 4) + 64 * (L.lane_id() >> 2) + 16 * (group % 4))
    s = scales[group % 4]
    low = L.u32(L.prmt(s, 0, 0x4040 + 0x202 * (group // 4)) * 16 + SCALE_BIAS)
    high = L.u32(L.prmt(s, 0, 0x4141 + 0x202 * (group // 4)) * 16 + SCALE_BIAS)
    return (
        L.bmul2(_codes(q[0], q[1], pick[0], pick[1], pick[2]), low),
        L.bmul2(_codes(q[0], q[1], pick[3], pick[4], pick[5]), high),
        L.bmul2(_codes(q[2], q[3], pick[0], pick[1], pick[2]), low),
        L.bmul2(_codes(q[2], q[3], pick[3], pick[4], pick[5]), high),
    )


@L.device
def scales_of(unit, at):
    """The block scales of the unit at byte `at` of `unit` for the lane's rows."""
    return L.lds_v4_b32(unit, at + SCALES_AT + 16 * (L.lane_id() >> 2))
