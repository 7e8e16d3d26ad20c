"""How a thread meets others beyond barriers of its block: mbarriers, clusters, and the fences that both need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas_lab.kernels.lang.types import Pointer
from atlas_lab.simt.accesses import Accesses
from atlas_lab.simt.cluster import ClusterWait
from atlas_lab.simt.errors import AsyncError, BarrierMismatch, Coordinates, MbarrierError, Race, Unfenced
from atlas_lab.simt.mbarrier import COUNT_LIMIT, Mbarrier, PhaseWait
from atlas_lab.simt.shadow import ordered

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.scheduler import Wait


class Synchronising(Accesses):
    """`done`: it exited."""

    __slots__ = ("_fenced_inits", "_initialised", "_met", "_passed", "done")

    def __init__(self, block: Block, tid: int, index: Coordinates) -> None:
        super().__init__(block, tid, index)
        self.done = False
        self._initialised: list[Mbarrier] = []  # and not fenced for the cluster
        self._fenced_inits: list[Mbarrier] = []  # and no arrival at the cluster's barrier since
        self._met: int | None = None  # the generation of the cluster's barrier that it arrived in
        self._passed = -1  # the last one that it waited for

    def block_on(self, wait: Wait) -> None:
        """Wait until `wait` is ready."""
        raise NotImplementedError

    def fence_proxy(self, spaces: tuple[str, ...]) -> None:
        self._step()
        for space in spaces:
            fences = self.proxy_fences if space == "shared" else self.proxy_fences_global
            fences.append(self.vc[self.tid])
        self.block.clocks.advance([self.tid])
        for b in self._initialised:
            b.fenced = b.fenced or "engine"

    def fence_mbarrier_init(self) -> None:
        self._step()
        for b in self._initialised:
            b.fenced = "cluster"
        self._fenced_inits += self._initialised
        self._initialised.clear()

    def mbarrier_init(self, p: Pointer, index: int, count: int) -> None:
        m: Memory = p.buffer
        at = self.locate(p, index, 8, 8, "mbarrier_init of")
        if not 1 <= count <= COUNT_LIMIT:
            text = (
                f"mbarrier_init of bytes [{at}, {at + 8}) of {m}: found a count of {count}, expected 1 to {COUNT_LIMIT}"
            )
            raise self.error(MbarrierError, text, memory=m)
        if at in m.mbarriers:
            text = f"{m.mbarriers[at]} is initialised again, expected mbarrier_inval before"
            raise self.error(MbarrierError, text, memory=m)
        access = self.access(False, fresh=True)
        if m.shadow is not None:
            m.shadow.write(self, at, 8, access)
            access.pending = access.mbarrier = True
        b = m.mbarriers[at] = Mbarrier(self.block, m, at, count, access)
        self._initialised.append(b)

    def mbarrier_inval(self, p: Pointer, index: int) -> None:
        b = self.mbarrier(p, index)
        b.finish(self, "the mbarrier is invalidated")
        b.init.pending = b.init.mbarrier = False
        b.init.thread, b.init.clock = self, self.vc[self.tid]
        del b.memory.mbarriers[b.at]

    def mbarrier(self, p: Pointer, index: int) -> Mbarrier:
        """The mbarrier at an address, which this thread knows to be initialised."""
        m: Memory = p.buffer
        at = self.locate(p, index, 8, 8, "mbarrier at")
        b = m.mbarriers.get(at)
        if b is None:
            text = f"found no mbarrier at bytes [{at}, {at + 8}) of {m}, expected one that mbarrier_init made"
            raise self.error(MbarrierError, text, memory=m)
        # such a fence orders the initialisation before even an arrival that releases nothing
        told = b.announced is not None and b.announced <= self._passed and b.block.cluster is self.block.cluster
        if not told and not ordered(b.init, self):
            text = f"this use of {b} races with its mbarrier_init by {b.init.spell(self)}"
            raise self.error(Race, text, memory=m)
        if b.block is not self.block and b.fenced != "cluster":
            raise self.error(Unfenced, f"{b} is used by another block, but {self.unfenced(b)}", memory=m)
        return b

    def unfenced(self, b: Mbarrier) -> str:
        """That nothing made an mbarrier visible, for sentences."""
        return f"{b.init.spell(self)} initialised it without fence_mbarrier_init after it"

    def mbarrier_arrive(self, p: Pointer, index: int, expected: int, relaxed: bool = False) -> None:
        self._step()
        self.mbarrier(p, index).arrive(self, expected, relaxed)

    def mbarrier_expect_tx(self, p: Pointer, index: int, expected: int) -> None:
        self._step()
        self.mbarrier(p, index).expect(self, expected)

    def mbarrier_try_wait(self, p: Pointer, index: int, parity: int) -> bool:
        b = self.mbarrier(p, index)
        self.yield_(f"mbarrier_try_wait for parity {parity} of {b}, whose phase {b.phase} lacks {b.missing()},")
        done = b.done(self._parity(b, parity))
        if done:
            b.acquire(self, "block")
        return done

    def mbarrier_wait(self, p: Pointer, index: int, parity: int, scope: str) -> None:
        self._step()
        b = self.mbarrier(p, index)
        if not b.done(self._parity(b, parity)):
            self.block_on(PhaseWait(b, self.site()))
        b.acquire(self, scope)

    def _parity(self, b: Mbarrier, parity: int) -> int:
        if parity not in (0, 1):
            raise self.error(MbarrierError, f"{b}: found parity {parity}, expected 0 or 1", memory=b.memory)
        return parity

    @property
    def cluster_rank(self) -> int:
        return self.block.rank

    @property
    def cluster_size(self) -> int:
        return len(self.block.cluster.blocks)

    def cluster_arrive(self, release: bool) -> None:
        self._step()
        self._met = self.block.cluster.arrive(self, release)
        for b in self._fenced_inits:
            b.announced = self._met
        self._fenced_inits.clear()

    def cluster_wait(self) -> None:
        self._step()
        cluster = self.block.cluster
        if self._met is None:
            raise self.error(
                BarrierMismatch, "cluster_wait of a thread that has not arrived, expected cluster_arrive before"
            )
        if cluster.generation == self._met:
            self.block_on(ClusterWait(cluster, self._met))
        self._passed, self._met = self._met, None
        if cluster.known:
            self.block.clocks.acquire(self.tid, cluster.known)

    def mapa(self, p: Pointer, rank: int) -> Pointer:
        return Pointer(self.counterpart(p.buffer, rank), p.offset, p.dtype, "cluster", p.mode)

    def counterpart(self, m: Memory, rank: int) -> Memory:
        """Shared memory of the block of a rank for what `m` is here."""
        blocks = self.block.cluster.blocks
        if not 0 <= rank < len(blocks):
            text = f"found rank {rank} of a cluster, expected 0 to {len(blocks) - 1}"
            raise self.error(AsyncError, text, memory=m)
        block = blocks[rank]
        if not block.live:
            raise self.error(AsyncError, f"{m} of block {block.index}, whose threads have all exited", memory=m)
        return block.counterpart(m, self.block)
