"""Warpgroups: four warps, 128 threads from a multiple of 128; their registers, and one elected lane of a warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import SM90, Const, Effect, Op
from atlas_lab.kernels.lang.types import i32


def _group() -> int:
    """This thread's warpgroup, threadIdx.x // 128: blocks of more than one dimension have no warpgroup number."""
    return current().threadIdx.x >> 7


def _thread() -> int:
    """This thread's number in its warpgroup, 0 to 127."""
    return current().threadIdx.x & 127


warpgroup_id = Op(
    "warpgroup_id",
    (),
    i32,
    numpy=_group,
    section="10.1 %tid",
    ptx=lambda e: e.builder.lshr(e.special("tid.x"), e.const(7)),
)
warpgroup_thread = Op(
    "warpgroup_thread",
    (),
    i32,
    numpy=_thread,
    section="10.1 %tid",
    ptx=lambda e: e.builder.and_(e.special("tid.x"), e.const(127)),
)


def _elected(threads: Sequence[Any], args: Sequence[None]) -> list[int]:
    return [1] + [0] * 31


def _elect() -> int:
    """1 in one lane of the warp, 0 in the others. Which lane is the hardware's choice, the same for every call."""
    chosen: int = current().warp_op("elect_sync", 0xFFFFFFFF, None, _elected)
    return chosen


elect_sync = Op(
    "elect_sync",
    (),
    i32,
    ptx="{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
    numpy=_elect,
    effect=Effect.SYNC,
    needs=SM90,
    section="9.7.13 elect.sync",
    convergent=True,
)


def _registers(way: str) -> Op:
    def run(count: int) -> None:
        _check(count)
        current().set_max_registers(count, way)

    def emit(e: Any, count: int) -> None:
        _check(count)
        e.asm(f"setmaxnreg.{way}.sync.aligned.u32 {count};", [], [])

    def _check(count: int) -> None:
        if count % 8 or not 24 <= count <= 256:
            raise ValueError(f"setmaxnreg_{way}: found {count} registers, expected a multiple of 8 from 24 to 256")

    verb = "Give registers back, down to" if way == "dec" else "Wait for registers that others gave back, up to"
    run.__doc__ = (
        f"{verb} `count` a thread (known at compile time, a multiple of 8 from 24 to 256); the whole warpgroup. The "
        "kernel's launch bounds must name blocks an SM, or the compiler ignores it."
    )
    return Op(
        f"setmaxnreg_{way}",
        (Const("count"),),
        None,
        ptx=emit,
        numpy=run,
        effect=Effect.SYNC,
        needs=SM90,
        section="9.7.19.5 setmaxnreg",
        convergent=True,
    )


setmaxnreg_dec, setmaxnreg_inc = _registers("dec"), _registers("inc")
