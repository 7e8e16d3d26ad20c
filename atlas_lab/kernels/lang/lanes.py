"""E2M1 codes laid out for the tensor cores: two words of sixteen codes become eight registers of bf16 pairs.

Register r holds the bits `0x81C0` of each half (sign at 15, eem at 8 to 6) of a word rotated left by `ROTATIONS[r]`:
the word is the first where `FIRST[r]` has a bit, the second elsewhere. The eight patterns cover each bit of the two
words once, so one AND and at most a rotation find a register, and two of the eight need one bitwise select besides.
"""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.bits import M32
from atlas_lab.kernels.lang.integer import shf_l
from atlas_lab.kernels.lang.op import Op, Vec
from atlas_lab.kernels.lang.types import u32

CODE = 0x81C081C0
ROTATIONS = (0, 4, 10, 8, 2, 6, 12, 14)
FIRST = (M32, M32, M32, 0x00010001, 0, 0, 0, 0xFEFFFEFF)
# Bit of a half of a register that each bit of a code (m, e, e, sign) lies at.
PLACES = (6, 7, 8, 15)


def word_and_bit(register: int, half: int, bit: int) -> tuple[int, int]:
    """Where a code's bit lies: the word, 0 or 1, and the bit in it, for a half (0: low) of a register."""
    at = (16 * half + PLACES[bit] - ROTATIONS[register]) % 32
    return (0 if FIRST[register] >> at & 1 else 1), at


def _numpy(first: int, second: int) -> tuple[int, ...]:
    """Sixteen codes to eight pairs of bf16, each the code's value times 2**-126."""
    out = []
    for rotation, mask in zip(ROTATIONS, FIRST, strict=True):
        word = (first & mask) | (second & ~mask & M32)
        out.append(shf_l(word, word, rotation) & CODE)
    return tuple(out)


def _emit(e: Any, first: Any, second: Any) -> list[Any]:
    b = e.builder
    out = []
    for rotation, mask in zip(ROTATIONS, FIRST, strict=True):
        word = first if mask == M32 else second
        if mask not in (0, M32):
            word = e.u32("lop3.b32 $0, $1, $2, $3, 0xCA;", mask, first, second)
        if 0 < rotation <= PLACES[0]:  # no bit crosses between the halves: a shift, which two pipes can do
            word = b.shl(word, e.const(rotation))
        elif rotation:
            word = e.u32("shf.l.wrap.b32 $0, $1, $1, $2;", word, rotation)
        out.append(b.and_(word, e.const(CODE)))
    return out


e2m1x16_small = Op("e2m1x16_small", (u32, u32), Vec(u32, 8), ptx=_emit, numpy=_numpy, section="9.7.8 Logic and Shift")


def _moves() -> tuple[tuple[int, int, int, int], ...]:
    """How codes get there: (row, word, rotation to the left, mask after it), for registers that are the operand A of
    two products m16n8k16: register r is row half r % 2, elements 4·(r // 4) + 2·(r // 2 % 2) and the next."""
    masks: dict[tuple[int, int, int], int] = {}
    for register in range(8):
        for half in range(2):
            nibble = 4 * (register // 4) + 2 * (register // 2 % 2) + half
            for bit in range(4):
                word, at = word_and_bit(register, half, bit)
                key = (register % 2, word, (at - 4 * nibble - bit) % 32)
                masks[key] = masks.get(key, 0) | 1 << at
    return tuple((*key, mask) for key, mask in sorted(masks.items()))


MOVES = _moves()


def _pack(upper: int, lower: int) -> tuple[int, int]:
    """Eight codes each of two rows 8 apart, the first in the low nibble, to the two words."""
    out = [0, 0]
    for row, word, rotation, mask in MOVES:
        source = (upper, lower)[row]
        out[word] |= shf_l(source, source, rotation) & mask
    return out[0], out[1]


def _emit_pack(e: Any, upper: Any, lower: Any) -> list[Any]:
    out = [e.const(0), e.const(0)]
    for row, word, rotation, mask in MOVES:
        moved = e.u32("shf.l.wrap.b32 $0, $1, $1, $2;", (upper, lower)[row], rotation)
        out[word] = e.builder.or_(out[word], e.builder.and_(moved, e.const(mask)))
    return out


e2m1x16_pack = Op("e2m1x16_pack", (u32, u32), Vec(u32, 2), ptx=_emit_pack, numpy=_pack, section="9.7.8 Logic and Shift")
