"""How a thread uses the copy engine: bulk copies and tensor copies, issued and waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_lab.kernels.lang.types import READ_ONLY, Pointer
from atlas_lab.simt.errors import AsyncError, Coordinates, ReadOnlyWrite, Unfenced
from atlas_lab.simt.mbarrier import CopyAccess, Incoming, Mbarrier, StoreAccess
from atlas_lab.simt.proxies import check_proxy
from atlas_lab.simt.shadow import check_gaps
from atlas_lab.simt.stores import Groups, Store
from atlas_lab.simt.synchronising import Synchronising
from atlas_lab.simt.tiles import CHUNK, Box, Line, MapPointer, pieces, places, runs

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.memory import Memory

TILE_ALIGN = 128


class Asynchronous(Synchronising):
    """A thread that issues copies."""

    __slots__ = ("_groups",)

    def __init__(self, block: Block, tid: int, index: Coordinates) -> None:
        super().__init__(block, tid, index)
        self._groups: Groups | None = None

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
        place = self.locate(dst, i, box.size, TILE_ALIGN, "tensor copy to")
        self._copy_in(dst.buffer, place, box, p.buffer, p.map.swizzle, bar, k, mask)

    def store_async(self, dst: Pointer, i: int, values: Sequence[Any], bar: Pointer, k: int) -> None:
        self._step()
        m: Memory = dst.buffer
        at, b = self.locate(dst, i, CHUNK, CHUNK, "asynchronous store to"), self.mbarrier(bar, k)
        if not b.block.holds(m):
            text = f"an asynchronous store to {m} that completes at {b} of another block, expected one of the same"
            raise self.error(AsyncError, text, memory=m)
        write = StoreAccess(self, b.agent, self.site())
        if m.shadow is not None:
            m.shadow.write(self, at, CHUNK, write)
        bits = np.array(values, np.float32).tobytes()

        def land() -> None:
            m.bytes[at : at + CHUNK] = bits

        b.bring(self, Incoming(m, CHUNK, land, [write]))

    def bulk_store(self, dst: Pointer, i: int, src: Pointer, j: int, size: int) -> None:
        self._check_size(size)
        target: Memory = dst.buffer
        line = Line(target, self.locate(dst, i, size, CHUNK, "bulk copy to"), size)
        self._copy_out(dst, line, src.buffer, self.locate(src, j, size, CHUNK, "bulk copy from"), 0)

    def tma_store(self, target: Pointer, at: Sequence[int], src: Pointer, i: int) -> None:
        p, box = self._box(target, at)
        place = self.locate(src, i, box.size, TILE_ALIGN, "tensor copy from")
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
        inner = at[-1] * p.dtype.bytes
        if inner % CHUNK:  # an illegal instruction on a card
            text = f"a tensor copy of {p.map.view} from byte {inner} of its rows on, expected a multiple of {CHUNK}"
            raise self.error(AsyncError, text, memory=p.buffer)
        return p, Box(p, at)

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
        b = self.mbarrier(bar, k)
        chunks = places(at, box.size, swizzle)
        if mask is None:
            targets = [(own, b)]
        else:
            targets = [(m, self.mbarrier(bar_at, k)) for m, bar_at in self._receivers(own, bar, mask)]
        for m, counter in targets:
            if not counter.fenced:
                text = f"the copy engine uses {counter}, but {self.unfenced(counter)}"
                raise self.error(Unfenced, text, memory=counter.memory)
            accesses = self._pend(m, at, box, source, counter)
            counter.bring(self, Incoming(m, box.size, _landing(m, chunks, box), accesses))

    def _receivers(self, own: Memory, bar: Pointer, mask: int) -> list[tuple[Memory, Pointer]]:
        blocks = self.block.cluster.blocks
        if not 0 < mask < 1 << len(blocks):
            text = f"a copy to the blocks of mask {mask:#06b}, expected some of the cluster's {len(blocks)}"
            raise self.error(AsyncError, text, memory=own)
        ranks = [r for r in range(len(blocks)) if mask >> r & 1]
        return [(self.counterpart(own, r), self.mapa(bar, r)) for r in ranks]

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
        if target.mode in READ_ONLY:
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

    def finish_stores(self) -> None:
        """The thread exits."""
        if self._groups is not None:
            self._groups.exit()


def _landing(m: Memory, chunks: np.ndarray, box: Box | Line) -> Callable[[], None]:
    def land() -> None:
        np.frombuffer(m.bytes, np.uint8).reshape(-1, CHUNK)[chunks >> 4] = box.gather().reshape(-1, CHUNK)

    return land
