"""Block and named barriers: bar.sync and bar.arrive."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING

from atlas_lab.simt.clocks import Knowledge, merge
from atlas_lab.simt.errors import BarrierMismatch, DivergentCollective, MissingLane
from atlas_lab.simt.source import Site, spell

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.thread import SimThread

BARRIERS = 16


class Barrier:
    """One generation of a barrier, from its first arrival until its count is reached. A wait of its threads."""

    __slots__ = ("arrived", "block", "expected", "ident", "passed", "sites", "waiting", "whole")
    kind = "barrier"
    ready = None

    def __init__(self, block: Block, ident: int, expected: int, whole: bool) -> None:
        self.block, self.ident, self.expected, self.whole = block, ident, expected, whole
        self.waiting: list[SimThread] = []
        self.arrived: dict[SimThread, None] = {}
        self.sites: dict[int, Site | None] = {}  # by warp
        self.passed: Knowledge | None = None  # what threads that only arrive pass on

    @property
    def key(self) -> int:
        return self.ident

    @property
    def complete(self) -> bool:
        return len(self.arrived) >= (self.block.live if self.whole else self.expected)

    def describe(self) -> str:
        needed = self.block.live if self.whole else self.expected
        site = next(iter(self.sites.values()), None)
        gone = len(self.block.threads) - self.block.live
        exited = f", {gone} exited" if gone and not self.whole else ""
        return f"wait at barrier {self.ident} at {spell(site)} with {len(self.arrived)} of {needed} there{exited}"

    def join(self, thread: SimThread, site: tuple[CodeType, int] | None, waits: bool) -> None:
        """`thread` arrives, to wait or not."""
        warp = thread.warp_state
        if thread in self.arrived:
            raise thread.error(
                BarrierMismatch,
                f"this thread arrives twice at barrier {self.ident}, where {len(self.arrived)} of {self.expected} "
                "are there",
            )
        first = self.sites.setdefault(warp.number, site)
        if first != site:
            raise thread.error(
                DivergentCollective,
                f"lanes of warp {warp.number} meet barrier {self.ident} at different lines, {spell(first)} and "
                f"{spell(site)}",
            )
        self.arrived[thread] = None
        if waits:
            self.waiting.append(thread)
        else:
            self.passed = merge(self.passed, self.block.clocks.release(thread.tid))

    def open(self) -> None:
        """The count is reached: order memory and let the waiting threads go."""
        block = self.block
        del block.barriers[self.ident]
        if not self.whole:
            self._check_lanes()
        everyone = len(self.waiting) == len(block.threads)
        who: slice | list[int] = slice(0, len(block.threads)) if everyone else [t.tid for t in self.waiting]
        if self.waiting:
            block.clocks.meet(who, self.passed)
            block.clocks.advance(who)
        block.scheduler.wake(self.waiting)

    def _check_lanes(self) -> None:
        """The instruction is executed by whole warps: the count must not be made up of parts of warps."""
        for number in self.sites:
            warp = self.block.warps[number]
            gone = next((t for t in warp.threads if t not in self.arrived and not t.done), None)
            if gone is not None:
                there = next(t for t in warp.threads if t in self.arrived)
                raise there.error(
                    MissingLane,
                    f"barrier {self.ident} reaches its count of {self.expected} without lane {gone.lane} of warp "
                    f"{number}, whose other lanes came",
                    site=self.sites[number],
                )


def meet(thread: SimThread, ident: int, count: int | None, waits: bool) -> Barrier:
    """`thread` arrives at barrier `ident` of its block, opening it if it is the last."""
    block = thread.block
    total = len(block.threads)
    if not 0 <= ident < BARRIERS:
        raise thread.error(BarrierMismatch, f"found barrier {ident}, expected 0 to {BARRIERS - 1}")
    if count is not None and (count % 32 or not 0 < count <= -(-total // 32) * 32):
        raise thread.error(
            BarrierMismatch,
            f"barrier {ident}: found a count of {count}, expected a multiple of 32 from 32 to the block's {total}",
        )
    whole = count is None  # then threads that exited are not waited for
    expected = total if count is None else count
    barrier = block.barriers.get(ident)
    if barrier is None:
        barrier = block.barriers[ident] = Barrier(block, ident, expected, whole)
    elif barrier.expected != expected:
        other = next(iter(barrier.arrived))
        raise thread.error(
            BarrierMismatch,
            f"barrier {ident}: this thread counts to {expected}, thread {other.index} at "
            f"{spell(barrier.sites[other.warp])} to {barrier.expected}",
        )
    barrier.whole = barrier.whole and whole
    if waits:
        thread.warp_state.leave(thread, f"waits at barrier {ident}")
    barrier.join(thread, thread.site(), waits)
    if barrier.complete:
        barrier.open()
    return barrier
