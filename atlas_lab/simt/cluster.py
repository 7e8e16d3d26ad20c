"""A cluster: blocks that are resident together, and their barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas_lab.simt.clocks import Knowledge, merge
from atlas_lab.simt.errors import BarrierMismatch
from atlas_lab.simt.source import Site, spell

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.synchronising import Synchronising


class Cluster:
    """`blocks` by rank. The barrier's `generation` counts how often it opened."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)
        self.live = sum(b.live for b in blocks)
        self.generation = 0
        self._arrived: dict[Synchronising, Site | None] = {}
        self._passed: Knowledge | None = None
        self.known: Knowledge | None = None
        for rank, b in enumerate(self.blocks):
            b.cluster, b.rank = self, rank

    def arrive(self, thread: Synchronising, release: bool) -> int:
        """`thread` arrives; returns the generation it waits for."""
        if thread in self._arrived:
            raise thread.error(
                BarrierMismatch,
                f"this thread arrives twice at the cluster's barrier, first at {spell(self._arrived[thread])}, "
                "expected cluster_wait between",
            )
        generation = self.generation
        self._arrived[thread] = thread.site()
        if release:
            self._passed = merge(self._passed, thread.block.clocks.release(thread.tid))
        thread.scheduler.progress += 1
        self._open_if_complete()
        return generation

    def leave(self) -> None:
        """A thread exited: nobody waits for it."""
        self.live -= 1
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if self._arrived and sum(not t.done for t in self._arrived) >= self.live:
            self.known, self._passed = merge(self.known, self._passed), None
            self._arrived.clear()
            self.generation += 1

    def describe(self) -> str:
        site = next(iter(self._arrived.values()), None)
        return f"the cluster's barrier at {spell(site)} with {len(self._arrived)} of {self.live} there"


class ClusterWait:
    """A thread that waits for a generation of the cluster's barrier to end."""

    __slots__ = ("cluster", "generation")
    kind = "cluster"

    def __init__(self, cluster: Cluster, generation: int) -> None:
        self.cluster, self.generation = cluster, generation

    @property
    def key(self) -> int:
        return self.generation

    def ready(self) -> bool:
        return self.cluster.generation > self.generation

    def describe(self) -> str:
        return f"wait at {self.cluster.describe()}"
