"""Bit patterns of scalars on the interpreter, made cheap: tables for 8- and 16-bit codes, one scratch word for 32.

Values are what the interpreter uses: Python integers, and `numpy.float32` for f32. The scratch word makes this
module, like the interpreter, single-threaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

M32 = 0xFFFFFFFF
Single = np.float32

_word = np.zeros(1, np.float32)
_half = np.zeros(1, np.float16)
_word_bits = memoryview(_word.view(np.uint32))  # type: ignore[arg-type]
_half_bits = memoryview(_half.view(np.uint16))  # type: ignore[arg-type]


def single(x: float | Single) -> Single:
    """A float operand as float32, rounded to nearest."""
    return x if type(x) is Single else Single(x)


def to_bits(x: float | Single) -> int:
    """The 32 bits of a float32."""
    _word[0] = x
    return _word_bits[0]


def from_bits(v: int) -> Single:
    """The float32 of 32 bits."""
    _word_bits[0] = v & M32
    value: Single = _word[0]
    return value


# float32 of every bf16, f16, e4m3 and e5m2 code; f16 bits of every e4m3 and e5m2 code (all exact).
BF16: list[Single] = list((np.arange(65536, dtype=np.uint32) << np.uint32(16)).view(np.float32))
F16: list[Single] = list(np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))
_CODES = np.arange(256, dtype=np.uint8)
E4M3: list[Single] = list(_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
E4M3_F16: list[int] = [0x7FFF if x != x else int(np.float16(x).view(np.uint16)) for x in E4M3]
E5M2_F16: list[int] = [0x7FFF if c & 0x7F > 0x7C else c << 8 for c in range(256)]


def bf16_bits(x: float | Single) -> int:
    """f32 to bf16, nearest, ties to even; NaN becomes 0x7FFF, as cvt.rn.bf16.f32 makes it."""
    _word[0] = x
    bits = _word_bits[0]
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def f16_bits(x: float | Single) -> int:
    """A float32 (or a float64 that is not a NaN payload of interest) to f16, nearest, ties to even; NaN: 0x7FFF."""
    if x != x:
        return 0x7FFF
    if not -65520 < x < 65520:
        return 0x7C00 if x > 0 else 0xFC00
    _half[0] = x
    return _half_bits[0]


def e4m3_bits(x: float | Single) -> int:
    """f32 to e4m3, nearest, ties to even, saturating at 448; NaN: 0x7F, as cvt.rn.satfinite makes it."""
    _word[0] = x
    bits = _word_bits[0]
    sign, magnitude = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0x7F
    if magnitude >= 0x3C800000:  # 2**-6, the smallest normal
        return sign | min((magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3), 0x7E)
    return sign | round(abs(float(x)) * 512)


def odd(a: float, b: float) -> float:
    """a + b in float64, rounded to odd: a later rounding to half of its bits or fewer is then a single rounding."""
    s = a + b
    t = s - a
    error = (a - (s - t)) + (b - t)
    if error == 0 or error != error:
        return s
    if not _even(s):
        return s
    return math.nextafter(s, math.inf if error > 0 else -math.inf)


def _even(s: float) -> bool:
    m, _ = math.frexp(s)
    return int(math.ldexp(m, 53)) & 1 == 0


def bf16_from_odd(s: float) -> int:
    """A float64 rounded to odd, to bf16 in one rounding: through float32 rounded to odd."""
    if s != s:
        return 0x7FFF
    if abs(s) >= 3.4e38:
        return bf16_bits(Single(math.copysign(3.4028235e38 if abs(s) < 3.3961775292304e38 else math.inf, s)))
    x = Single(s)
    back = float(x)
    if back != s:
        bits = to_bits(x)
        if abs(back) > abs(s):
            bits -= 1
        x = from_bits(bits | 1)
    return bf16_bits(x)


def halves(f: Callable[..., int], *packed: int) -> int:
    """`f` on the low and the high 16 bits of each operand, packed again."""
    return f(*(p & 0xFFFF for p in packed)) | f(*(p >> 16 & 0xFFFF for p in packed)) << 16
