"""Clusters: blocks that run together, meet at a barrier of their own, and reach each other's shared memory.

`mapa(p, rank)` is the place of p in the shared memory of the block with that rank; no block may exit while others
still use its shared memory. An arrival at the cluster's barrier that releases is a fence of the whole memory, and a
wait there empties the SM's L1 cache; `st_async_v4_f32` needs neither.
"""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.bits import single
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.mbarrier import CLUSTER
from atlas_lab.kernels.lang.memory import load, store
from atlas_lab.kernels.lang.op import SM90, Effect, Op, Ptr, PtrTo, Vec
from atlas_lab.kernels.lang.types import Pointer, f32, u32

_BARRIER, _MAPA, _LD, _ST = "9.7.13.3 barrier.cluster", "9.7.9.24 mapa", "9.7.9 ld", "9.7.9 st"


def _rank() -> int:
    """This block's rank in its cluster, from 0, the first dimension fastest."""
    return current().cluster_rank


def _size() -> int:
    """Blocks of the cluster."""
    return current().cluster_size


def _arrive() -> None:
    """Arrive at the cluster's barrier, after this thread's earlier accesses; `cluster_wait` follows."""
    current().cluster_arrive(True)


def _arrive_relaxed() -> None:
    """Arrive at the cluster's barrier; orders no memory."""
    current().cluster_arrive(False)


def _store_async(p: Pointer, i: int, v: tuple[Any, Any, Any, Any], bar: Pointer, k: int) -> None:
    """Store four f32 in the shared memory of the block of two pointers from `mapa`: `(p, i, v, bar, k)`. Its k-th
    mbarrier there counts their 16 bytes; who waits for that phase sees them."""
    current().store_async(p, int(i), [single(x) for x in v], bar, int(k))


def _wait() -> None:
    """Wait until every thread of the cluster has arrived or exited; what they did before is visible."""
    current().cluster_wait()


def _mapa(p: Pointer, rank: int) -> Pointer:
    """The same place in the shared memory of the block with rank `rank`."""
    return current().mapa(p, int(rank))


cluster_rank, cluster_size = (
    Op(name, (), u32, ptx=f"mov.u32 $0, %{register};", numpy=run, needs=SM90, section=f"10.1 %{register}")
    for name, register, run in (
        ("cluster_rank", "cluster_ctarank", _rank),
        ("cluster_size", "cluster_nctarank", _size),
    )
)
cluster_arrive, cluster_arrive_relaxed, cluster_wait = (
    Op(
        name,
        (),
        None,
        ptx=f"barrier.cluster.{form};",
        numpy=run,
        effect=Effect.SYNC,
        needs=SM90,
        section=_BARRIER,
        convergent=True,
    )
    for name, form, run in (
        ("cluster_arrive", "arrive.release", _arrive),
        ("cluster_arrive_relaxed", "arrive.relaxed", _arrive_relaxed),
        ("cluster_wait", "wait.acquire", _wait),
    )
)
mapa = Op(
    "mapa",
    (Ptr(("shared",), indexed=False), u32),
    lambda to: PtrTo(to.dtype, "cluster", to.mode),
    ptx=lambda e, address, rank: e.u32("mapa.shared::cluster.u32 $0, $1, $2;", address, rank),
    numpy=_mapa,
    needs=SM90,
    section=_MAPA,
)
ld_cluster_b32, ld_cluster_f32, ld_cluster_v4_b32, ld_cluster_v4_f32 = (
    load(f"ld_cluster_{form}", form, "ld.shared::cluster", CLUSTER, Effect.READ, _LD, needs=SM90)
    for form in ("b32", "f32", "v4_b32", "v4_f32")
)
st_cluster_b32, st_cluster_f32, st_cluster_v4_b32, st_cluster_v4_f32 = (
    store(f"st_cluster_{form}", form, "st.shared::cluster", CLUSTER, _ST, needs=SM90)
    for form in ("b32", "f32", "v4_b32", "v4_f32")
)
st_async_v4_f32 = Op(
    "st_async_v4_f32",
    (CLUSTER, Vec(f32, 4), CLUSTER),
    None,
    ptx="st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
    numpy=_store_async,
    effect=Effect.WRITE,
    needs=SM90,
    section="9.7.9.12 st.async",
)
