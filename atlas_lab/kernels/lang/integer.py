"""Integer and bit operations on 32-bit registers. Unsigned operands may be any Python integers: they are masked."""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.bits import M32
from atlas_lab.kernels.lang.op import Const, Op
from atlas_lab.kernels.lang.types import i32, u32

_INT, _LOGIC = "9.7.1 Integer Arithmetic", "9.7.8 Logic and Shift"


def _lop3(a: int, b: int, c: int, imm: int) -> int:
    """Any bitwise function of three operands: `imm` is it applied to 0xF0, 0xCC, 0xAA."""
    r = 0
    if imm & 1:
        r |= ~a & ~b & ~c
    if imm & 2:
        r |= ~a & ~b & c
    if imm & 4:
        r |= ~a & b & ~c
    if imm & 8:
        r |= ~a & b & c
    if imm & 16:
        r |= a & ~b & ~c
    if imm & 32:
        r |= a & ~b & c
    if imm & 64:
        r |= a & b & ~c
    if imm & 128:
        r |= a & b & c
    return r & M32


def _prmt(a: int, b: int, selector: int) -> int:
    """Four bytes picked from the eight of b:a by the selector's nibbles; a nibble's top bit replicates the sign."""
    both = (a & M32) | (b & M32) << 32
    r = 0
    for i in (0, 4, 8, 12):
        pick = selector >> i
        byte = both >> ((pick & 7) << 3) & 0xFF
        if pick & 8:
            byte = 0xFF if byte & 0x80 else 0
        r |= byte << (i << 1)
    return r


def _dp4a(a: int, b: int, c: int) -> int:
    """c + the sum of four products of signed bytes; wraps."""
    return i32(c + sum(_s8(a, i) * _s8(b, i) for i in range(4)))


def _dp4a_u32(a: int, b: int, c: int) -> int:
    """c + the sum of four products of unsigned bytes; wraps."""
    return (c + sum(_byte(a, i) * _byte(b, i) for i in range(4))) & M32


def _shf_l(lo: int, hi: int, n: int) -> int:
    """The high word of hi:lo shifted left by n mod 32."""
    return (((hi & M32) << 32 | (lo & M32)) << (n & 31)) >> 32 & M32


def _shf_r(lo: int, hi: int, n: int) -> int:
    """The low word of hi:lo shifted right by n mod 32."""
    return ((hi & M32) << 32 | (lo & M32)) >> (n & 31) & M32


def _s8(q: int, i: int) -> int:
    """Byte i (0 to 3) of q, sign-extended."""
    v = q >> (i << 3) & 0xFF
    return v - 256 if v & 0x80 else v


def _byte(q: int, i: int) -> int:
    """Byte i (0 to 3) of q."""
    return q >> (i << 3) & 0xFF


def _emit_s8(e: Any, q: Any, i: Any) -> Any:
    b = e.builder
    return b.ashr(b.shl(q, b.sub(e.const(24), b.shl(i, e.const(3)))), e.const(24))


def _emit_byte(e: Any, q: Any, i: Any) -> Any:
    b = e.builder
    return b.and_(b.lshr(q, b.shl(i, e.const(3))), e.const(0xFF))


lop3 = Op(
    "lop3", (u32, u32, u32, Const("imm")), u32, ptx="lop3.b32 $0, $1, $2, $3, {imm};", numpy=_lop3, section=_LOGIC
)
prmt = Op("prmt", (u32, u32, u32), u32, ptx="prmt.b32 $0, $1, $2, $3;", numpy=_prmt, section="9.7.9 prmt")
dp4a = Op("dp4a", (u32, u32, i32), i32, ptx="dp4a.s32.s32 $0, $1, $2, $3;", numpy=_dp4a, section=_INT)
dp4a_u32 = Op("dp4a_u32", (u32, u32, u32), u32, ptx="dp4a.u32.u32 $0, $1, $2, $3;", numpy=_dp4a_u32, section=_INT)
shf_l = Op("shf_l", (u32, u32, u32), u32, ptx="shf.l.wrap.b32 $0, $1, $2, $3;", numpy=_shf_l, section=_LOGIC)
shf_r = Op("shf_r", (u32, u32, u32), u32, ptx="shf.r.wrap.b32 $0, $1, $2, $3;", numpy=_shf_r, section=_LOGIC)
popc = Op("popc", (u32,), i32, ptx="popc.b32 $0, $1;", numpy=lambda v: (int(v) & M32).bit_count(), section=_INT)
s8 = Op("s8", (u32, i32), i32, ptx=_emit_s8, numpy=_s8, section=_LOGIC)
byte = Op("byte", (u32, i32), u32, ptx=_emit_byte, numpy=_byte, section=_LOGIC)
