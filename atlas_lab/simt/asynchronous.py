"""The part of a thread that Hopper's asynchronous machinery asks for: mbarriers, the copy engine, clusters, fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas_lab.kernels.lang.types import Pointer
from atlas_lab.simt.accesses import Accesses
from atlas_lab.simt.cluster import ClusterWait
from atlas_lab.simt.errors import (
    AsyncError,
    BarrierMismatch,
    Coordinates,
    MbarrierError,
    Misaligned,
    Race,
    ReadOnlyWrite,
    Unfenced,
)
from atlas_lab.simt.mbarrier import COUNT_LIMIT, CopyAccess, Incoming, Mbarrier, PhaseWait
from atlas_lab.simt.proxies import check_proxy
from atlas_lab.simt.shadow import check_gaps, ordered
from atlas_lab.simt.stores import Groups, Store
from atlas_lab.simt.tiles import CHUNK, PERIOD, Box, Line, MapPointer, pieces, places, runs

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.scheduler import Wait

TILE_ALIGN = 128


class Asynchronous(Accesses):
    """`done`: it exited."""

    __slots__ = ("_groups", "_initialised", "_met", "done")

    def __init__(self, block: Block, tid: int, index: Coordinates) -> None:
        super().__init__(block, tid, index)
        self.done = False
        self._initialised: list[Mbarrier] = []
        self._groups: Groups | None = None
        self._met: int | None = None  # the generation of the cluster's barrier that it arrived in

    def block_on(self, wait: Wait) -> None:
        """Wait until `wait` is ready."""
        raise NotImplementedError

    # Fences

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
        self._initialised.clear()

    # mbarriers

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
        b = self._mbarrier(p, index)
        b.finish(self, "the mbarrier is invalidated")
        b.init.pending = b.init.mbarrier = False
        b.init.thread, b.init.clock = self, self.vc[self.tid]
        del b.memory.mbarriers[b.at]

    def _mbarrier(self, p: Pointer, index: int) -> Mbarrier:
        """The mbarrier at an address, which this thread knows to be initialised."""
        m: Memory = p.buffer
        at = self.locate(p, index, 8, 8, "mbarrier at")
        b = m.mbarriers.get(at)
        if b is None:
            text = f"found no mbarrier at bytes [{at}, {at + 8}) of {m}, expected one that mbarrier_init made"
            raise self.error(MbarrierError, text, memory=m)
        if not ordered(b.init, self):
            text = f"this use of {b} races with its mbarrier_init by {b.init.spell(self)}"
            raise self.error(Race, text, memory=m)
        if b.block is not self.block and b.fenced != "cluster":
            raise self.error(Unfenced, f"{b} is used by another block, but {self._unfenced(b)}", memory=m)
        return b

    def _unfenced(self, b: Mbarrier) -> str:
        return f"{b.init.spell(self)} initialised it without fence_mbarrier_init after it"

    def mbarrier_arrive(self, p: Pointer, index: int, expected: int) -> None:
        self._mbarrier(p, index).arrive(self, expected)

    def mbarrier_expect_tx(self, p: Pointer, index: int, expected: int) -> None:
        self._mbarrier(p, index).expect(self, expected)

    def mbarrier_try_wait(self, p: Pointer, index: int, parity: int) -> bool:
        b = self._mbarrier(p, index)
        self.yield_(f"mbarrier_try_wait for parity {parity} of {b}, whose phase {b.phase} lacks {b.missing()},")
        done = b.done(self._parity(b, parity))
        if done:
            b.acquire(self, "block")
        return done

    def mbarrier_wait(self, p: Pointer, index: int, parity: int, scope: str) -> None:
        self._step()
        b = self._mbarrier(p, index)
        if not b.done(self._parity(b, parity)):
            self.block_on(PhaseWait(b, self.site()))
        b.acquire(self, scope)

    def _parity(self, b: Mbarrier, parity: int) -> int:
        if parity not in (0, 1):
            raise self.error(MbarrierError, f"{b}: found parity {parity}, expected 0 or 1", memory=b.memory)
        return parity

    # The copy engine

    def bulk_load(
        self, dst: Pointer, i: int, src: Pointer, j: int, size: int, bar: Pointer, k: int, mask: int | None
    ) -> None:
        self._check_size(size)
        source: Memory = src.buffer
        line = Line(source, self.locate(src, j, size, CHUNK, "bulk copy from"), size)
        at = self.locate(dst, i, size, CHUNK, "bulk copy to")
        self._copy_in(dst.buffer, at, line, source, 0, bar, k, mask)

    def tma_load(
        self, dst: Pointer, i: int, source: Pointer, at: Sequence[int], bar: Pointer, k: int, mask: int | None
    ) -> None:
        p, box = self._box(source, at)
        place = self._tile_at(dst, i, box.size, p.map.swizzle, "tensor copy to")
        self._copy_in(dst.buffer, place, box, p.buffer, p.map.swizzle, bar, k, mask)

    def bulk_store(self, dst: Pointer, i: int, src: Pointer, j: int, size: int) -> None:
        self._check_size(size)
        target: Memory = dst.buffer
        line = Line(target, self.locate(dst, i, size, CHUNK, "bulk copy to"), size)
        self._copy_out(dst, line, src.buffer, self.locate(src, j, size, CHUNK, "bulk copy from"), 0)

    def tma_store(self, target: Pointer, at: Sequence[int], src: Pointer, i: int) -> None:
        p, box = self._box(target, at)
        place = self._tile_at(src, i, box.size, p.map.swizzle, "tensor copy from")
        self._copy_out(p, box, src.buffer, place, p.map.swizzle)

    def tma_prefetch(self, m: Pointer) -> None:
        self._step()

    def bulk_commit(self) -> None:
        self._step()
        self._grouping().commit()

    def bulk_wait(self, pending: int, read: bool) -> None:
        self._step()
        if pending < 0:
            raise self.error(AsyncError, f"found {pending} bulk groups to leave pending, expected 0 or more")
        self._grouping().wait(pending, read)

    def _grouping(self) -> Groups:
        if self._groups is None:
            self._groups = Groups(self)
        return self._groups

    def _check_size(self, size: int) -> None:
        self._step()
        if size <= 0 or size % CHUNK:
            raise self.error(AsyncError, f"a bulk copy of {size} bytes, expected a positive multiple of {CHUNK}")

    def _box(self, p: Pointer, at: Sequence[int]) -> tuple[MapPointer, Box]:
        self._step()
        if not isinstance(p, MapPointer):
            raise self.error(AsyncError, f"a tensor copy through {p}, expected a parameter such as InMap[bf16]")
        if len(at) != len(p.map.box):
            raise self.error(
                AsyncError,
                f"a tensor copy with {len(at)} coordinates of {p.map.view}, expected {len(p.map.box)}",
                memory=p.buffer,
            )
        return p, Box(p, at)

    def _tile_at(self, p: Pointer, index: int, size: int, swizzle: int, doing: str) -> int:
        """The place of a box in shared memory, whose base must be aligned so that the swizzle is known."""
        m: Memory = p.buffer
        at = self.locate(p, index, size, TILE_ALIGN, doing)
        if m.align < PERIOD[swizzle]:
            raise self.error(
                Misaligned,
                f"{doing} {m}, which is aligned to {m.align}, expected {PERIOD[swizzle]} for a swizzle of {swizzle} "
                "bytes: use dynamic_shared",
                memory=m,
            )
        return at

    def _copy_in(
        self,
        own: Memory,
        at: int,
        box: Box | Line,
        source: Memory,
        swizzle: int,
        bar: Pointer,
        k: int,
        mask: int | None,
    ) -> None:
        """Issue a load: poison the destination in every block that receives it, and bring the bytes to its mbarrier."""
        b = self._mbarrier(bar, k)
        chunks = places(at, box.size, swizzle)
        if mask is None:
            targets = [(own, b)]
        else:
            targets = [(m, self._mbarrier(bar_at, k)) for m, bar_at in self._receivers(own, bar, mask)]
        for m, counter in targets:
            if not counter.fenced:
                text = f"the copy engine uses {counter}, but {self._unfenced(counter)}"
                raise self.error(Unfenced, text, memory=counter.memory)
            accesses = self._pend(m, at, box, source, counter)
            counter.bring(self, Incoming(m, box.size, _landing(m, chunks, box), accesses))

    def _receivers(self, own: Memory, bar: Pointer, mask: int) -> list[tuple[Memory, Pointer]]:
        blocks = self.block.cluster.blocks
        if not 0 < mask < 1 << len(blocks):
            text = f"a copy to the blocks of mask {mask:#06b}, expected some of the cluster's {len(blocks)}"
            raise self.error(AsyncError, text, memory=own)
        ranks = [r for r in range(len(blocks)) if mask >> r & 1]
        return [(self._counterpart(own, r), self.mapa(bar, r)) for r in ranks]

    def _pend(self, m: Memory, at: int, box: Box | Line, source: Memory, counter: Mbarrier) -> list[CopyAccess]:
        site = self.site()
        write = CopyAccess(self, counter.agent, site)
        if m.shadow is not None:
            check_proxy(self, m, at, box.size, "copy engine overwrites")
            m.shadow.write(self, at, box.size, write)
        if not source.watched:
            return [write]
        read = CopyAccess(self, counter.agent, site)
        for start, size in box.spans:
            check_gaps(self, source, start, size)
            check_proxy(self, source, start, size)
            if source.shadow is not None:
                for piece, width in pieces(start, size):
                    source.shadow.read(self, piece, width, read)
        return [write, read]

    def _copy_out(self, target: Pointer, box: Box | Line, source: Memory, at: int, swizzle: int) -> None:
        """Issue a store: its source may not be written, nor its destination used, until it is waited for."""
        memory: Memory = target.buffer
        if target.mode == "in":
            raise self.error(ReadOnlyWrite, f"bulk store through a pointer declared In to {memory}", memory=memory)
        chunks = places(at, box.size, swizzle)
        site = self.site()
        read, write = CopyAccess(self, self, site), CopyAccess(self, self, site)
        if source.shadow is not None:
            for start, size in runs(chunks if box.whole else chunks[box.used()]):
                check_proxy(self, source, start, size)
                source.shadow.read(self, start, size, read)
        if memory.shadow is not None:
            for span in box.spans:
                check_proxy(self, memory, *span, "copy engine overwrites")
                for piece, width in pieces(*span):
                    memory.shadow.write(self, piece, width, write)
        self.scheduler.progress += 1
        self._grouping().add(Store(source, chunks, memory, box, read, write))

    # Clusters

    @property
    def cluster_rank(self) -> int:
        return self.block.rank

    @property
    def cluster_size(self) -> int:
        return len(self.block.cluster.blocks)

    def cluster_arrive(self, release: bool) -> None:
        self._step()
        self._met = self.block.cluster.arrive(self, release)

    def cluster_wait(self) -> None:
        self._step()
        cluster = self.block.cluster
        if self._met is None:
            raise self.error(
                BarrierMismatch, "cluster_wait of a thread that has not arrived, expected cluster_arrive before"
            )
        if cluster.generation == self._met:
            self.block_on(ClusterWait(cluster, self._met))
        self._met = None
        if cluster.known:
            self.block.clocks.acquire(self.tid, cluster.known)

    def mapa(self, p: Pointer, rank: int) -> Pointer:
        return Pointer(self._counterpart(p.buffer, rank), p.offset, p.dtype, "cluster", p.mode)

    def _counterpart(self, m: Memory, rank: int) -> Memory:
        blocks = self.block.cluster.blocks
        if not 0 <= rank < len(blocks):
            text = f"found rank {rank} of a cluster, expected 0 to {len(blocks) - 1}"
            raise self.error(AsyncError, text, memory=m)
        block = blocks[rank]
        if not block.live:
            raise self.error(AsyncError, f"{m} of block {block.index}, whose threads have all exited", memory=m)
        return block.counterpart(m, self.block)

    def finish_stores(self) -> None:
        """The thread exits."""
        if self._groups is not None:
            self._groups.exit()


def _landing(m: Memory, chunks: np.ndarray, box: Box | Line) -> Callable[[], None]:
    def land() -> None:
        np.frombuffer(m.bytes, np.uint8).reshape(-1, CHUNK)[chunks >> 4] = box.gather().reshape(-1, CHUNK)

    return land
