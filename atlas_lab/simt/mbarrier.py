"""mbarriers: phases, arrivals, expected bytes, and the copies that bring them as late as the phase allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atlas_lab.simt.clocks import Knowledge, merge
from atlas_lab.simt.errors import AsyncError, MbarrierError
from atlas_lab.simt.shadow import Access
from atlas_lab.simt.source import Site, spell

if TYPE_CHECKING:
    from atlas_lab.simt.accesses import Accesses
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.memory import Memory

COUNT_LIMIT = (1 << 20) - 1


class Agent:
    """Who makes the accesses of an mbarrier's copies: no thread, so that only those who learned of the phase's end,
    by waiting or from one that waited, come after them. `tid` is its column in the block's clocks."""

    __slots__ = ("block", "epoch", "tid")

    def __init__(self, block: Block, tid: int) -> None:
        self.block, self.tid, self.epoch = block, tid, 1


class CopyAccess(Access):
    """An access of the copy engine, issued by a thread."""

    __slots__ = ("issuer",)
    asynchronous = True

    def __init__(self, issuer: Accesses, who: Any, site: Site | None) -> None:
        code, at = site if site is not None else (None, 0)
        super().__init__(who, 0, code, at, False)
        self.issuer = issuer
        self.pending = True

    @property
    def named(self) -> Any:
        return self.issuer


class StoreAccess(CopyAccess):
    """The write of an asynchronous store, which is no access of the copy engine."""

    __slots__ = ()
    asynchronous = False


class Incoming:
    """A copy under way to an mbarrier: `size` bytes, how they land, its pending accesses (the write first)."""

    __slots__ = ("accesses", "land", "memory", "size")

    def __init__(self, memory: Memory, size: int, land: Callable[[], None], accesses: list[CopyAccess]) -> None:
        self.memory, self.size, self.land, self.accesses = memory, size, land, accesses


