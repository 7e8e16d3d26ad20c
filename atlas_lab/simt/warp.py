"""Warp collectives: the lanes of a mask meet at one intrinsic, which then runs once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from atlas_lab.simt.errors import DivergentCollective, MissingLane
from atlas_lab.simt.source import ranges, spell

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.thread import SimThread

Combine = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


class Gathering:
    """Lanes that wait for the rest of their mask. A thread's wait, in the scheduler's sense."""

    __slots__ = ("args", "at", "code", "combine", "here", "left", "mask", "name", "warp", "who")
    kind = "warp"
    ready = None

    def __init__(self, warp: Warp, name: str, mask: int, code: CodeType | None, at: int, combine: Combine) -> None:
        self.warp, self.name, self.mask, self.code, self.at, self.combine = warp, name, mask, code, at, combine
        self.args: list[Any] = [None] * 32
        self.who = warp.members(mask)
        self.left = len(self.who)
        self.here = 0

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.warp.number, self.mask

    def describe(self) -> str:
        missing = [lane for lane in range(32) if (self.mask & ~self.here) >> lane & 1]
        return (
            f"wait in {self.name} at {spell((self.code, self.at) if self.code else None)} for lanes "
            f"{ranges(missing)} of warp {self.warp.number}"
        )


class Warp:
    """Up to 32 consecutive threads of a block and their unfinished gatherings, by mask."""

    __slots__ = ("block", "gatherings", "live", "number", "threads", "whole")

    def __init__(self, block: Block, number: int, threads: list[SimThread]) -> None:
        self.block, self.number, self.threads = block, number, threads
        self.gatherings: dict[int, Gathering] = {}
        self.live = len(threads)
        first = number * 32
        self.whole = slice(first, first + len(threads))

    def members(self, mask: int) -> list[SimThread]:
        """The threads of a mask, which all exist: `open` checked."""
        if mask == 0xFFFFFFFF:
            return self.threads
        return [t for t in self.threads if mask >> t.lane & 1]

    def open(
        self, thread: SimThread, name: str, mask: int, code: CodeType | None, at: int, combine: Combine
    ) -> Gathering:
        """The first lane of a mask arrives; lanes that cannot come are reported."""
        if not 0 < mask <= 0xFFFFFFFF or not mask >> thread.lane & 1:
            raise thread.error(
                MissingLane, f"lane {thread.lane} calls {name} with mask {mask:#010x}, which does not name it"
            )
        present = len(self.threads)
        if mask >> present:
            raise thread.error(
                MissingLane,
                f"{name} with mask {mask:#010x} needs lanes that do not exist: warp {self.number} has {present}",
            )
        for other in self.threads:
            if mask >> other.lane & 1 and (other.done or getattr(other.wait, "kind", "") == "barrier"):
                raise self._missing(thread, name, other)
        made = self.gatherings[mask] = Gathering(self, name, mask, code, at, combine)
        return made

    def _missing(self, thread: SimThread, name: str, other: SimThread) -> MissingLane:
        doing = "exited" if other.done or other.wait is None else other.wait.describe().replace("wait", "waits", 1)
        return thread.error(
            MissingLane, f"{name} needs lane {other.lane} of warp {self.number}, but thread {other.index} {doing}"
        )

    def leave(self, thread: SimThread, doing: str) -> None:
        """`thread` exits or goes to a barrier: nobody in its warp may be waiting for it."""
        for g in self.gatherings.values():
            if g.mask >> thread.lane & 1:
                waiting = next(t for t in self.threads if g.here >> t.lane & 1)
                raise thread.error(
                    MissingLane,
                    f"lane {thread.lane} {doing} while thread {waiting.index} and others {g.describe()}",
                )

    def divergent(
        self, thread: SimThread, g: Gathering, name: str, code: CodeType | None, at: int
    ) -> DivergentCollective:
        waiting = next(t for t in self.threads if g.here >> t.lane & 1)
        return thread.error(
            DivergentCollective,
            f"lane {thread.lane} of warp {self.number} calls {name} at {spell((code, at) if code else None)} while "
            f"thread {waiting.index} waits in {g.name} at {spell((g.code, g.at) if g.code else None)} with the "
            "same mask",
        )

    def finish(self, g: Gathering) -> list[Any]:
        """All lanes are here: order their memory, run the operation, return a result for each lane in order."""
        del self.gatherings[g.mask]
        clocks = self.block.clocks
        full = g.who is self.threads
        who: slice | list[int] = self.whole if full else [t.tid for t in g.who]
        clocks.meet(who)
        args = g.args if full and len(g.who) == 32 else [g.args[t.lane] for t in g.who]
        scheduler = self.block.scheduler
        scheduler.collective = (g.code, g.at) if g.code is not None else None
        results = g.combine(g.who, args)
        scheduler.collective = None
        clocks.advance(who)
        return list(results)
