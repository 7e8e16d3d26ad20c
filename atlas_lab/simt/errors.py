"""What the interpreter reports: one sentence each, with the place in the kernel as attributes too."""

# ruff: noqa: N818 - a report is named after what it reports
from __future__ import annotations

Coordinates = tuple[int, int, int]


class SimtError(Exception):
    """A kernel that cannot be run, or did what a GPU would punish or silently get wrong.

    `kernel` is the entry name, `block` and `thread` coordinates, `file` and `line` the place in the kernel's
    source, `buffer` the memory concerned; each is None where it does not apply.
    """

    def __init__(
        self,
        text: str,
        *,
        kernel: str | None = None,
        block: Coordinates | None = None,
        thread: Coordinates | None = None,
        file: str | None = None,
        line: int | None = None,
        buffer: str | None = None,
    ) -> None:
        self.kernel, self.block, self.thread = kernel, block, thread
        self.file, self.line, self.buffer = file, line, buffer
        parts = [
            f"kernel {kernel}" if kernel else "",
            f"block {block}" if block else "",
            f"thread {thread}" if thread else "",
            f"{file}:{line}" if file else "",
        ]
        where = ", ".join(p for p in parts if p)
        super().__init__(f"{where}: {text}" if where else text)


class OutOfBounds(SimtError):
    """An access outside a buffer or outside the launch's shared memory."""


class Misaligned(SimtError):
    """An access that is not aligned to its own width, or wider than its memory's guaranteed alignment."""


class Uninitialised(SimtError):
    """A read of global memory that nothing wrote."""


class ReadOnlyWrite(SimtError):
    """A write through a pointer declared `In`."""


class PoisonRead(SimtError):
    """A read of shared memory that was never written, or that an asynchronous copy still owns."""


class Race(SimtError):
    """Two accesses of the same bytes, one of them a write, that nothing orders."""


class Deadlock(SimtError):
    """Nothing can continue; the sentence says who waits for what."""


class StepLimit(SimtError):
    """A thread took more steps than `Options.step_limit`."""


class MissingLane(SimtError):
    """A lane that a warp collective or barrier needs exited, does not exist or waits elsewhere."""


class DivergentCollective(SimtError):
    """Lanes of one warp meet at different intrinsics or at different lines."""


class BarrierMismatch(SimtError):
    """Threads disagree about a named barrier, or its count is impossible."""


class Unwaited(SimtError):
    """A dependent launch that touches what the launches before it may still use, or never waits for them."""


class MbarrierError(SimtError):
    """An mbarrier used before it is initialised, or with counts, bytes or a parity that cannot be."""


class Unfenced(SimtError):
    """Registers or memory that an asynchronous operation or another block uses, with no fence between their writing
    and that."""


class AsyncError(SimtError):
    """An asynchronous copy or matrix product that is malformed, never committed or never waited for."""