class Mbarrier:
    """One mbarrier. In the current `phase`: `pending` arrivals are missing, `tx` bytes are expected and have not
    landed, of which `copies` bring some. `known` is what finished phases pass on to their block, `far` what arrivals
    from other blocks add to it. `init` is the access that made it, `fenced` for whom it is visible: the cluster and
    the copy engine ("cluster"), or the latter alone ("engine"); `announced` is the generation of the cluster's barrier
    that its thread arrived in after that fence. `unseen`: copies of phases nobody waited for."""

    __slots__ = (
        "_far", "_near", "agent", "announced", "at", "block", "copies", "count", "far", "fenced", "init", "known",
        "landed", "memory", "pending", "phase", "tx", "unseen",
    )  # fmt: skip

    def __init__(self, block: Block, memory: Memory, at: int, count: int, init: Access) -> None:
        self.block, self.memory, self.at, self.count, self.init = block, memory, at, count, init
        self.agent = block.agent()
        self.fenced = ""
        self.announced: int | None = None
        self.phase, self.pending, self.tx = 0, count, 0
        self.copies: list[Incoming] = []
        self.landed: list[Incoming] = []
        self.unseen: list[Incoming] = []
        self.known: Knowledge | None = None
        self.far: Knowledge | None = None
        self._near: Knowledge | None = None
        self._far: Knowledge | None = None

    def __str__(self) -> str:
        return f"the mbarrier at bytes [{self.at}, {self.at + 8}) of {self.memory}"

    @property
    def incoming(self) -> int:
        return sum(c.size for c in self.copies)

    def expect(self, thread: Accesses, nbytes: int) -> None:
        """Expect more bytes in this phase."""
        if not 0 <= nbytes <= COUNT_LIMIT or self.tx + nbytes > COUNT_LIMIT:
            raise thread.error(
                MbarrierError,
                f"{self}, phase {self.phase}: found {nbytes} more bytes to expect beside {self.tx}, expected at most "
                f"{COUNT_LIMIT} in all",
                memory=self.memory,
            )
        self.tx += nbytes

    def arrive(self, thread: Accesses, nbytes: int, relaxed: bool = False) -> None:
        """`thread` expects more bytes, then arrives; of a `relaxed` arrival what it did is known at any scope."""
        if not self.pending:
            raise thread.error(
                MbarrierError,
                f"{self}: an arrival in phase {self.phase}, whose {self.count} arrivals are there and which waits for "
                f"{self.tx} bytes, expected it after the phase's end",
                memory=self.memory,
            )
        self.expect(thread, nbytes)
        passed = thread.block.clocks.release(thread.tid)
        if relaxed or thread.block is self.block:
            self._near = merge(self._near, passed)
        else:
            self._far = merge(self._far, passed)
        self.pending -= 1
        thread.scheduler.progress += 1
        self.check(thread)
        if not self.tx and not self.copies:
            self.settle()

    def bring(self, thread: Accesses, copy: Incoming) -> None:
        """A copy that `thread` issued will complete here."""
        self.copies.append(copy)
        thread.scheduler.progress += 1
        self.check(thread)
        if thread.scheduler.lands_early():
            self._land(copy)
            self.copies.remove(copy)
            if not self.tx and not self.pending and not self.copies:
                self.settle()

    def check(self, thread: Accesses) -> None:
        """With all arrivals there, more bytes must not come than are expected."""
        if not self.pending and self.incoming > self.tx:
            landed = sum(c.size for c in self.landed)
            raise thread.error(
                MbarrierError,
                f"{self}, phase {self.phase}: found copies of {self.incoming + landed} bytes, expected the "
                f"{self.tx + landed} that its arrivals announced",
                memory=self.memory,
            )

    def settle(self) -> None:
        """End the phase if nothing is missing but what is under way, which lands now."""
        if self.pending or self.tx != self.incoming:
            return
        for copy in self.copies:
            self._land(copy)
        self.copies.clear()
        agent = self.agent
        near = self._near
        if self.landed:
            for copy in self.landed:
                for access in copy.accesses:
                    access.pending, access.clock = False, agent.epoch
            self.unseen += self.landed
            self.landed.clear()
            near = merge(near, {self.block.serial: self.block.clocks.only(agent.tid, agent.epoch)})
            agent.epoch += 1
        self.known, self.far = merge(self.known, near), merge(self.far, self._far)
        self._near = self._far = None
        self.phase, self.pending = self.phase + 1, self.count
        self.block.scheduler.progress += 1

    def _land(self, copy: Incoming) -> None:
        copy.land()
        self.tx -= copy.size
        self.landed.append(copy)

    def done(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: copies land when somebody asks, not before."""
        if self.phase & 1 == parity:
            self.settle()
        return self.phase & 1 != parity

    def acquire(self, thread: Accesses, scope: str) -> None:
        """`thread` waited for a phase: at scope `block`, what arrivals from other blocks passed on stays unknown."""
        self.unseen.clear()
        known = self.known if scope == "block" else merge(self.known, self.far)
        if known:
            thread.block.clocks.acquire(thread.tid, known)

    def missing(self) -> str:
        """What the current phase waits for."""
        parts = [f"{self.pending} of {self.count} arrivals"] * bool(self.pending)
        lacking = self.tx - self.incoming
        parts += [f"{lacking} of the bytes that it expects"] * (lacking > 0)
        return " and ".join(parts) or "nothing"

    def finish(self, thread: Accesses, what: str) -> None:
        """`what` happens: the mbarrier must have no copies that may still be written, or that nobody noticed."""
        for copy in (*self.copies, *self.landed, *self.unseen):
            raise thread.error(
                AsyncError,
                f"{what} while the copy by {copy.accesses[0].spell(thread)} to {copy.memory} is not waited for "
                f"at {self}",
                memory=copy.memory,
                access=copy.accesses[0],
            )


class PhaseWait:
    """A thread that waits for the current phase of an mbarrier."""

    __slots__ = ("barrier", "phase", "site")
    kind = "mbarrier"

    def __init__(self, barrier: Mbarrier, site: Site | None) -> None:
        self.barrier, self.phase, self.site = barrier, barrier.phase, site

    @property
    def key(self) -> tuple[int, int]:
        return id(self.barrier), self.phase

    def ready(self) -> bool:
        if self.barrier.phase == self.phase:
            self.barrier.settle()
        return self.barrier.phase > self.phase

    def describe(self) -> str:
        b = self.barrier
        return (
            f"wait for phase {self.phase} (parity {self.phase & 1}) of {b} at {spell(self.site)}, which lacks "
            f"{b.missing()}"
        )
