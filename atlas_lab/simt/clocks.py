"""Happens-before: what each thread of a block knows of every other thread's progress.

A thread's epoch counts its releases; an access carries the epoch it was made in, and happened before thread t
if t knows that epoch. Inside a block the knowledge is a dense matrix; of other blocks it is kept only where a
release in one was acquired in another, which is rare.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int32]
# By serial number of the block: the epochs of its threads. Rows are never changed once they are in one.
Knowledge = dict[int, Row]


def merge(a: Knowledge | None, b: Knowledge | None) -> Knowledge:
    """Everything known to either."""
    if not a or not b or a is b:
        return a or b or {}
    out = dict(a)
    for serial, row in b.items():
        out[serial] = np.maximum(out[serial], row) if serial in out else row
    return out


class Clocks:
    """The knowledge of one block's threads. `rows[t][u]` is the last epoch of u that t knows.

    Beyond the threads there are columns of `agents`, whose epochs others count and who know nothing themselves.
    """

    __slots__ = ("_diagonal", "_far", "_foreign", "_matrix", "rows", "serial")

    def __init__(self, serial: int, threads: int, agents: int = 0) -> None:
        self.serial = serial
        self._matrix: npt.NDArray[np.int32] = np.zeros((threads, threads + agents), np.int32)
        self._diagonal: Row = self._matrix.reshape(-1)[:: threads + agents + 1]
        self._diagonal[:] = 1
        self.rows = [memoryview(row) for row in self._matrix]
        self._foreign: list[Knowledge | None] = [None] * threads
        self._far = False

    def meet(self, who: slice | list[int], more: Knowledge | None = None) -> None:
        """The threads learn all that any of them, and `more`, knows. `advance` must follow."""
        matrix = self._matrix
        top = matrix[who].max(axis=0)
        if more and self.serial in more:
            np.maximum(top, more[self.serial], out=top)
        matrix[who] = top
        if self._far or (more and len(more) > (self.serial in more)):
            self._far = True
            indexes = range(*who.indices(len(matrix))) if isinstance(who, slice) else who
            self._meet_far(indexes, more)

    def _meet_far(self, who: Iterable[int], more: Knowledge | None) -> None:
        known = {k: v for k, v in (more or {}).items() if k != self.serial}
        for t in who:
            known = merge(known, self._foreign[t])
        for t in who:
            self._foreign[t] = known

    def advance(self, who: slice | list[int]) -> None:
        """The threads' later accesses are not covered by what others learned so far."""
        self._diagonal[who] += 1

    def only(self, column: int, epoch: int) -> Row:
        """Knowledge of one epoch of one thread or agent."""
        row = np.zeros(self._matrix.shape[1], np.int32)
        row[column] = epoch
        return row

    def release(self, thread: int) -> Knowledge:
        """What `thread` passes on by releasing now."""
        out = dict(self._foreign[thread] or {})
        out[self.serial] = self._matrix[thread].copy()
        self._diagonal[thread] += 1
        return out

    def acquire(self, thread: int, knowledge: Knowledge) -> None:
        """`thread` learns what a release passed on."""
        own = knowledge.get(self.serial)
        if own is not None:
            row = self._matrix[thread]
            np.maximum(row, own, out=row)
        if len(knowledge) > (own is not None):
            self._far = True
            rest = {k: v for k, v in knowledge.items() if k != self.serial}
            self._foreign[thread] = merge(self._foreign[thread], rest)

    def knows(self, thread: int, serial: int, other: int, epoch: int) -> bool:
        """Whether `thread` knows that thread `other` of block `serial`, another block, got past `epoch`."""
        known = (self._foreign[thread] or {}).get(serial)
        return known is not None and epoch <= int(known[other])
