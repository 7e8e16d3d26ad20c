"""Conversions. Names read from → to: `bits_f32` makes a float32 of 32 bits, `e4m3x2_f16x2` two f16 of two e4m3.

Packed operands are u32, the first element in the low bits. Narrowing rounds to nearest, ties to even.
The by-bits forms (`e4m3x4_bf16x2`, `e4m3_f32`, …) run everywhere and are exact for every finite code; e4m3's NaN
codes come out as ±480 there, so refuse them when loading.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas_lab.kernels.lang.bits import (
    BF16,
    E4M3,
    E4M3_F16,
    E5M2_F16,
    F16,
    Single,
    bf16_bits,
    e4m3_bits,
    f16_bits,
    from_bits,
    single,
    to_bits,
)
from atlas_lab.kernels.lang.op import Needs, Op, Vec
from atlas_lab.kernels.lang.types import f32, i32, u32

_SM80, _SM89 = Needs((8, 0)), Needs((8, 9))
_CVT = "9.7.9 Data Movement: cvt"
_LOGIC = "9.7.8 Logic and Shift"

bits_f32 = Op("bits_f32", (u32,), f32, ptx=lambda e, v: e.bits_f32(v), numpy=from_bits, section="9.7.9 mov")
f32_bits = Op(
    "f32_bits", (f32,), u32, ptx=lambda e, v: e.builder.bitcast(v, e.const(0).type), numpy=to_bits, section="9.7.9 mov"
)
bf16_lo = Op(
    "bf16_lo",
    (u32,),
    f32,
    numpy=lambda v: BF16[v & 0xFFFF],
    section=_LOGIC,
    ptx=lambda e, v: e.bits_f32(e.builder.shl(v, e.const(16))),
)
bf16_hi = Op(
    "bf16_hi",
    (u32,),
    f32,
    numpy=lambda v: BF16[v >> 16 & 0xFFFF],
    section=_LOGIC,
    ptx=lambda e, v: e.bits_f32(e.builder.and_(v, e.const(0xFFFF0000))),
)
bf16x2 = Op(
    "bf16x2",
    (f32, f32),
    u32,
    ptx="cvt.rn.bf16x2.f32 $0, $2, $1;",
    needs=_SM80,
    section=_CVT,
    numpy=lambda lo, hi: bf16_bits(lo) | bf16_bits(hi) << 16,
)
f16_lo = Op(
    "f16_lo",
    (u32,),
    f32,
    ptx="{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
    section=_CVT,
    numpy=lambda v: F16[v & 0xFFFF],
)
f16_hi = Op(
    "f16_hi",
    (u32,),
    f32,
    ptx="{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    section=_CVT,
    numpy=lambda v: F16[v >> 16 & 0xFFFF],
)
f16x2 = Op(
    "f16x2",
    (f32, f32),
    u32,
    ptx="cvt.rn.f16x2.f32 $0, $2, $1;",
    needs=_SM80,
    section=_CVT,
    numpy=lambda lo, hi: f16_bits(single(lo)) | f16_bits(single(hi)) << 16,
)
e4m3x2_f16x2 = Op(
    "e4m3x2_f16x2",
    (u32,),
    u32,
    needs=_SM89,
    section=_CVT,
    ptx="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }",
    numpy=lambda v: E4M3_F16[v & 0xFF] | E4M3_F16[v >> 8 & 0xFF] << 16,
)
e4m3x4_f16x2_cvt = Op(
    "e4m3x4_f16x2_cvt",
    (u32,),
    Vec(u32, 2),
    needs=_SM89,
    section=_CVT,
    # of a shifted word ptxas would not read the upper half in place
    ptx="{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
    numpy=lambda q: _e4m3x4(E4M3_F16, q),
)
e5m2x2_f16x2 = Op(
    "e5m2x2_f16x2",
    (u32,),
    u32,
    needs=_SM89,
    section=_CVT,
    ptx="{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e5m2x2 $0, h; }",
    numpy=lambda v: E5M2_F16[v & 0xFF] | E5M2_F16[v >> 8 & 0xFF] << 16,
)
e4m3x2 = Op(
    "e4m3x2",
    (f32, f32),
    u32,
    needs=_SM89,
    section=_CVT,
    ptx="{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
    numpy=lambda lo, hi: e4m3_bits(lo) | e4m3_bits(hi) << 8,
)

f32_i32 = Op(
    "f32_i32",
    (f32,),
    i32,
    ptx="cvt.rni.s32.f32 $0, $1;",
    section=_CVT,
    numpy=lambda x: 0 if x != x else round(max(-2147483648.0, min(2147483647.0, float(x)))),
)
i32_f32 = Op("i32_f32", (i32,), f32, ptx="cvt.rn.f32.s32 $0, $1;", numpy=lambda v: Single(i32(v)), section=_CVT)
rint = Op("rint", (f32,), f32, ptx="cvt.rni.f32.f32 $0, $1;", numpy=lambda x: np.rint(single(x)), section=_CVT)

# By bits. e4m3 shifted into the fields of bf16 keeps its exponent, whose bias is 7 and not 127: off by 2**120, which
# one multiply restores, subnormals too. In f16 (bias 15) it is 2**8.
_E4M3_FINITE = [Single(480 if c < 128 else -480) if v != v else v for c, v in enumerate(E4M3)]
_E4M3_BF16 = [bf16_bits(v) for v in _E4M3_FINITE]
_E4M3_F16 = [f16_bits(v) for v in _E4M3_FINITE]


def _e4m3x4(table: list[int], q: int) -> tuple[int, int]:
    return (
        table[q & 0xFF] | table[q >> 8 & 0xFF] << 16,
        table[q >> 16 & 0xFF] | table[q >> 24 & 0xFF] << 16,
    )


def _e4m3x4_bf16x2(q: int) -> tuple[int, int]:
    """Four e4m3 to bf16: (elements 0 and 1), (elements 2 and 3)."""
    return _e4m3x4(_E4M3_BF16, q)


def _e4m3x4_f16x2(q: int) -> tuple[int, int]:
    """Four e4m3 to f16: (elements 0 and 1), (elements 2 and 3)."""
    return _e4m3x4(_E4M3_F16, q)


def _emit_e4m3(shift: int, kept: int, scale: str, scaling: int) -> Any:
    def emit(e: Any, q: Any) -> list[Any]:
        out = []
        for selector in (0x9180, 0xB3A2):  # two bytes, each extended by its sign to 16 bits
            wide = e.u32("prmt.b32 $0, $1, $2, $3;", q, 0, selector)
            # shifted, a copy of the sign is the top bit; `kept` drops the others, and what crossed the halves
            moved = e.builder.and_(e.builder.shl(wide, e.const(shift)), e.const(kept))
            out.append(e.u32(scale, moved, scaling, 0x80008000))
        return out

    return emit


# sm_80 multiplies bf16 pairs through fma with -0.0, which keeps the sign of zero.
e4m3x4_bf16x2 = Op(
    "e4m3x4_bf16x2",
    (u32,),
    Vec(u32, 2),
    numpy=_e4m3x4_bf16x2,
    needs=_SM80,
    section=_LOGIC,
    ptx=_emit_e4m3(4, 0x87F087F0, "fma.rn.bf16x2 $0, $1, $2, $3;", 0x7B807B80),
)
e4m3x4_f16x2 = Op(
    "e4m3x4_f16x2",
    (u32,),
    Vec(u32, 2),
    numpy=_e4m3x4_f16x2,
    section=_LOGIC,
    ptx=_emit_e4m3(7, 0xBF80BF80, "fma.rn.f16x2 $0, $1, $2, $3;", 0x5C005C00),
)


def _e4m3_f32(code: int) -> Single:
    """One e4m3, in the low byte of a u32."""
    return _E4M3_FINITE[code & 0xFF]


def _emit_e4m3_f32(e: Any, code: Any) -> Any:
    b = e.builder
    magnitude = b.shl(b.and_(code, e.const(0x7F)), e.const(20))
    signed = b.or_(b.shl(b.and_(code, e.const(0x80)), e.const(24)), magnitude)
    return e.f32("mul.rn.f32 $0, $1, $2;", e.bits_f32(signed), e.bits_f32(e.const(0x7B800000)))


e4m3_f32 = Op("e4m3_f32", (u32,), f32, ptx=_emit_e4m3_f32, numpy=_e4m3_f32, section=_LOGIC)

# e2m1 (sign, eem): the seven magnitudes are bytes of a table that prmt indexes with four nibbles at once.
_E2M1 = [Single(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)]
_E2M1_BF16 = [bf16_bits(_E2M1[c & 15]) | bf16_bits(_E2M1[c >> 4]) << 16 for c in range(256)]
_E2M1_F16 = [f16_bits(_E2M1[c & 15]) | f16_bits(_E2M1[c >> 4]) << 16 for c in range(256)]


def _e2m1x8_bf16x2(q: int) -> tuple[int, int, int, int]:
    """Eight e2m1 (the low nibble first) to bf16 pairs, in order."""
    t = _E2M1_BF16
    return t[q & 0xFF], t[q >> 8 & 0xFF], t[q >> 16 & 0xFF], t[q >> 24 & 0xFF]


def _e2m1x8_f16x2(q: int) -> tuple[int, int, int, int]:
    """Eight e2m1 (the low nibble first) to f16 pairs, in order."""
    t = _E2M1_F16
    return t[q & 0xFF], t[q >> 8 & 0xFF], t[q >> 16 & 0xFF], t[q >> 24 & 0xFF]


def _emit_e2m1(low_bytes: tuple[int, int] | None, high_bytes: tuple[int, int]) -> Any:
    def emit(e: Any, q: Any) -> list[Any]:
        b, prmt = e.builder, "prmt.b32 $0, $1, $2, $3;"
        left = b.shl(q, e.const(4))
        index = b.and_(q, e.const(0x77777777))
        out = []
        for half in range(2):  # nibbles 0 to 3, then 4 to 7
            selector = b.lshr(index, e.const(16)) if half else index
            # each byte's top bit is the sign of one nibble: even nibbles from q << 4, odd ones from q
            signs = b.and_(e.u32(prmt, left, q, 0x7362 if half else 0x5140), e.const(0x80808080))
            high = b.or_(e.u32(prmt, *high_bytes, selector), signs)
            low = e.u32(prmt, *low_bytes, selector) if low_bytes else e.const(0)
            out += [e.u32(prmt, low, high, 0x5140), e.u32(prmt, low, high, 0x7362)]
        return out

    return emit


e2m1x8_bf16x2 = Op(
    "e2m1x8_bf16x2",
    (u32,),
    Vec(u32, 4),
    numpy=_e2m1x8_bf16x2,
    section=_LOGIC,
    ptx=_emit_e2m1((0xC0800000, 0xC0804000), (0x3F3F3F00, 0x40404040)),
)
e2m1x8_f16x2 = Op(
    "e2m1x8_f16x2",
    (u32,),
    Vec(u32, 4),
    numpy=_e2m1x8_f16x2,
    section=_LOGIC,
    ptx=_emit_e2m1(None, (0x3E3C3800, 0x46444240)),
)


# A bf16 that is 2**-120 of a value has the exponent field of that value's e4m3, subnormals too, and four more bits of
# mantissa. Read as an f16 below 2**-13 its magnitude is fixed-point: added to 2**-10, whose last place is 16 of its
# own, it is rounded and lies in the low byte.
_ROUNDER = 2.0**-10


def _small_bf16_e4m3() -> list[int]:
    codes = np.arange(65536, dtype=np.uint16)
    magnitudes = (codes & np.uint16(0x7FFF)).view(np.float16).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (magnitudes + _ROUNDER).astype(np.float16).view(np.uint16)
    rounded[np.isnan(magnitudes)] = 0x7FFF
    made: list[int] = ((rounded & 0xFF) | (codes >> 8 & 0x80)).tolist()
    return made


_SMALL_BF16_E4M3 = _small_bf16_e4m3()


def _bf16x4_e4m3_small(first: int, second: int) -> int:
    """Two pairs of bf16, each 2**-120 of a value below 464 in magnitude, to four e4m3 of the values, in order."""
    t = _SMALL_BF16_E4M3
    return t[first & 0xFFFF] | t[first >> 16] << 8 | t[second & 0xFFFF] << 16 | t[second >> 16] << 24


def _emit_bf16x4_e4m3_small(e: Any, first: Any, second: Any) -> Any:
    text, prmt = "{ .reg .b32 m; abs.f16x2 m, $1; add.rn.f16x2 $0, m, $2; }", "prmt.b32 $0, $1, $2, $3;"
    rounder = f16_bits(_ROUNDER) * 0x10001
    rounded = e.u32(prmt, e.u32(text, first, rounder), e.u32(text, second, rounder), 0x6420)
    signs = e.builder.and_(e.u32(prmt, first, second, 0x7531), e.const(0x80808080))
    return e.builder.or_(rounded, signs)


bf16x4_e4m3_small = Op(
    "bf16x4_e4m3_small",
    (u32, u32),
    u32,
    numpy=_bf16x4_e4m3_small,
    section="9.7.4 abs, add; 9.7.9 prmt",
    ptx=_emit_bf16x4_e4m3_small,
)
