"""Named barriers, memory fences, sleep. `cuda.syncthreads()` is barrier 0 of the whole block."""

from __future__ import annotations

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import Effect, Op
from atlas_lab.kernels.lang.types import i32, u32

_BAR, _MEMBAR = "9.7.13 bar", "9.7.13 membar"


def _sync(ident: int, count: int) -> None:
    """`count` threads (a multiple of 32) meet at barrier `ident` (1 to 15); a warp's threads come together."""
    current().barrier(int(ident), int(count))


def _arrive(ident: int, count: int) -> None:
    """Count towards barrier `ident` without waiting there."""
    current().arrive(int(ident), int(count))


def _fence_block() -> None:
    """This thread's earlier accesses are seen by the block before its later ones."""
    current().fence("block")


def _fence_gpu() -> None:
    """This thread's earlier accesses are seen by the device before its later ones."""
    current().fence("gpu")


def _sleep(ns: int) -> None:
    """Suspend the thread for about `ns` nanoseconds, 2 * ns at most."""
    current().yield_("nanosleep")


barrier_sync = Op(
    "barrier_sync",
    (i32, i32),
    None,
    ptx="bar.sync $0, $1;",
    numpy=_sync,
    effect=Effect.SYNC,
    section=_BAR,
    convergent=True,
)
barrier_arrive = Op(
    "barrier_arrive",
    (i32, i32),
    None,
    ptx="bar.arrive $0, $1;",
    numpy=_arrive,
    effect=Effect.SYNC,
    section=_BAR,
    convergent=True,
)
fence_block = Op("fence_block", (), None, ptx="membar.cta;", numpy=_fence_block, effect=Effect.SYNC, section=_MEMBAR)
fence_gpu = Op("fence_gpu", (), None, ptx="membar.gl;", numpy=_fence_gpu, effect=Effect.SYNC, section=_MEMBAR)
nanosleep = Op(
    "nanosleep", (u32,), None, ptx="nanosleep.u32 $0;", numpy=_sleep, effect=Effect.SYNC, section="9.7.19 nanosleep"
)
