"""Integer arithmetic: the types Numba infers, and that its values are Python's after the masking cast.

The interpreter computes with Python's integers and masks at casts and stores. This table is why that is right, and
where it is not: a u64 of 2**63 or more with a signed integer in `//`, `%` and comparisons; and what the upper half of
`~x` and `-x` holds for a 32-bit x.
"""

from __future__ import annotations

import operator

import pytest

from atlas_lab.kernels import lang as L

pytestmark = pytest.mark.usefixtures("compiler")

TYPES = [L.i32, L.u32, L.i64, L.u64]
PAIRS = [(a, b) for a in TYPES for b in TYPES]
MODULAR = ["add", "sub", "mul", "and_", "or_", "xor"]
DIVIDING = ["floordiv", "mod"]
SHIFTS = ["lshift", "rshift"]
COMPARISONS = ["lt", "eq"]
VALUES = {
    "i32": [0, 1, -1, 7, -8, 2**31 - 1, -(2**31), 123456789],
    "u32": [0, 1, 7, 2**31, 2**32 - 1, 3000000000],
    "i64": [0, 1, -1, 12, -13, 2**63 - 1, -(2**63), 2**40 + 3, -(2**33)],
    "u64": [0, 1, 12, 2**32, 2**63 - 1, 2**63, 2**64 - 1],
}


def named(a: L.Scalar, b: L.Scalar, op: str) -> L.Scalar:
    """The type of an operation's result: 64 bits, unsigned only if both are; a shift's follows its left operand."""
    unsigned = not a.signed and (op in SHIFTS or not b.signed)
    return L.u64 if unsigned else L.i64


def numba_type(context: str, op: str, *types: L.Scalar):
    from numba.cuda.descriptor import cuda_target

    from atlas_lab.kernels.lang.lower import numba_type as of

    cuda_target.typing_context.refresh()
    return cuda_target.typing_context.resolve_function_type(getattr(operator, op), tuple(map(of, types)), {})


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_types_in_cuda(a, b):
    for op in MODULAR + DIVIDING + SHIFTS:
        assert str(numba_type("cuda", op, a, b).return_type) == named(a, b, op).numba, op
    mixed = (a, b) in {(L.u64, L.i32), (L.u64, L.i64), (L.i32, L.u64), (L.i64, L.u64)}
    for op in COMPARISONS:
        arguments = set(map(str, numba_type("cuda", op, a, b).args))
        assert (arguments == {"float64"}) is mixed, op
    assert str(numba_type("cuda", "truediv", a, b).return_type) == "float64"


@pytest.mark.parametrize("a", TYPES, ids=str)
def test_types_of_unary_operations(a):
    for op in ("invert", "neg"):
        assert str(numba_type("cuda", op, a).return_type) == ("int64" if a.signed else "uint64")


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_values(a, b):
    """Numba's CPU target has the same typing and the same lowering of integers, and runs here."""
    import numba

    @numba.njit
    def compute(x, y, s):
        return (
            (x + y, x - y, x * y, x & y, x | y, x ^ y),
            (x << s, x >> s, ~x, -x),
            (x < y, x == y),
        )

    @numba.njit(error_model="numpy")
    def divide(x, y):
        return x // y, x % y

    to_numba_a, to_numba_b = getattr(numba, a.numba), getattr(numba, b.numba)

    @numba.njit
    def typed(x, y, s, divisor):
        return compute(to_numba_a(x), to_numba_b(y), s), divide(to_numba_a(x), to_numba_b(divisor))

    one, two = (numba.uint64 if t is L.u64 else numba.int64 for t in (a, b))
    run = numba.njit((one, two, numba.int64, two))(typed.py_func)
    results = {op: named(a, b, op) for op in MODULAR + DIVIDING + SHIFTS}
    for x in VALUES[a.name]:
        for y in VALUES[b.name]:
            big = max(x, y) >= 2**63
            mixed = a.signed != b.signed
            divisor = y | 1
            for s in (0, 1, 5, 31, 32, 63):
                (modular, shifted, compared), divided = run(x, y, s, divisor)
                for op, found in zip(MODULAR, modular, strict=True):
                    expected = results[op](getattr(operator, op)(x, y))
                    assert results[op](found) == expected, (op, x, y)
                    for narrow in (L.u32, L.i32):  # what a cast of the result gives
                        assert narrow(found) == narrow(getattr(operator, op)(x, y))
                left, right, inverted, negated = shifted
                assert results["lshift"](left) == results["lshift"](x << s)
                assert results["rshift"](right) == x >> s
                # at the operand's width; an unsigned result is then zero-extended
                assert (a(inverted), a(negated)) == (a(~x), a(-x))
                assert a.signed or max(inverted, negated) <= a.mask
            if not (mixed and big):
                assert compared == (x < y, x == y)
                if (x, divisor) != (-(2**63), -1):  # the quotient has no int64
                    assert divided == (x // divisor, x % divisor)


def test_comparing_u64_with_signed_is_refused_when_checked():
    @L.kernel
    def mixed(y: L.Out[L.u32], a: L.u64, b: L.i32):
        if a < b:
            L.stg_b32(y, 0, 1)

    @L.kernel
    def divided(y: L.Out[L.f32], a: L.i32):
        L.stg_f32(y, 0, a / 3)

    @L.kernel
    def cast(y: L.Out[L.u32], a: L.u64, b: L.i32):
        if L.i64(a) < b:
            L.stg_b32(y, 0, a + b)

    assert any("64-bit floating point" in p for p in L.check_kernel(mixed, "sm_80"))
    assert any("64-bit floating point" in p for p in L.check_kernel(divided, "sm_80"))
    assert L.check_kernel(cast, "sm_80") == ()


def test_unsigned_subtraction_needs_a_cast_before_it_is_compared():
    """Compiled, u32 - u32 is a u64 and never below zero; interpreted it is a Python integer."""
    assert L.u32(1) - L.u32(2) < 0
    assert str(numba_type("cuda", "sub", L.u32, L.u32).return_type) == "uint64"
    assert L.u32(L.u32(1) - L.u32(2)) == L.u64(L.u32(1) - L.u32(2)) & 0xFFFFFFFF == 0xFFFFFFFF
