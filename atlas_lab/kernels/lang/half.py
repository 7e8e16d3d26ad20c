"""Packed 16-bit arithmetic: f16x2 (`h…`) and bf16x2 (`b…`). Every result is rounded once, to nearest, ties to even."""

from __future__ import annotations

import functools
from collections.abc import Callable

from atlas_lab.kernels.lang.bits import BF16, F16, bf16_from_odd, f16_bits, halves, odd
from atlas_lab.kernels.lang.op import Needs, Op
from atlas_lab.kernels.lang.types import u32

_SM80 = Needs((8, 0))
_HALF = "9.7.4 Half Precision Floating Point"
U_F16, U_BF16 = 2.0**-11, 2.0**-8
KEPT = 1 << 15


def _f16(f: Callable[..., float]) -> Callable[..., int]:
    return lambda *codes: f16_bits(f(*(float(F16[c]) for c in codes)))


def _bf16(f: Callable[..., float]) -> Callable[..., int]:
    return lambda *codes: bf16_from_odd(f(*(float(BF16[c]) for c in codes)))


def _lanes(f: Callable[..., int]) -> Callable[..., int]:
    """`f` on both halves, results kept: weights of few bits repeat."""
    known = functools.lru_cache(KEPT)(f)
    return functools.lru_cache(KEPT)(lambda *packed: halves(known, *packed))


hadd2 = Op(
    "hadd2",
    (u32, u32),
    u32,
    ptx="add.rn.f16x2 $0, $1, $2;",
    numpy=_lanes(_f16(lambda a, b: a + b)),
    section=_HALF,
    unit_roundoff=U_F16,
)
hmul2 = Op(
    "hmul2",
    (u32, u32),
    u32,
    ptx="mul.rn.f16x2 $0, $1, $2;",
    numpy=_lanes(_f16(lambda a, b: a * b)),
    section=_HALF,
    unit_roundoff=U_F16,
)
hfma2 = Op(
    "hfma2",
    (u32, u32, u32),
    u32,
    ptx="fma.rn.f16x2 $0, $1, $2, $3;",
    numpy=_lanes(_f16(lambda a, b, c: odd(a * b, c))),
    section=_HALF,
    unit_roundoff=U_F16,
)
# sm_80 has only the fma of bf16 pairs: a·1 + b, and a·b + (−0), which keeps the sign of a zero product.
badd2 = Op(
    "badd2",
    (u32, u32),
    u32,
    needs=_SM80,
    section=_HALF,
    unit_roundoff=U_BF16,
    ptx=lambda e, a, b: e.u32("fma.rn.bf16x2 $0, $1, $2, $3;", a, 0x3F803F80, b),
    numpy=_lanes(_bf16(odd)),
)
bmul2 = Op(
    "bmul2",
    (u32, u32),
    u32,
    needs=_SM80,
    section=_HALF,
    unit_roundoff=U_BF16,
    ptx=lambda e, a, b: e.u32("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, 0x80008000),
    numpy=_lanes(_bf16(lambda a, b: a * b)),
)
bfma2 = Op(
    "bfma2",
    (u32, u32, u32),
    u32,
    ptx="fma.rn.bf16x2 $0, $1, $2, $3;",
    needs=_SM80,
    section=_HALF,
    unit_roundoff=U_BF16,
    numpy=_lanes(_bf16(lambda a, b, c: odd(a * b, c))),
)
