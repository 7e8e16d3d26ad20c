"""`unroll`: a `for` loop that is gone once compiled."""

from __future__ import annotations


class Unroll:
    """`for i in unroll(n)`: as `range`, but the compiler repeats the body, with `i` a compile-time integer each time.

    The counts are literals, globals, closure integers, or arithmetic on them. Inside, `i` may index a tuple without
    a branch and be a compile-time operand; a tuple grows by `t = t + (x,)`; `break` and `continue` work.
    """

    def __call__(self, *counts: int) -> range:
        return range(*counts)

    def __repr__(self) -> str:
        return "unroll"


unroll = Unroll()
