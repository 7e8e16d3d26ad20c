"""Shared memory as matrix units read it: by addresses, in chunks of 16 bytes, through the async proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_lab.simt.errors import OutOfBounds, PoisonRead, Race, Unfenced
from atlas_lab.simt.proxies import fenced
from atlas_lab.simt.shadow import NEVER, Access, Readers, ordered
from atlas_lab.simt.source import Site

if TYPE_CHECKING:
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.thread import SimThread
    from atlas_lab.simt.warpgroup import Warpgroup


class Addresses:
    """The shared address space of a block: where each memory lies, no better aligned than it is promised to be."""

    __slots__ = ("_end", "_memories")

    def __init__(self) -> None:
        self._memories: list[tuple[int, Memory]] = []
        self._end = 0

    def add(self, memory: Memory) -> None:
        base = -(-self._end // memory.align) * memory.align
        if memory.align < 1024 and not base // memory.align % 2:
            base += memory.align
        self._memories.append((base, memory))
        self._end = base + memory.size

    def of(self, memory: Memory) -> int:
        """The address of its first byte."""
        return next(base for base, m in self._memories if m is memory)

    def find(self, thread: SimThread, where: np.ndarray, what: str) -> tuple[Memory, np.ndarray]:
        """The memory that all chunks at `where` lie in, and their numbers in it."""
        low, high = int(where.min()), int(where.max()) + 16
        for base, memory in self._memories:
            if base <= low < base + memory.size:
                if high > base + memory.size:
                    raise thread.error(
                        OutOfBounds,
                        f"{what} lies at bytes [{low - base}, {high - base}) of {memory}, whose size is {memory.size}",
                        memory=memory,
                        site=thread.scheduler.collective,
                    )
                return memory, (where - base).ravel() >> 4
        raise thread.error(
            OutOfBounds,
            f"{what} starts at shared address {low:#x}, where the block has no shared memory",
            site=thread.scheduler.collective,
        )


class Operand:
    """Chunks of one memory."""

    __slots__ = ("memory", "numbers", "shape")

    def __init__(self, memory: Memory, numbers: np.ndarray, shape: tuple[int, ...]) -> None:
        self.memory, self.numbers, self.shape = memory, numbers, shape

    def read(self) -> np.ndarray:
        """uint8 [*shape, 16], as the bytes are now."""
        rows = np.frombuffer(self.memory.bytes, np.uint8).reshape(-1, 16)
        return np.asarray(rows[self.numbers].reshape(*self.shape, 16))


class ProductAccess(Access):
    """The read of a warpgroup's matrix product: pending until it waits. Whoever knows that one of its threads got past
    that wait comes after it, since the group is the whole warpgroup's."""

    __slots__ = ("ends", "group", "site")
    what = "matrix product"

    def __init__(self, group: Warpgroup, site: Site | None) -> None:
        code, at = site if site is not None else (None, 0)
        super().__init__(group.threads[0], 0, code, at, False)
        self.group, self.site = group, site
        self.pending = True
        self.ends: list[int] = []

    def finish(self, ends: list[int]) -> None:
        """The threads waited, in these epochs."""
        self.pending, self.ends = False, ends
        self.clock = NEVER

    def before(self, thread: Any) -> bool:
        """Whether the wait happened before what `thread` does now."""
        threads = self.group.threads
        if thread.block is threads[0].block:
            known = thread.vc
            return any(end <= known[t.tid] for end, t in zip(self.ends, threads, strict=True))
        clocks, serial = thread.block.clocks, threads[0].block.serial
        return any(clocks.knows(thread.tid, serial, t.tid, e) for e, t in zip(self.ends, threads, strict=True))


def observe(leaders: Sequence[SimThread], operand: Operand, access: ProductAccess, name: str) -> None:
    """Check a read of an operand by a thread of each warp and remember it."""
    memory = operand.memory
    shadow = memory.shadow
    assert shadow is not None
    shift = 4 - shadow.shift
    numbers = operand.numbers.tolist()
    if shift:
        numbers = [g for n in numbers for g in range(n << shift, n + 1 << shift)]
    writes = shadow.writes
    for a in dict.fromkeys(writes[g] for g in numbers):
        if a is None or a.pending or not _visible(a, leaders):
            g = next(g for g in numbers if writes[g] is a)
            _refuse(leaders, memory, g << shadow.shift, access, a, name)
    reads = shadow.reads
    group = access.group
    for g in numbers:
        r = reads[g]
        if r is None or (type(r) is ProductAccess and r.group is group):
            reads[g] = access
        elif type(r) is Readers:
            r[group] = access
        else:
            old = r.group if type(r) is ProductAccess else r if r.pending else r.thread
            reads[g] = Readers({old: r, group: access})


def _visible(a: Access, leaders: Sequence[SimThread]) -> bool:
    """Whether the write happened before the product, with a proxy fence of its thread in between."""
    if not all(ordered(a, t) for t in leaders):
        return False
    return fenced(a, leaders[0], "shared")


def _refuse(
    leaders: Sequence[SimThread], memory: Memory, at: int, access: ProductAccess, a: Access | None, name: str
) -> None:
    first = leaders[0]
    what = f"operand {name} of this matrix product"
    if a is None:
        raise first.error(
            PoisonRead,
            f"{what} covers byte {at} of {memory}, which nothing has written yet",
            memory=memory,
            site=access.site,
        )
    writer = f"the {'asynchronous copy' if a.pending else 'write'} by {a.spell(first)}"
    if a.pending:
        raise first.error(
            PoisonRead,
            f"{what} covers byte {at} of {memory} while {writer} is not waited for",
            memory=memory,
            site=access.site,
        )
    for t in leaders:
        if not ordered(a, t):
            raise t.error(
                Race,
                f"{what}, at byte {at} of {memory}, races with {writer}",
                memory=memory,
                site=access.site,
            )
    raise first.error(
        Unfenced,
        f"{what} covers byte {at} of {memory}: found no fence_proxy_async of the writing thread between {writer} and "
        "the barrier after it, expected one",
        memory=memory,
        site=access.site,
    )
