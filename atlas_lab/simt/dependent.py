"""Dependent launches: what a grid may not touch before `grid_wait`, found although launches run one after another.

On a GPU a launch with `pdl` (i) starts once every block of the launch before it (i - 1) called
`grid_launch_dependents` or exited: i - 1 may still run. So may the launches before that, where i - 1 is dependent
itself and let i start before it waited for them (`early`). A thread that passed `grid_wait` knows that i - 1 is over,
and with it everything before: each dependent launch must wait in at least one thread, and so ends after the one before
it. An ordinary launch starts when all before it are over.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from atlas_lab.kernels.lang.dependent import WAITED
from atlas_lab.kernels.lang.op import Effect
from atlas_lab.simt.errors import SimtError, Unwaited
from atlas_lab.simt.shadow import Access, Shadow
from atlas_lab.simt.source import operation_of

if TYPE_CHECKING:
    from atlas_lab.simt.accesses import Accesses
    from atlas_lab.simt.memory import Memory


class Span(NamedTuple):
    """Bytes [start, end) of a memory that `kernel`, which may not be over, writes, or else reads."""

    memory: Memory
    start: int
    end: int
    writes: bool
    kernel: str


class Overlap:
    """A dependent launch: what the launches that may still run touch, and which of its threads waited for them.

    `early`: some block may have let the next launch start before it waited. `waited`: some thread waited.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.early = False
        # By block and thread, the epoch in which a thread waited: whoever knows that epoch came after the wait.
        self._waits: defaultdict[int, dict[int, int]] = defaultdict(dict)

    @property
    def waited(self) -> bool:
        return bool(self._waits)

    def wait(self, thread: Accesses) -> None:
        """`thread` passes grid_wait."""
        self._waits[thread.block.serial].setdefault(thread.tid, thread.vc[thread.tid])

    def release(self, thread: Accesses) -> None:
        """`thread` calls grid_launch_dependents."""
        self.early = self.early or not self.passed(thread)

    def passed(self, thread: Accesses) -> bool:
        """Whether `thread` waited, or met a thread of its block that had."""
        waits = self._waits.get(thread.block.serial)
        if waits is None:
            return False
        if thread.tid in waits:
            return True
        known = any(epoch <= thread.vc[t] for t, epoch in waits.items())
        if known:
            waits[thread.tid] = thread.vc[thread.tid]
        return known

    def shadow(self, memory: Memory, plain: Shadow | None) -> Shadow | None:
        """What remembers the accesses of `memory`: `plain`, or one that also looks for early ones."""
        spans = [s for s in self.spans if s.memory is memory]
        return Guard(memory, self, spans) if spans else plain


class Guard(Shadow):
    """A shadow of memory that launches which may still run touch."""

    __slots__ = ("_overlap", "_spans")

    def __init__(self, memory: Memory, overlap: Overlap, spans: Sequence[Span]) -> None:
        super().__init__(memory, poison=False)
        self._overlap, self._spans = overlap, spans

    def read(self, thread: Accesses, at: int, width: int, access: Access) -> None:
        for s in self._spans:
            if s.writes and at < s.end and at + width > s.start:
                self._check(thread, at, width, access, s, "read")
                op = operation_of(sys._getframe(1))
                if op is not None and op.effect is Effect.PURE and op.operands[0] != WAITED:
                    raise thread.error(
                        Unwaited,
                        f"{op.name} reads bytes [{at}, {at + width}) of {self.memory}, which kernel {s.kernel} of a "
                        "launch before writes: found a pure load, which may move above grid_wait, expected "
                        "ld_waited_…, ld_in_… or another that stays",
                        memory=self.memory,
                        access=access,
                    )
        super().read(thread, at, width, access)

    def write(self, thread: Accesses, at: int, width: int, access: Access) -> None:
        for s in self._spans:
            if at < s.end and at + width > s.start:
                self._check(thread, at, width, access, s, "write")
        super().write(thread, at, width, access)

    def _check(self, thread: Accesses, at: int, width: int, access: Access, s: Span, mine: str) -> None:
        if not self._overlap.passed(thread):
            raise thread.error(
                Unwaited,
                f"this {mine} of bytes [{at}, {at + width}) of {self.memory} comes before grid_wait, but kernel "
                f"{s.kernel} of a launch before, which may still run, {'writes' if s.writes else 'reads'} them",
                memory=self.memory,
                access=access,
            )


def never_waited(kernel: str) -> SimtError:
    """The report of a dependent launch that ended without waiting."""
    return Unwaited(
        "found no thread of this dependent launch that called grid_wait, expected one or more: its end must mean the "
        "end of the launches before it",
        kernel=kernel,
    )
