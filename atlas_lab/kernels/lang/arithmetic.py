"""float32 arithmetic whose rounding is said: `_rn` to nearest, ties to even, never fused; `_approx` the fast units.

Numba contracts `a * b + c` by itself: use these where the rounding matters. On the interpreter an approximation is
the correctly rounded value; the hardware's relative error is given by each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from atlas_lab.kernels.lang.bits import Single, from_bits, odd, single
from atlas_lab.kernels.lang.op import Needs, Op
from atlas_lab.kernels.lang.types import f32

_F32 = "9.7.3 Floating Point"
U_F32 = 2.0**-24
_NAN = 0x7FFFFFFF


def _narrow(x: float) -> Single:
    """float64 to float32, without a warning on overflow."""
    return Single(math.copysign(math.inf, x)) if abs(x) >= 3.4028235677973366e38 else Single(x)


def _fma(a: float, b: float, c: float) -> Single:
    """a·b + c, rounded once."""
    return _narrow(odd(float(single(a)) * float(single(b)), float(single(c))))


def _div(a: float, b: float) -> Single:
    """a / b; a zero divisor gives infinity or NaN."""
    x, y = float(single(a)), float(single(b))
    if y == 0:
        return Single(math.nan if x == 0 or x != x else math.copysign(math.inf, x) * math.copysign(1, y))
    return _narrow(x / y)


def _sqrt(x: float) -> Single:
    """√x; NaN below zero."""
    return Single(math.sqrt(x)) if x >= 0 else Single(x if x == 0 else math.nan)


def _min(x: float, y: float) -> Single:
    """The smaller; a number rather than NaN; −0 is below +0."""
    a, b = single(x), single(y)
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return a if math.copysign(1, a) < 0 else b
    return a if a < b else b


def _max(x: float, y: float) -> Single:
    """The larger; a number rather than NaN; −0 is below +0."""
    a, b = single(x), single(y)
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return b if math.copysign(1, a) < 0 else a
    return a if a > b else b


def _keeping_nan(of: Callable[[float, float], Single]) -> Callable[[float, float], Single]:
    """The same, but the canonical NaN where either is one."""
    return lambda x, y: from_bits(_NAN) if x != x or y != y else of(x, y)


def _rcp(x: float) -> Single:
    """1 / x within 1 ulp."""
    return _div(1.0, x)


def _exp2(x: float) -> Single:
    """2**x, relative error 2**-22."""
    x = float(x)
    if x >= 128:
        return Single(math.inf)
    return Single(2.0**x) if x > -160 or x != x else Single(0)


def _rsqrt(x: float) -> Single:
    """1 / √x, relative error 2**-22.9."""
    if x != x or x < 0:
        return Single(math.nan)
    return _narrow(1 / math.sqrt(x)) if x else Single(math.copysign(math.inf, x))


def _tanh(x: float) -> Single:
    """tanh x, relative error 2**-11."""
    return Single(math.tanh(x))


def _op(
    name: str, arity: int, ptx: str, numpy: Callable[..., Single], u: float | None = None, needs: Needs = Needs()
) -> Op:
    text = f"{ptx} {', '.join(f'${i}' for i in range(arity + 1))};"
    return Op(name, (f32,) * arity, f32, ptx=text, numpy=numpy, section=_F32, needs=needs, unit_roundoff=u)


add_rn = _op("add_rn", 2, "add.rn.f32", lambda a, b: _narrow(float(single(a)) + float(single(b))), U_F32)
mul_rn = _op("mul_rn", 2, "mul.rn.f32", lambda a, b: _narrow(float(single(a)) * float(single(b))), U_F32)
fma_rn = _op("fma_rn", 3, "fma.rn.f32", _fma, U_F32)
div_rn = _op("div_rn", 2, "div.rn.f32", _div, U_F32)
sqrt_rn = _op("sqrt_rn", 1, "sqrt.rn.f32", _sqrt, U_F32)
min_f32 = _op("min_f32", 2, "min.f32", _min)
max_f32 = _op("max_f32", 2, "max.f32", _max)
min_nan_f32 = _op("min_nan_f32", 2, "min.NaN.f32", _keeping_nan(_min), needs=Needs((8, 0)))
max_nan_f32 = _op("max_nan_f32", 2, "max.NaN.f32", _keeping_nan(_max), needs=Needs((8, 0)))
abs_f32 = _op("abs_f32", 1, "abs.f32", lambda x: abs(single(x)))
rcp_approx = _op("rcp_approx", 1, "rcp.approx.f32", _rcp)
exp2_approx = _op("exp2_approx", 1, "ex2.approx.f32", _exp2)
rsqrt_approx = _op("rsqrt_approx", 1, "rsqrt.approx.f32", _rsqrt)
tanh_approx = _op("tanh_approx", 1, "tanh.approx.f32", _tanh)
