"""Warpgroups: 128 threads meet at one intrinsic, which then runs once for all of them. Memory is not ordered by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from atlas_lab.simt.errors import DivergentCollective, MissingLane
from atlas_lab.simt.products import Products
from atlas_lab.simt.source import ranges, spell
from atlas_lab.simt.warp import doing

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.thread import SimThread

SIZE = 128


class Meeting:
    """Threads that wait for the rest of their warpgroup. A thread's wait, in the scheduler's sense."""

    __slots__ = ("args", "at", "code", "group", "left", "name")
    kind = "warpgroup"
    ready = None

    def __init__(self, group: Warpgroup, name: str, code: CodeType | None, at: int) -> None:
        self.group, self.name, self.code, self.at = group, name, code, at
        self.args: list[Any] = [None] * SIZE
        self.left = SIZE

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.group.number

    @property
    def place(self) -> str:
        return spell((self.code, self.at) if self.code else None)

    def describe(self) -> str:
        missing = [i for i, t in enumerate(self.group.threads) if t.wait is not self]
        return f"wait in {self.name} at {self.place} for threads {ranges(missing)} of warpgroup {self.group.number}"


class Warpgroup:
    """128 consecutive threads of a block, where they meet now, and their matrix products."""

    __slots__ = ("max_registers", "meeting", "number", "products", "threads")

    def __init__(self, block: Block, number: int) -> None:
        self.number = number
        self.threads = block.threads[number * SIZE : (number + 1) * SIZE]
        self.meeting: Meeting | None = None
        self.products = Products(self)
        self.max_registers: int | None = None  # a thread, once set

    def meet(self, thread: SimThread, name: str, arg: Any, combine: Callable[..., Sequence[Any]]) -> Any:
        """`thread` comes to `name`; the last one runs `combine(threads, args)`, which gives each its result."""
        site = thread.site()
        code, at = site if site is not None else (None, 0)
        m = self.meeting
        if m is None:
            m = self._open(thread, name, code, at)
        elif m.code is not code or m.at != at or m.name != name:
            waiting = next(t for t in self.threads if t.wait is m)
            raise thread.error(
                DivergentCollective,
                f"this thread of warpgroup {self.number} calls {name} while thread {waiting.index} waits in {m.name} "
                f"at {m.place}: all of a warpgroup take part in the same instruction",
            )
        m.args[thread.tid % SIZE] = arg
        m.left -= 1
        if m.left:
            thread.wait = m
            thread.scheduler.switch()
            return thread.result
        self.meeting = None
        scheduler = thread.scheduler
        scheduler.collective = site
        results = combine(self.threads, m.args)
        scheduler.collective = None
        for t, result in zip(self.threads, results, strict=True):
            t.result = result
        scheduler.wake(self.threads)
        return thread.result

    def _open(self, thread: SimThread, name: str, code: CodeType | None, at: int) -> Meeting:
        """The first thread comes; those that cannot are reported."""
        if len(self.threads) < SIZE:
            raise thread.error(
                MissingLane,
                f"{name} needs {SIZE} threads, but warpgroup {self.number} of this block has {len(self.threads)}",
            )
        for other in self.threads:
            if other.done or getattr(other.wait, "kind", "") == "barrier":
                raise thread.error(
                    MissingLane,
                    f"{name} needs all threads of warpgroup {self.number}, but thread {other.index} {doing(other)}",
                )
        self.meeting = Meeting(self, name, code, at)
        return self.meeting

    def leave(self, thread: SimThread, doing: str) -> None:
        """`thread` exits or goes to a barrier: nobody in its warpgroup may be waiting for it."""
        m = self.meeting
        if m is not None:
            waiting = next(t for t in self.threads if t.wait is m)
            raise thread.error(
                MissingLane, f"this thread {doing} while thread {waiting.index} and others {m.describe()}"
            )
