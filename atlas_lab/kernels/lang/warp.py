"""Warp-wide operations; all 32 lanes take part. Reductions give every lane the same result, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atlas_lab.kernels.lang.bits import M32, Single, single
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import Needs, Op, Operand
from atlas_lab.kernels.lang.types import Scalar, f32, i32, u32

_SHFL, _VOTE = "9.7.9 shfl.sync", "9.7.13 vote.sync"
_ALL = 0xFFFFFFFF


def _lane() -> int:
    """This thread's lane, 0 to 31."""
    return current().lane


def _warp() -> int:
    """This thread's warp, threadIdx.x // 32: blocks of more than one dimension have no warp number."""
    return current().threadIdx.x >> 5


lane_id = Op("lane_id", (), i32, ptx=lambda e: e.special("laneid"), numpy=_lane, section="10.3 %laneid")
warp_id = Op(
    "warp_id",
    (),
    i32,
    numpy=_warp,
    section="10.1 %tid",
    ptx=lambda e: e.builder.lshr(e.special("tid.x"), e.const(5)),
)


def _shuffle(mode: str, source: Callable[[int, int], int], kind: Scalar) -> Op:
    name = f"shfl_{'xor' if mode == 'bfly' else mode}" + ("_f32" if kind is f32 else "")

    def combine(threads: Sequence[Any], args: Sequence[tuple[Any, int]]) -> list[Any]:
        return [args[source(lane, b & 31)][0] for lane, (_, b) in enumerate(args)]

    def run(value: Any, b: int) -> Any:
        value = single(value) if kind is f32 else int(value) & M32
        return current().warp_op(name, _ALL, (value, b), combine)

    operands: tuple[Operand, ...] = (kind, i32)
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;"
    return Op(name, operands, kind, ptx=text, numpy=run, section=_SHFL, convergent=True)


def _xor(lane: int, b: int) -> int:
    return lane ^ b


def _down(lane: int, b: int) -> int:
    return lane + b if lane + b < 32 else lane


def _idx(lane: int, b: int) -> int:
    return b


shfl_xor, shfl_xor_f32 = _shuffle("bfly", _xor, u32), _shuffle("bfly", _xor, f32)
shfl_down, shfl_down_f32 = _shuffle("down", _down, u32), _shuffle("down", _down, f32)
shfl_idx, shfl_idx_f32 = _shuffle("idx", _idx, u32), _shuffle("idx", _idx, f32)


def _vote(name: str, mode: str, decide: Callable[[Sequence[bool]], int]) -> Op:
    def run(predicate: Any) -> Any:
        return current().warp_op(name, _ALL, bool(predicate), lambda threads, args: [decide(args)] * 32)

    if mode == "ballot":
        ptx = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    else:
        ptx = f"{{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.{mode}.pred q, p, -1; selp.b32 $0, 1, 0, q; }}"
    return Op(name, (i32,), u32 if mode == "ballot" else i32, ptx=ptx, numpy=run, section=_VOTE, convergent=True)


ballot = _vote("ballot", "ballot", lambda votes: sum(1 << lane for lane, v in enumerate(votes) if v))
any_sync = _vote("any_sync", "any", lambda votes: int(any(votes)))
all_sync = _vote("all_sync", "all", lambda votes: int(all(votes)))


def _butterfly(threads: Sequence[Any], args: Sequence[Single], combine: Callable[..., np.ndarray]) -> list[Single]:
    # Lane i and lane i ^ 16 hold the same after the first step, and so on: half of the lanes are enough.
    v = np.array(args, np.float32)
    for n in (16, 8, 4, 2, 1):
        v = combine(v[:n], v[n : 2 * n])
    return [v[0]] * 32


def _warp_sum(x: Any) -> Single:
    """The sum over the warp, exchanged with lanes ^16, ^8, ^4, ^2, ^1 in turn: every lane gets the same bits."""
    total: Single = current().warp_op("warp_sum", _ALL, single(x), lambda t, a: _butterfly(t, a, np.add))
    return total


def _warp_max(x: Any) -> Single:
    """The maximum over the warp; a number rather than NaN."""
    top: Single = current().warp_op("warp_max", _ALL, single(x), lambda t, a: _butterfly(t, a, np.fmax))
    return top


def _warp_sum_i32(v: int) -> int:
    """The sum over the warp; wraps."""
    total: int = current().warp_op("warp_sum_i32", _ALL, i32(v), lambda t, a: [i32(sum(a))] * 32)
    return total


def _emit_butterfly(combine: str) -> Callable[..., Any]:
    def emit(e: Any, x: Any) -> Any:
        for n in (16, 8, 4, 2, 1):
            other = e.f32("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", x, e.const(n))
            x = e.f32(combine, x, other)
        return x

    return emit


warp_sum = Op(
    "warp_sum",
    (f32,),
    f32,
    ptx=_emit_butterfly("add.rn.f32 $0, $1, $2;"),
    numpy=_warp_sum,
    section=_SHFL,
    convergent=True,
)
warp_max = Op(
    "warp_max",
    (f32,),
    f32,
    ptx=_emit_butterfly("max.f32 $0, $1, $2;"),
    numpy=_warp_max,
    section=_SHFL,
    convergent=True,
)
warp_sum_i32 = Op(
    "warp_sum_i32",
    (i32,),
    i32,
    ptx="redux.sync.add.s32 $0, $1, -1;",
    numpy=_warp_sum_i32,
    section="9.7.13 redux.sync",
    needs=Needs((8, 0)),
    convergent=True,
)
