"""Bulk stores: copies from shared to global memory, in groups of the thread that issued them.

A group reads its shared memory at the latest when the thread waits for its reads, and writes global memory when it
waits for the group, or when it exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from atlas_lab.simt.errors import AsyncError
from atlas_lab.simt.mbarrier import CopyAccess
from atlas_lab.simt.tiles import Box, Bytes, Line

if TYPE_CHECKING:
    from atlas_lab.simt.asynchronous import Asynchronous
    from atlas_lab.simt.memory import Memory


class Store:
    """One copy: the chunks of `source` at `places` become `box` of `target`. `reads` and `writes` are pending."""

    def __init__(
        self,
        source: Memory,
        places: npt.NDArray[np.int64],
        target: Memory,
        box: Box | Line,
        reads: CopyAccess,
        writes: CopyAccess,
    ) -> None:
        self.source, self.target, self.reads, self.writes = source, target, reads, writes
        self._index = places >> 4
        self._box = box
        self._data: Bytes | None = None
        self._landed = False
        self.read = False

    def take(self) -> None:
        """Read shared memory."""
        if self._data is None:
            chunks = np.frombuffer(self.source.bytes, np.uint8).reshape(-1, 16)
            self._data = chunks[self._index].reshape(-1)

    def land(self) -> None:
        """Write global memory."""
        self.take()
        if not self._landed and self._data is not None:
            self._landed = True
            self._box.scatter(self._data)
            gaps = self.target.gaps
            if gaps is not None:
                for at, size in self._box.spans:
                    gaps[at : at + size] = b"\1" * size


class Groups:
    """The bulk stores of one thread: the group being filled and the committed ones that are not over, oldest first."""

    def __init__(self, thread: Asynchronous) -> None:
        self._thread = thread
        self.open: list[Store] = []
        self.committed: list[list[Store]] = []

    def add(self, store: Store) -> None:
        self.open.append(store)
        if self._thread.scheduler.lands_early():
            store.land()

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int, read: bool) -> None:
        """All but the newest `pending` groups have read their shared memory, and unless `read` alone are over."""
        done = self.committed[: max(0, len(self.committed) - pending)]
        for group in done:
            for store in group:
                store.take()
                store.read = True
                self._finish(store.reads)
        if not read:
            del self.committed[: len(done)]
            self._end(done)

    def _end(self, groups: Sequence[list[Store]]) -> None:
        for group in groups:
            for store in group:
                store.land()
                self._finish(store.writes)

    def _finish(self, access: CopyAccess) -> None:
        if access.pending:
            access.pending, access.clock = False, self._thread.vc[self._thread.tid]

    def exit(self) -> None:
        """The thread exits; global memory is written after all, but shared memory may be given away."""
        for store in self.open:
            raise self._error(store, "that it never committed")
        for store in (s for group in self.committed for s in group if not s.read):
            raise self._error(store, "whose reads it did not wait for (bulk_wait_read)")
        self._end(self.committed)
        self.committed.clear()

    def _error(self, store: Store, what: str) -> AsyncError:
        return self._thread.error(
            AsyncError,
            f"this thread exits with a bulk store from {store.source} to {store.target} {what}",
            memory=store.source,
            access=store.reads,
        )
