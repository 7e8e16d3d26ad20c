"""A resident block: its threads, warps, barriers, clocks and shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas_lab.kernels.lang.types import Pointer, Scalar
from atlas_lab.simt.barrier import Barrier
from atlas_lab.simt.clocks import Clocks
from atlas_lab.simt.cluster import Cluster
from atlas_lab.simt.errors import Coordinates, OutOfBounds
from atlas_lab.simt.mbarrier import Agent
from atlas_lab.simt.memory import Memory
from atlas_lab.simt.operands import Addresses
from atlas_lab.simt.shadow import Shadow
from atlas_lab.simt.source import place
from atlas_lab.simt.thread import Dim3, SimThread
from atlas_lab.simt.warp import Warp
from atlas_lab.simt.warpgroup import SIZE, Warpgroup

if TYPE_CHECKING:
    from atlas_lab.simt.scheduler import Scheduler

DYNAMIC_ALIGN = 1024


class Block:
    """One block from its start until its last thread exits."""

    def __init__(self, scheduler: Scheduler, serial: int, index: Coordinates) -> None:
        self.scheduler, self.serial, self.index = scheduler, serial, index
        self.blockIdx = Dim3(*index)
        dim = scheduler.block
        count = dim.x * dim.y * dim.z
        self.clocks = Clocks(serial, count, scheduler.agents)
        self.threads = [SimThread(self, t, (t % dim.x, t // dim.x % dim.y, t // (dim.x * dim.y))) for t in range(count)]
        self.warps = [Warp(self, w, self.threads[w * 32 : w * 32 + 32]) for w in range(-(-count // 32))]
        for t in self.threads:
            t.warp_state = self.warps[t.warp]
        self.live = count
        self.cluster: Cluster
        self.rank = 0
        self._agents = [Agent(self, count + i) for i in range(scheduler.agents)]
        self._agents_given = 0
        self.barriers: dict[int, Barrier] = {}
        self.groups: dict[int, Warpgroup] = {}  # those that met at something
        self.addresses = Addresses()
        self.shared_used = 0
        self._memories: list[Memory] = []
        self._static: dict[Any, Pointer] = {}
        self._dynamic: Memory | None = None

    def _memory(self, name: str, size: int, align: int) -> Memory:
        m = Memory(name, size, "shared", align)
        if self.scheduler.options.checks:
            m.shadow, m.watched = Shadow(m, poison=True), True
        self.shared_used += size
        self.addresses.add(m)
        self._memories.append(m)
        return m

    def agent(self) -> Agent:
        """Who copies for a new mbarrier; beyond AGENTS of them, they share."""
        given = self._agents[self._agents_given % len(self._agents)]
        self._agents_given += 1
        return given

    def holds(self, memory: Memory) -> bool:
        """Whether it is of this block's shared memory."""
        return any(m is memory for m in self._memories)

    def counterpart(self, memory: Memory, owner: Block) -> Memory:
        """This block's shared memory for what `memory` is in `owner`, a block of the same cluster."""
        if memory is owner._dynamic:
            return self._dynamic_memory()
        key, p = next((key, p) for key, p in owner._static.items() if p.buffer is memory)
        if key not in self._static:
            made = self._memory(memory.name, memory.size, memory.align)
            self._static[key] = Pointer(made, 0, p.dtype, "shared", "inout")
        found: Memory = self._static[key].buffer
        return found

    def _dynamic_memory(self) -> Memory:
        if self._dynamic is None:
            self._dynamic = self._memory("dynamic shared memory", self.scheduler.shared_bytes, DYNAMIC_ALIGN)
        return self._dynamic

    def group_of(self, thread: SimThread) -> Warpgroup:
        """The warpgroup of a thread."""
        number = thread.tid // SIZE
        if number not in self.groups:
            self.groups[number] = Warpgroup(self, number)
        return self.groups[number]

    def static_shared(self, thread: SimThread, site: Any, dtype: Scalar, count: int, align: int) -> Pointer:
        """The array of one place in the source; made by the first thread that comes there."""
        key = (site if site is not None else thread.site(), dtype, count)
        known = self._static.get(key)
        if known is None:
            file, line = place(thread.site())
            memory = self._memory(f"shared memory declared at {file}:{line}", count * dtype.bytes, align)
            known = self._static[key] = Pointer(memory, 0, dtype, "shared", "inout")
        return known

    def dynamic_shared(self, thread: SimThread, dtype: Scalar, offset: int) -> Pointer:
        """The launch's dynamic shared memory from byte `offset`."""
        memory = self._dynamic_memory()
        if not 0 <= offset <= memory.size:
            raise thread.error(
                OutOfBounds,
                f"dynamic shared memory from byte {offset} of the {memory.size} bytes that the launch gives",
                memory=memory,
            )
        return Pointer(memory, offset, dtype, "shared", "inout")

    def leave(self, thread: SimThread) -> None:
        """`thread` exited: barriers of the whole block no longer wait for it."""
        self.live -= 1
        thread.warp_state.live -= 1
        self.scheduler.progress += 1
        for barrier in list(self.barriers.values()):
            if barrier.whole and self.live and barrier.complete:
                barrier.open()
        self.cluster.leave()
        if not self.live:
            for memory in self._memories:
                for b in memory.mbarriers.values():
                    b.finish(thread, "the block ends")
                if len(self.cluster.blocks) > 1:
                    memory.size, memory.name = 0, f"{memory.name} of block {self.index}, which has exited"
            self.scheduler.retire(self)

    def drop(self) -> None:
        """Let go of all that only a running block needs: remembered accesses keep its threads alive."""
        for t in self.threads:
            t.drop()
        self.threads, self.warps = [], []
        self.clocks = Clocks(self.serial, 0)
        self._static.clear()
        for memory in self._memories:
            memory.mbarriers.clear()
        self._memories.clear()
        self._agents.clear()
        del self.cluster
        self._dynamic = None
        self.barriers.clear()
        self.groups.clear()
