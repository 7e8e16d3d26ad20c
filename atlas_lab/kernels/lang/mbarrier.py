"""mbarriers: barriers in shared memory that count arrivals and the bytes of asynchronous copies, phase after phase.

An mbarrier is one u64 of shared memory, 8-byte aligned: `full = L.dynamic_shared(L.u64, offset)`, then `(full, i)`
is the i-th. A phase is complete when `count` threads arrived and all expected bytes came; then the next begins with
the same count. Phases are numbered from 0, their parity is the number's last bit: waiting for parity 1 of a fresh
mbarrier returns at once, which is how a producer finds every stage of a ring empty in its first round.

One thread initialises, then `fence_mbarrier_init`, then a barrier of the block (of the cluster, where other blocks
arrive). An arrival releases the thread's earlier accesses, a wait acquires those of all that arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.memory import SHARED
from atlas_lab.kernels.lang.op import SM90, Effect, Op, Operand, Ptr, Result
from atlas_lab.kernels.lang.types import Pointer, u32

CLUSTER = Ptr(("cluster",))
_MBARRIER = "9.7.13.15 mbarrier"


def _op(name: str, operands: tuple[Operand, ...], ptx: str, numpy: Callable[..., Any], result: Result = None) -> Op:
    return Op(
        name, operands, result, ptx=ptx, numpy=numpy, effect=Effect.SYNC, needs=SM90, section=f"{_MBARRIER}: {name}"
    )


def _init(p: Pointer, i: int, count: int) -> None:
    """Make an mbarrier whose every phase takes `count` arrivals, 1 to 2**20 - 1."""
    current().mbarrier_init(p, int(i), int(count))


def _inval(p: Pointer, i: int) -> None:
    """The mbarrier is over: its bytes are ordinary shared memory again."""
    current().mbarrier_inval(p, int(i))


def _arrive(p: Pointer, i: int) -> None:
    """Arrive once, after this thread's earlier accesses."""
    current().mbarrier_arrive(p, int(i), 0)


def _arrive_expect_tx(p: Pointer, i: int, count: int) -> None:
    """Expect `count` more bytes in this phase, then arrive."""
    current().mbarrier_arrive(p, int(i), int(count))


def _expect_tx(p: Pointer, i: int, count: int) -> None:
    """Expect `count` more bytes in this phase, without arriving."""
    current().mbarrier_expect_tx(p, int(i), int(count))


def _arrive_remote(p: Pointer, i: int) -> None:
    """Arrive at the mbarrier of another block of the cluster (a pointer from `mapa`); waited for at cluster scope."""
    current().mbarrier_arrive(p, int(i), 0)


def _arrive_remote_relaxed(p: Pointer, i: int) -> None:
    """As `mbarrier_arrive_remote`, and any wait will do, but only what this thread has read is in order: enough to hand
    back memory for the copy engine to write. What the thread wrote needs `mbarrier_arrive_remote`; the interpreter does
    not tell."""
    current().mbarrier_arrive(p, int(i), 0, relaxed=True)


def _try(p: Pointer, i: int, parity: int) -> int:
    """1 if the phase of this parity is complete, else 0, perhaps after a while. A thread that loops on it waits."""
    return int(current().mbarrier_try_wait(p, int(i), int(parity)))


def _wait(p: Pointer, i: int, parity: int) -> None:
    """Wait until the phase of this parity is complete."""
    current().mbarrier_wait(p, int(i), int(parity), "block")


def _wait_cluster(p: Pointer, i: int, parity: int) -> None:
    """Wait until the phase of this parity is complete; acquires from threads of the cluster's other blocks too."""
    current().mbarrier_wait(p, int(i), int(parity), "cluster")


def _fence_init() -> None:
    """This thread's mbarrier_init come before what the cluster and the copy engine do with those mbarriers."""
    current().fence_mbarrier_init()


def _loop(scope: str) -> str:
    attempt = f"mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1;"
    return f"{{ .reg .pred p; again: {attempt} @!p bra again; }}"


mbarrier_init = _op("mbarrier_init", (SHARED, u32), "mbarrier.init.shared::cta.b64 [$0], $1;", _init)
mbarrier_inval = _op("mbarrier_inval", (SHARED,), "mbarrier.inval.shared::cta.b64 [$0];", _inval)
mbarrier_arrive = _op("mbarrier_arrive", (SHARED,), "mbarrier.arrive.shared::cta.b64 _, [$0];", _arrive)
mbarrier_arrive_expect_tx = _op(
    "mbarrier_arrive_expect_tx",
    (SHARED, u32),
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    _arrive_expect_tx,
)
mbarrier_expect_tx = _op(
    "mbarrier_expect_tx", (SHARED, u32), "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", _expect_tx
)
mbarrier_arrive_remote = _op(
    "mbarrier_arrive_remote", (CLUSTER,), "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", _arrive_remote
)
mbarrier_arrive_remote_relaxed = _op(
    "mbarrier_arrive_remote_relaxed",
    (CLUSTER,),
    "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [$0];",
    _arrive_remote_relaxed,
)
mbarrier_try_wait = _op(
    "mbarrier_try_wait",
    (SHARED, u32),
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    _try,
    u32,
)
mbarrier_wait = _op("mbarrier_wait", (SHARED, u32), _loop(""), _wait)
mbarrier_wait_cluster = _op("mbarrier_wait_cluster", (SHARED, u32), _loop(".acquire.cluster"), _wait_cluster)
fence_mbarrier_init = _op("fence_mbarrier_init", (), "fence.mbarrier_init.release.cluster;", _fence_init)
