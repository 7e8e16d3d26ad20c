"""Who runs next: resident blocks, ready threads, spinning threads, and the end of progress."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

from atlas_lab.kernels.lang.mbarrier import mbarrier_init
from atlas_lab.simt.deadlock import report
from atlas_lab.simt.source import Site

if TYPE_CHECKING:
    from atlas_lab.kernels.lang.kernel import Kernel
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.dependent import Overlap
    from atlas_lab.simt.options import Options
    from atlas_lab.simt.thread import Dim3, SimThread


AGENTS = 32  # mbarriers of a block whose copies are told apart


class Wait(Protocol):
    """What a thread waits for. `ready` is polled between rounds; None: somebody wakes the thread."""

    @property
    def kind(self) -> str: ...

    @property
    def key(self) -> Hashable: ...

    @property
    def ready(self) -> Callable[[], bool] | None: ...

    def describe(self) -> str:
        """`wait for …`, for the deadlock report."""


@dataclass(frozen=True)
class Poll:
    """A wait for a condition, such as the phase of an mbarrier; `text` is its description."""

    kind: str
    key: Hashable
    ready: Callable[[], bool]
    text: str

    def describe(self) -> str:
        return self.text


class Scheduler:
    """One launch. Threads hand over to one another; the hub greenlet, in `loop`, takes over between rounds.

    `ready` threads can run; `later` ones spin and run again when nobody else can; `polling` ones wait for a
    condition. `progress` counts everything that may let a spinning thread go on.
    """

    ready: deque[SimThread] | list[SimThread]
    pick: Callable[[], SimThread]

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Any],
        shared_bytes: int,
        seed: int,
        options: Options,
        context: Context,
        overlap: Overlap | None,
        cluster: Dim3,
    ) -> None:
        self.kernel, self.grid, self.block, self.args, self.shared_bytes = kernel, grid, block, args, shared_bytes
        self.options, self.context, self.overlap, self.cluster = options, context, overlap, cluster
        self.agents = AGENTS if mbarrier_init in kernel.ops else 0  # a block
        self.entry_site: Site = (kernel.function.__code__, 0)
        self.collective: Site | None = None  # where the lanes met for whom an operation runs now
        self.hub = getcurrent()
        self.progress = 0
        self.steps = 0
        self.started = 0
        self.most_shared = 0
        self.later: list[SimThread] = []
        self.polling: list[SimThread] = []
        self.resident: list[Block] = []
        self._retired: list[Block] = []
        self._random = random.Random(seed)
        self._shuffled = options.order == "random"
        if self._shuffled:
            self.ready = []
            self.pick = self._pick_any
        else:
            queue: deque[SimThread] = deque()
            self.ready, self.pick = queue, queue.popleft

    def _pick_any(self) -> SimThread:
        ready = self.ready
        i = int(self._random.random() * len(ready))
        ready[i], ready[-1] = ready[-1], ready[i]
        return ready.pop()

    def pause(self, thread: SimThread) -> None:
        """`thread` is at a scheduling point. In random order it may go on, or soon; else after everybody else."""
        chance = self._random.random() if self._shuffled else 1.0
        if chance < 0.5:
            return
        (self.ready if chance < 0.75 else self.later).append(thread)
        self.switch()

    def lands_early(self) -> bool:
        """Whether an asynchronous copy lands when it is issued rather than when it is waited for."""
        return self.options.late_async == "random" and self._random.random() < 0.5

    def switch(self) -> None:
        """Called by a thread that has put itself where it waits: run somebody else."""
        if self.ready:
            self.pick().greenlet.switch()  # type: ignore[union-attr]
        else:
            self.hub.switch()

    def wake(self, threads: Sequence[SimThread]) -> None:
        """Those of `threads` that wait can run; the one that calls this does not."""
        for t in threads:
            if t.wait is not None:
                t.wait = None
                self.ready.append(t)

    def retire(self, block: Block) -> None:
        """The last thread of `block` exited."""
        self._retired.append(block)

    def loop(self, clusters: Iterator[Sequence[Block]]) -> None:
        """Run every block, a few clusters of them at a time."""
        try:
            self._fill(clusters)
            idle, mark = 0, -1
            while self.resident:
                while self.ready:
                    self.pick().greenlet.switch()  # type: ignore[union-attr]
                if self._retired:
                    self._fill(clusters)
                    continue
                if self._poll():
                    continue
                idle = idle + 1 if self.progress == mark else 0
                mark = self.progress
                if not self.later or idle > self.options.idle_rounds:
                    raise report(self)
                self.ready.extend(self.later)
                self.later.clear()
        finally:
            for block in self.resident:
                for t in block.threads:
                    if t.greenlet is not None and not t.done:
                        t.greenlet.throw(GreenletExit)
                block.drop()

    def _poll(self) -> bool:
        woken = [t for t in self.polling if t.wait is not None and t.wait.ready is not None and t.wait.ready()]
        if woken:
            self.wake(woken)
            self.polling = [t for t in self.polling if t.wait is not None]
        return bool(woken)

    def _fill(self, clusters: Iterator[Sequence[Block]]) -> None:
        for block in self._retired:
            self.resident.remove(block)
            self.steps += sum(t.steps for t in block.threads)
            self.most_shared = max(self.most_shared, block.shared_used)
            block.drop()
        self._retired.clear()
        size = self.cluster.x * self.cluster.y * self.cluster.z
        while not self.resident or len(self.resident) + size <= self.options.resident:
            blocks = next(clusters, ())
            if not blocks:
                return
            self.resident += blocks
            self.started += len(blocks)
            for t in (t for b in blocks for t in b.threads):
                g = greenlet(functools.partial(t.run, self.kernel.function, self.args), self.hub)
                g.gr_context = self.context
                g.thread = t
                t.greenlet = g
                g.switch()
                self.ready.append(t)
