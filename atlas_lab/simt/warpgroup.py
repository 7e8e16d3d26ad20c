"""Warpgroups: 128 threads meet at one intrinsic, which then runs once for all of them. Memory is not ordered by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from atlas_lab.simt.errors import DivergentCollective, MissingLane
from atlas_lab.simt.products import Products
from atlas_lab.simt.source import Site, ranges, spell

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.thread import SimThread

SIZE = 128


class Meeting:
    """Threads that wait for the rest of their warpgroup. A thread's wait, in the scheduler's sense."""

    __slots__ = ("args", "group", "left", "name", "site")
    kind = "warpgroup"
    ready = None

    def __init__(self, group: Warpgroup, name: str, site: Site | None) -> None:
        self.group, self.name, self.site = group, name, site
        self.args: list[Any] = [None] * SIZE
        self.left = SIZE

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.group.number

    def describe(self) -> str:
        missing = [i for i, t in enumerate(self.group.threads) if t.wait is not self]
        return (
            f"wait in {self.name} at {spell(self.site)} for threads {ranges(missing)} of warpgroup {self.group.number}"
        )


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
        m = self.meeting
        if m is None:
            m = self._open(thread, name, site)
        elif m.site != site or m.name != name:
            waiting = next(t for t in self.threads if t.wait is m)
            raise thread.error(
                DivergentCollective,
                f"this thread of warpgroup {self.number} calls {name} while thread {waiting.index} waits in {m.name} "
                f"at {spell(m.site)}: all of a warpgroup take part in the same instruction",
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

    def _open(self, thread: SimThread, name: str, site: Site | None) -> Meeting:
        """The first thread comes. Others may wait elsewhere and come later, but not those that exited."""
        if len(self.threads) < SIZE:
            raise thread.error(
                MissingLane,
                f"{name} needs {SIZE} threads, but warpgroup {self.number} of this block has {len(self.threads)}",
            )
        gone = next((t for t in self.threads if t.done), None)
        if gone is not None:
            raise thread.error(
                MissingLane, f"{name} needs all threads of warpgroup {self.number}, but thread {gone.index} exited"
            )
        self.meeting = Meeting(self, name, site)
        return self.meeting

    def leave(self, thread: SimThread) -> None:
        """`thread` exits: nobody in its warpgroup may be waiting for it, nor a product be under way."""
        self.products.finish(thread)
        m = self.meeting
        if m is not None:
            waiting = next(t for t in self.threads if t.wait is m)
            raise thread.error(
                MissingLane,
                f"this thread exits while thread {waiting.index} and others {m.describe()}",
                site=m.site,
            )
