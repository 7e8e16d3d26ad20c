"""A simulated CUDA thread: what the language's intrinsics ask of it (`lang.machine.Thread`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from atlas_lab.kernels.lang.types import Pointer, Scalar
from atlas_lab.simt import barrier as barriers
from atlas_lab.simt.asynchronous import Asynchronous
from atlas_lab.simt.copies import Copies
from atlas_lab.simt.errors import AsyncError, Coordinates, Deadlock, SimtError
from atlas_lab.simt.source import raised_at, site_of, spell
from atlas_lab.simt.warp import Combine, Warp
from atlas_lab.simt.warpgroup import SIZE

if TYPE_CHECKING:
    from atlas_lab.kernels.lang.wgmma import Product
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.scheduler import Wait


REGISTERS = 65536  # of 32 bits, of an SM


class Dim3(NamedTuple):
    """Coordinates or extents."""

    x: int
    y: int
    z: int


class SimThread(Asynchronous):
    """One thread of a resident block; `greenlet` runs the kernel function."""

    __slots__ = (
        "_commits", "_copies", "_registers_fenced", "blockDim", "blockIdx", "gridDim", "lane", "result",
        "threadIdx", "warp", "warp_state",
    )  # fmt: skip
    warp_state: Warp

    def __init__(self, block: Block, tid: int, index: Coordinates) -> None:
        super().__init__(block, tid, index)
        self.lane, self.warp = tid & 31, tid >> 5
        self.threadIdx, self.blockIdx = Dim3(*index), block.blockIdx
        self.blockDim, self.gridDim = block.scheduler.block, block.scheduler.grid
        self.result: Any = None
        self._copies: Copies | None = None
        self._registers_fenced = False  # since the last commit or wait of products
        self._commits = 0

    def yield_(self, reason: str) -> None:
        self._step()
        self.spinning = reason
        self.scheduler.pause(self)

    def block_on(self, wait: Wait) -> None:
        """Wait until `wait` is ready: polled if it says how, else until something wakes this thread."""
        self.wait = wait
        if wait.ready is not None:
            self.scheduler.polling.append(self)
        self.scheduler.switch()

    def warp_op(self, name: str, mask: int, arg: Any, combine: Combine) -> Any:
        self._left -= 1
        if self._left < 0:
            self._step()
        site = site_of(sys._getframe(1))
        code, at = site if site is not None else (None, 0)
        warp = self.warp_state
        lane = self.lane
        g = warp.gatherings.get(mask)
        if g is None:
            g = warp.open(self, name, mask, code, at, combine)
        elif g.code is not code or g.at != at or g.name != name:
            raise warp.divergent(self, g, name, code, at)
        g.args[lane] = arg
        g.here |= 1 << lane
        g.left -= 1
        if g.left:
            self.wait = g
            self.scheduler.switch()
            return self.result
        results = warp.finish(g)
        ready = self.scheduler.ready
        mine = None
        for thread, result in zip(g.who, results, strict=True):
            if thread is self:
                mine = result
            else:
                thread.result = result
                thread.wait = None
                ready.append(thread)
        return mine

    def barrier(self, ident: int, count: int | None) -> None:
        self._step()
        met = barriers.meet(self, ident, count, True)
        if self.block.barriers.get(ident) is met:
            self.wait = met
            self.scheduler.switch()

    def arrive(self, ident: int, count: int) -> None:
        self._step()
        barriers.meet(self, ident, count, False)

    def copy_async(self, dst: Pointer, dst_index: int, src: Pointer, src_index: int, size: int, valid: int) -> None:
        self._step()
        self._copying().issue(dst, dst_index, src, src_index, size, valid)

    def commit_async(self) -> None:
        self._step()
        self._copying().commit()

    def wait_async(self, pending: int) -> None:
        self._step()
        if pending < 0:
            raise self.error(AsyncError, f"found {pending} asynchronous groups to leave pending, expected 0 or more")
        self._copying().wait(pending)

    def shared_address(self, p: Pointer, index: int) -> int:
        self._step()
        return self.block.addresses.of(p.buffer) + self.locate(p, index, 16, 16, "matrix descriptor of")

    def wgmma(self, product: Product, acc: Any, a: Any, b: int, scale_d: int) -> Any:
        self._step()
        group = self.block.group_of(self)
        arg = product, acc, a, b, bool(scale_d), self._registers_fenced, self._commits
        return group.meet(self, product.name, arg, group.products.issue)

    def wgmma_fence(self) -> None:
        self._step()
        self._registers_fenced = True

    def wgmma_commit(self) -> None:
        self._step()
        self._registers_fenced = False
        self._commits += 1

    def wgmma_wait(self, acc: Any, pending: int) -> Any:
        self._step()
        self._registers_fenced = False
        group = self.block.group_of(self)
        return group.meet(self, "wgmma_wait", (acc, pending, self._commits), group.products.wait)

    def set_max_registers(self, count: int, way: str) -> None:
        self._step()
        self.block.group_of(self).meet(self, f"setmaxnreg_{way}", count, self._set_max_registers)

    def _set_max_registers(self, threads: Sequence[Any], counts: Sequence[int]) -> list[None]:
        group = self.block.group_of(self)
        group.max_registers = counts[0]
        total = sum(len(g.threads) * (g.max_registers or 0) for g in self.block.groups.values())
        if total > REGISTERS:
            raise self.error(
                Deadlock,
                f"warpgroup {group.number} waits for {counts[0]} registers a thread: found {total} set by the block's "
                f"warpgroups, expected at most the {REGISTERS} of an SM",
                site=self.scheduler.collective,
            )
        return [None] * len(threads)

    def grid_wait(self) -> None:
        self._step()
        if self.scheduler.overlap is not None:
            self.scheduler.overlap.wait(self)

    def launch_dependents(self) -> None:
        self._step()
        if self.scheduler.overlap is not None:
            self.scheduler.overlap.release(self)

    def _copying(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self)
        return self._copies

    def shared(self, site: Any, dtype: Scalar, count: int, align: int) -> Pointer:
        self._step()
        return self.block.static_shared(self, site, dtype, count, align)

    def dynamic_shared(self, dtype: Scalar, offset: int) -> Pointer:
        self._step()
        return self.block.dynamic_shared(self, dtype, offset)

    def run(self, function: Callable[..., None], args: Sequence[Any]) -> None:
        """The whole life of the thread, in its greenlet. Pauses at once: a greenlet counts its recursion depth from
        that of whoever started it, so all are started by the hub, and continued by one another."""
        self.scheduler.hub.switch()
        try:
            function(*args)
        except SimtError:
            raise
        except Exception as e:
            at = spell(raised_at(e))
            e.add_note(f"in kernel {self.scheduler.kernel.entry}, block {self.block.index}, thread {self.index}, {at}")
            raise
        if self._copies is not None:
            self._copies.finish()
        group = self.block.groups.get(self.tid // SIZE)
        if group is not None:
            group.leave(self)
        self.finish_stores()
        self.done = True
        self.warp_state.leave(self, "exits")
        self.block.leave(self)

    def drop(self) -> None:
        """The block ended: keep only what reports name."""
        self.greenlet = self.wait = self.result = self._copies = self._last = self._seen = None
        self._groups = None
        self._initialised.clear()
        self._acquirable = self._fenced = None
        self.vc = self.vc[:0]
        del self.warp_state
