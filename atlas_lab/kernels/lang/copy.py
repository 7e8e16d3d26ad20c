"""Asynchronous copies from global to shared memory (cp.async), in groups."""

from __future__ import annotations

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.op import Const, Effect, Needs, Op, Ptr
from atlas_lab.kernels.lang.types import Pointer, i32

_SM80 = Needs((8, 0))
_CP = "9.7.9.25 cp.async"


def _cp_async(size: int, name: str = "", hint: str = "") -> Op:
    def run(dst: Pointer, di: int, src: Pointer, si: int, valid: int) -> None:
        current().copy_async(dst, int(di), src, int(si), size, int(valid))

    run.__doc__ = (
        f"Copy {size} bytes, of which the first `valid` (0 to {size}) are read and the rest become zero. Done when "
        "this thread has waited for the group that it commits it to."
    )
    cache = "cg" if size == 16 else "ca"
    return Op(
        name or f"cp_async_{size}",
        (SHARED, Ptr(), i32),
        None,
        numpy=run,
        effect=Effect.WRITE,
        needs=_SM80,
        section=_CP,
        ptx=f"cp.async.{cache}.shared.global{hint} [$0], [$1], {size}, $2;",
    )


cp_async_4, cp_async_8, cp_async_16 = map(_cp_async, (4, 8, 16))
# The L2 fetches the 256 bytes around: for streams whose neighbours come next.
cp_async_16_stream = _cp_async(16, "cp_async_16_stream", ".L2::256B")


def _commit() -> None:
    """Close the group of this thread's copies so far."""
    current().commit_async()


def _wait(n: int) -> None:
    """Wait until all but the newest `n` groups of this thread are complete; a barrier then shows them to others."""
    current().wait_async(n)


cp_async_commit = Op(
    "cp_async_commit",
    (),
    None,
    ptx="cp.async.commit_group;",
    numpy=_commit,
    effect=Effect.SYNC,
    needs=_SM80,
    section=_CP,
)
cp_async_wait = Op(
    "cp_async_wait",
    (Const("n"),),
    None,
    ptx="cp.async.wait_group {n};",
    numpy=_wait,
    effect=Effect.SYNC,
    needs=_SM80,
    section=_CP,
)
