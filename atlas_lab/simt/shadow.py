"""Who touched each byte last: races and reads of poison are found here, FastTrack's way.

A granule keeps its last write and the reads since that nothing orders yet. Granules are 16 bytes wide until a
narrower access splits them all.
"""

from __future__ import annotations

from itertools import repeat
from types import CodeType
from typing import TYPE_CHECKING, Any

from atlas_lab.simt.errors import MbarrierError, PoisonRead, Race, SimtError, Uninitialised
from atlas_lab.simt.source import spell

if TYPE_CHECKING:
    from atlas_lab.simt.accesses import Accesses
    from atlas_lab.simt.memory import Memory


NEVER = 2**31 - 1  # an epoch that no thread reaches


class Access:
    """One thread's accesses from one instruction in one epoch.

    `strong` accesses (atomic, volatile, acquire, release) do not race with one another. `pending` is the write or
    the read of an asynchronous copy that its thread has not waited for; waiting gives it the epoch of the wait.
    `mbarrier`: what was written is one, and no data until it is invalidated.
    """

    __slots__ = ("at", "clock", "code", "mbarrier", "pending", "strong", "thread")
    what = "copy"  # that a pending read belongs to
    asynchronous = False  # whether a write is the async proxy's, and needs no proxy fence to be seen there

    def __init__(self, thread: Any, clock: int, code: CodeType | None, at: int, strong: bool) -> None:
        self.thread, self.clock, self.code, self.at, self.strong = thread, clock, code, at, strong
        self.pending = self.mbarrier = False

    @property
    def named(self) -> Any:
        """The thread that reports name."""
        return self.thread

    def before(self, thread: Accesses) -> bool:
        """Whether an access that ended at no epoch of one thread (its clock is NEVER) happened before what `thread`
        does now."""
        return False

    def spell(self, reader: Accesses) -> str:
        """`thread (1, 0, 0) at file.py:3`."""
        other = self.named
        block = "" if other.block is reader.block else f"block {other.block.index} "
        line = spell((self.code, self.at) if self.code else None)
        return f"{block}thread {other.index} at {line}"


class Readers(dict[Any, Access]):
    """Several reads of one granule, by thread; pending ones by themselves, so that nothing replaces them."""

    __slots__ = ()


def ordered(a: Access, thread: Accesses) -> bool:
    """Whether `a` happened before what `thread` does now."""
    other = a.thread
    if other is thread:
        return True
    if a.clock == NEVER:
        return a.before(thread)
    if other.block is thread.block:
        return bool(a.clock <= thread.vc[other.tid])
    return thread.block.clocks.knows(thread.tid, other.block.serial, other.tid, a.clock)


