"""Which launches may still run when a dependent one starts: kept by the interpreter, which runs one after another.

`simt.dependent` says why these. They are those of one stream, across programs and runs of them: the first launch of a
program, if dependent, overlaps with whatever was enqueued before it. Whatever waits for the stream ends them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.runtime.bind import AnyResolved, Place, Resolved, extent
from atlas_lab.simt import Overlap, Span


class InFlight:
    """The launches that may not be over, latest last."""

    def __init__(self) -> None:
        self._launches: tuple[AnyResolved, ...] = ()

    def overlap(self, x: Resolved) -> Overlap | None:
        """What `x` may not touch before it waits; None for a launch that is not dependent."""
        return Overlap([s for before in self._launches for s in _spans(before)]) if x.launch.pdl else None

    def ran(self, x: AnyResolved, overlap: Overlap | None) -> None:
        """`x` ran: those before it are over when the next starts, unless it let that start early."""
        self._launches = (*self._launches, x) if overlap is not None and overlap.early else (x,)

    def end(self) -> None:
        """Somebody waited for the stream."""
        self._launches = ()


def _spans(x: AnyResolved) -> Iterator[Span]:
    for p, t, a in zip(x.launch.params, x.launch.args, x.arguments, strict=True):
        if isinstance(t, TensorMap):
            t = t.view
        if isinstance(a, Place) and isinstance(t, Tensor):
            for writes in (True,) * p.writes + (False,) * p.reads:
                yield Span(a.buffer.memory, a.offset, extent(t), writes, x.launch.entry)
