"""cp.async: copies into shared memory that land as late as the programming model allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from atlas_lab.simt.errors import AsyncError
from atlas_lab.simt.shadow import Access, check_gaps

if TYPE_CHECKING:
    from atlas_lab.kernels.lang.types import Pointer
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.thread import SimThread


class Copy(NamedTuple):
    """One issued copy; `access` is its pending write, `source_access` its pending read."""

    target: Memory
    at: int
    source: Memory
    source_at: int
    size: int
    valid: int
    access: Access | None
    source_access: Access | None
    landed: bool


class Copies:
    """The asynchronous copies of one thread: the group being filled and the committed groups, oldest first."""

    __slots__ = ("committed", "open", "thread")

    def __init__(self, thread: SimThread) -> None:
        self.thread = thread
        self.open: list[Copy] = []
        self.committed: list[list[Copy]] = []

    def issue(self, dst: Pointer, dst_index: int, src: Pointer, src_index: int, size: int, valid: int) -> None:
        """Check both ends and poison the target."""
        t = self.thread
        if size not in (4, 8, 16) or not 0 <= valid <= size:
            raise t.error(
                AsyncError, f"an asynchronous copy of {valid} of {size} bytes, expected 4, 8 or 16 and no more valid"
            )
        target: Memory = dst.buffer
        source: Memory = src.buffer
        if target.space != "shared" or source.space != "global":
            raise t.error(AsyncError, f"an asynchronous copy from {source} to {target}, expected global to shared")
        at = t.locate(dst, dst_index, size, size, "asynchronous copy to")
        source_at = t.locate(src, src_index, valid, size, "asynchronous copy from")
        access = source_access = None
        if target.shadow is not None:
            access = t.access(False, fresh=True)
            access.pending = True
            target.shadow.write(t, at, size, access)
        if valid and source.watched:
            check_gaps(t, source, source_at, valid)
            if source.shadow is not None:
                source_access = t.access(False, fresh=True)
                source_access.pending = True
                step = valid & -valid  # what exists of a vector need not be a power of two wide
                for start in range(source_at, source_at + valid, step):
                    source.shadow.read(t, start, step, source_access)
        copy = Copy(target, at, source, source_at, size, valid, access, source_access, t.scheduler.lands_early())
        if copy.landed:
            self._land(copy)
        self.open.append(copy)

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """All but the newest `pending` groups are complete; the thread may use their bytes."""
        done = self.committed[: max(0, len(self.committed) - pending)]
        del self.committed[: len(done)]
        t = self.thread
        for group in done:
            for copy in group:
                if not copy.landed:
                    self._land(copy)
                for access in (copy.access, copy.source_access):
                    if access is not None:
                        access.pending = False
                        access.clock = t.vc[t.tid]

    @staticmethod
    def _land(copy: Copy) -> None:
        data = copy.source.bytes[copy.source_at : copy.source_at + copy.valid]
        copy.target.bytes[copy.at : copy.at + copy.size] = data + bytes(copy.size - copy.valid)

    def finish(self) -> None:
        """The thread exits. Copies that were never committed cannot have been meant."""
        if self.open:
            first = self.open[0]
            raise self.thread.error(
                AsyncError,
                f"this thread exits with {len(self.open)} asynchronous copies to {first.target} that it never "
                "committed",
                memory=first.target,
                access=first.access,
            )