class Shadow:
    """The granules of one allocation. `poison` memory may not be read before it was written; other memory
    was filled by the host, `gaps` permitting."""

    __slots__ = ("memory", "poison", "reads", "shift", "writes")

    def __init__(self, memory: Memory, poison: bool) -> None:
        self.memory, self.poison = memory, poison
        self.shift = 4
        granules = -(-memory.size // 16)
        self.writes: list[Access | None] = [None] * granules
        self.reads: list[Any] = [None] * granules  # None, an Access or Readers

    def _split(self, width: int) -> None:
        factor = (1 << self.shift) // width
        self.shift = width.bit_length() - 1
        self.writes = [a for a in self.writes for _ in range(factor)]
        # A set of readers must not be shared by the pieces.
        self.reads = [Readers(r) if type(r) is Readers else r for r in self.reads for _ in range(factor)]

    def read(self, thread: Accesses, at: int, width: int, access: Access) -> None:
        """Check a read of bytes [at, at + width) and remember it."""
        if width >> self.shift == 0:
            self._split(width)
        lo, hi = at >> self.shift, (at + width) >> self.shift
        block, vc = thread.block, thread.vc
        last: Access | None = access
        for a in self.writes[lo:hi]:
            if a is not last:
                last = a
                if a is None:
                    if self.poison:
                        raise self._unwritten(thread, at, width, access)
                    continue
                if a.pending:
                    raise self._pending(thread, at, width, access, a)
                other = a.thread
                if (
                    (a.clock > vc[other.tid] if other.block is block else not ordered(a, thread))
                    and other is not thread and not (a.strong and access.strong)
                ):  # fmt: skip
                    raise self._race(thread, at, width, access, a, "read", "write")
        reads = self.reads
        for i in range(lo, hi):
            r = reads[i]
            if r is None or r is access:
                reads[i] = access
            elif type(r) is Readers:
                r[access if access.pending else thread] = access
            else:
                other = r.thread
                if not r.pending and (
                    other is thread or (r.clock <= vc[other.tid] if other.block is block else ordered(r, thread))
                ):
                    reads[i] = access
                else:
                    mine = access if access.pending else thread
                    reads[i] = Readers({r if r.pending else other: r, mine: access})

    def write(self, thread: Accesses, at: int, width: int, access: Access) -> None:
        """Check a write of bytes [at, at + width) and remember it."""
        if width >> self.shift == 0:
            self._split(width)
        lo, hi = at >> self.shift, (at + width) >> self.shift
        strong = access.strong
        last: Access | None = access
        writes, reads = self.writes, self.reads
        for a in writes[lo:hi]:
            if a is not last and a is not None:
                last = a
                if a.pending:
                    raise self._race(thread, at, width, access, a, "write", "unfinished asynchronous copy")
                if a.thread is not thread and not ordered(a, thread) and not (strong and a.strong):
                    raise self._race(thread, at, width, access, a, "write", "write")
        seen: Any = None
        for r in reads[lo:hi]:
            if r is not seen and r is not None:
                seen = r
                for a in r.values() if isinstance(r, Readers) else (r,):
                    if a.pending:
                        raise self._race(thread, at, width, access, a, "write", f"read by an unfinished {a.what}")
                    if a.thread is not thread and not ordered(a, thread) and not (strong and a.strong):
                        raise self._race(thread, at, width, access, a, "write", "read")
        n = hi - lo
        if n == 1:
            writes[lo] = access
            reads[lo] = None
        else:
            writes[lo:hi] = repeat(access, n)
            reads[lo:hi] = repeat(None, n)

    def _race(
        self, thread: Accesses, at: int, width: int, access: Access, other: Access, mine: str, theirs: str
    ) -> SimtError:
        kind = "asynchronous copy" if access.pending else mine
        if other.mbarrier:
            return self._on_mbarrier(thread, at, width, access, other, kind)
        return thread.error(
            Race,
            f"this {kind} of bytes [{at}, {at + width}) of {self.memory} races with the {theirs} by "
            f"{other.spell(thread)}",
            memory=self.memory,
            access=access,
        )

    def _pending(self, thread: Accesses, at: int, width: int, access: Access, copy: Access) -> SimtError:
        if copy.mbarrier:
            return self._on_mbarrier(thread, at, width, access, copy, "read")
        return thread.error(
            PoisonRead,
            f"bytes [{at}, {at + width}) of {self.memory} are read while the asynchronous copy by "
            f"{copy.spell(thread)} is not waited for",
            memory=self.memory,
            access=access,
        )

    def _on_mbarrier(self, thread: Accesses, at: int, width: int, access: Access, init: Access, mine: str) -> SimtError:
        return thread.error(
            MbarrierError,
            f"this {mine} of bytes [{at}, {at + width}) of {self.memory} meets the mbarrier that {init.spell(thread)} "
            "initialised there",
            memory=self.memory,
            access=access,
        )

    def _unwritten(self, thread: Accesses, at: int, width: int, access: Access) -> SimtError:
        return thread.error(
            PoisonRead,
            f"bytes [{at}, {at + width}) of {self.memory} are read but nothing has written them yet",
            memory=self.memory,
            access=access,
        )


def check_gaps(thread: Accesses, memory: Memory, at: int, width: int) -> None:
    """Report a read of global bytes that neither the host nor a kernel wrote."""
    gaps = memory.gaps
    if gaps is not None and gaps.find(0, at, at + width) >= 0:
        raise thread.error(
            Uninitialised, f"bytes [{at}, {at + width}) of {memory} are read but were never written", memory=memory
        )
