"""How a simulated thread reaches memory: addresses checked, accesses remembered, values converted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from greenlet import greenlet

from atlas_lab.kernels.lang.types import READ_ONLY, Pointer, Scalar
from atlas_lab.simt.clocks import Knowledge, merge
from atlas_lab.simt.errors import Coordinates, Misaligned, OutOfBounds, ReadOnlyWrite, SimtError, StepLimit
from atlas_lab.simt.memory import ITEM, LAYOUTS, Layout, Memory, layout
from atlas_lab.simt.shadow import Access, check_gaps
from atlas_lab.simt.source import Site, place, site_of, spell

if TYPE_CHECKING:
    from atlas_lab.simt.block import Block
    from atlas_lab.simt.scheduler import Scheduler, Wait

E = TypeVar("E", bound=SimtError)


class Accesses:
    """The memory half of a thread."""

    __slots__ = (
        "_acquirable", "_fenced", "_last", "_left", "_seen", "block", "greenlet", "index", "proxy_fences",
        "proxy_fences_global", "scheduler", "spinning", "tid", "vc", "wait",
    )  # fmt: skip

    def __init__(self, block: Block, tid: int, index: Coordinates) -> None:
        self.block, self.tid, self.index = block, tid, index
        self.scheduler: Scheduler = block.scheduler
        self.vc = block.clocks.rows[tid]
        self.greenlet: greenlet | None = None
        self.wait: Wait | None = None
        self.spinning: str | None = None  # what it keeps doing while it waits for nothing in particular
        self._left = self.scheduler.options.step_limit
        self._last: Access | None = None
        self._seen: Any = None  # the last strong read: to see the same again is no progress
        self._acquirable: Knowledge | None = None  # what relaxed reads saw released, until a fence
        self.proxy_fences: list[int] = []  # epochs that ended with one, for shared memory
        self.proxy_fences_global: list[int] = []
        self._fenced: Knowledge | None = None  # what relaxed writes pass on: the state at the last fence

    @property
    def steps(self) -> int:
        return self.scheduler.options.step_limit - self._left

    def _step(self, count: int = 1) -> None:
        """Count a call of an intrinsic."""
        self._left -= count
        if self._left < 0:
            raise self.error(
                StepLimit, f"this thread took more than {self.scheduler.options.step_limit} steps; is a loop endless?"
            )

    def site(self) -> Site | None:
        """The kernel's current instruction."""
        return site_of(sys._getframe(1))

    def parked(self) -> Site | None:
        """The instruction at which this suspended thread waits."""
        return site_of(self.greenlet.gr_frame) if self.greenlet is not None else None

    def doing(self) -> str:
        """Why this suspended thread does not go on."""
        if self.wait is not None:
            return self.wait.describe()
        return f"repeat {self.spinning or 'something'} at {spell(self.parked())}"

    def access(self, strong: bool, fresh: bool = False) -> Access:
        """The record of an access made now; repeated ones in one epoch share it unless it must be `fresh`."""
        site = self.scheduler.collective or site_of(sys._getframe(2))
        code, at = site if site is not None else (None, 0)
        clock = self.vc[self.tid]
        last = self._last
        if (
            last is not None and last.at == at and last.code is code and last.clock == clock
            and last.strong is strong and not fresh
        ):  # fmt: skip
            return last
        made = Access(self, clock, code, at, strong)
        if not fresh:
            self._last = made
        return made

    def error(
        self,
        kind: type[E],
        text: str,
        *,
        memory: Memory | None = None,
        access: Access | None = None,
        site: Site | None = None,
    ) -> E:
        """An error of this thread at its current line, or at that of `access` or `site`."""
        if access is not None and access.code is not None:
            site = access.code, access.at
        site = site or site_of(sys._getframe(1)) or self.scheduler.entry_site
        file, line = place(site)
        return kind(
            text,
            kernel=self.scheduler.kernel.entry,
            block=self.block.index,
            thread=self.index,
            file=file,
            line=line,
            buffer=memory.name if memory is not None else None,
        )

    def read(self, p: Pointer, index: int, unit: Scalar, count: int, order: str = "weak") -> tuple[Any, ...]:
        if order != "weak":
            return self._strong_read(p, index, unit, count, order)
        self._left -= 1
        form = LAYOUTS.get((unit, count)) or layout(unit, count)
        m: Memory = p.buffer
        at = p.offset + index * ITEM[p.dtype]
        width = form.width
        if at < 0 or at + width > m.size or at & (width - 1) or width > m.align or self._left < 0:
            self.locate(p, index, width, width, "read of")
        if m.watched:
            if m.gaps is not None:
                check_gaps(self, m, at, width)
            if m.shadow is not None:
                m.shadow.read(self, at, width, self.access(False))
        if form.unpack is not None:
            return form.unpack(m.bytes, at)
        first = at >> 2
        return (m.floats[first],) if count == 1 else tuple(m.floats[first : first + count])

    def write(self, p: Pointer, index: int, unit: Scalar, values: Sequence[Any], order: str = "weak") -> None:
        if order != "weak":
            return self._strong_write(p, index, unit, values, order)
        self._left -= 1
        count = len(values)
        form = LAYOUTS.get((unit, count)) or layout(unit, count)
        m: Memory = p.buffer
        at = p.offset + index * ITEM[p.dtype]
        width = form.width
        wrong = at < 0 or at + width > m.size or at & (width - 1) or width > m.align or self._left < 0
        if wrong or p.mode in READ_ONLY:
            self._locate_write(p, index, width)
        if m.watched:
            if m.shadow is not None:
                m.shadow.write(self, at, width, self.access(False))
            if m.gaps is not None:
                m.gaps[at : at + width] = b"\1" * width
        self.scheduler.progress += 1
        self._store(m, at, form, values)
        return None

    @staticmethod
    def _store(m: Memory, at: int, form: Layout, values: Sequence[Any]) -> None:
        if form.pack is not None:
            mask = form.mask
            if form.registers == 1:
                form.pack(m.bytes, at, values[0] & mask)
            else:
                form.pack(m.bytes, at, *[v & mask for v in values])
        else:
            first = at >> 2
            m.floats[first : first + form.registers] = values

    @staticmethod
    def _load(m: Memory, at: int, form: Layout) -> tuple[Any, ...]:
        if form.unpack is not None:
            return form.unpack(m.bytes, at)
        return tuple(m.floats[at >> 2 : (at >> 2) + form.registers])

    def locate(self, p: Pointer, index: int, width: int, align: int, doing: str) -> int:
        """The byte offset of an access of `width` bytes, or an error that says what is wrong with it."""
        self._step(0)
        m: Memory = p.buffer
        at: int = p.offset + index * ITEM[p.dtype]
        if width and (at < 0 or at + width > m.size):
            text = f"{doing} bytes [{at}, {at + width}) of {m}, whose size is {m.size}"
            raise self.error(OutOfBounds, text, memory=m)
        if at % align or align > m.align:
            more = f"; {m} is only aligned to {m.align}" if align > m.align else ""
            raise self.error(
                Misaligned, f"{doing} bytes [{at}, {at + width}) of {m} is not aligned to {align}{more}", memory=m
            )
        return at

    def _locate_write(self, p: Pointer, index: int, width: int) -> int:
        if p.mode in READ_ONLY:
            raise self.error(
                ReadOnlyWrite, f"write of element {index} through a pointer declared In to {p.buffer}", memory=p.buffer
            )
        return self.locate(p, index, width, width, "write of")

    def yield_(self, reason: str) -> None:
        """A scheduling point: others run before this thread goes on."""
        raise NotImplementedError

    def _strong_read(self, p: Pointer, index: int, unit: Scalar, count: int, order: str) -> tuple[Any, ...]:
        form = layout(unit, count)
        at = self.locate(p, index, form.width, form.width, "read of")
        m: Memory = p.buffer
        self.yield_(f"a load ({order}) of bytes [{at}, {at + form.width}) of {m}")
        check_gaps(self, m, at, form.width)
        if m.shadow is not None:
            m.shadow.read(self, at, form.width, self.access(True))
        values = self._load(m, at, form)
        self._note(m, at, values)
        self._take(m, at, order)
        return values

    def _strong_write(self, p: Pointer, index: int, unit: Scalar, values: Sequence[Any], order: str) -> None:
        form = layout(unit, len(values))
        at = self._locate_write(p, index, form.width)
        m: Memory = p.buffer
        self.yield_(f"a store ({order}) to bytes [{at}, {at + form.width}) of {m}")
        if m.shadow is not None:
            m.shadow.write(self, at, form.width, self.access(True))
        if m.gaps is not None:
            m.gaps[at : at + form.width] = b"\1" * form.width
        self._store(m, at, form, values)
        self.scheduler.progress += 1
        passed = self._pass(order)
        if passed is None:
            m.sync.pop(at, None)
        else:
            m.sync[at] = passed

    def update(self, p: Pointer, index: int, unit: Scalar, change: Callable[[Any], Any], order: str = "relaxed") -> Any:
        form = layout(unit, 1)
        at = self._locate_write(p, index, form.width)
        m: Memory = p.buffer
        self.yield_(f"an atomic on bytes [{at}, {at + form.width}) of {m}")
        check_gaps(self, m, at, form.width)
        if m.shadow is not None:
            access = self.access(True)
            m.shadow.read(self, at, form.width, access)
            m.shadow.write(self, at, form.width, access)
        old = self._load(m, at, form)[0]
        self._store(m, at, form, (change(old),))
        self._note(m, at, (old, self._load(m, at, form)[0]))
        self._take(m, at, order)
        passed = self._pass(order)
        if passed is not None:  # a read-modify-write continues the release before it
            m.sync[at] = merge(m.sync.get(at), passed)
        return old

    def _note(self, m: Memory, at: int, values: tuple[Any, ...]) -> None:
        seen = (m, at, values)
        if seen != self._seen:
            self._seen = seen
            self.scheduler.progress += 1

    def _take(self, m: Memory, at: int, order: str) -> None:
        known = m.sync.get(at)
        if known is None:
            return
        if order in ("acquire", "acq_rel"):
            self.block.clocks.acquire(self.tid, known)
        else:
            self._acquirable = merge(self._acquirable, known)

    def _pass(self, order: str) -> Knowledge | None:
        return self.block.clocks.release(self.tid) if order in ("release", "acq_rel") else self._fenced

    def fence(self, scope: str) -> None:
        self._step()
        clocks = self.block.clocks
        if self._acquirable is not None:
            clocks.acquire(self.tid, self._acquirable)
            self._acquirable = None
        self._fenced = clocks.release(self.tid)
