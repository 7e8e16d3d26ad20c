"""Storage that simulated threads address: bytes, what is known about them, and how a register reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atlas_lab.kernels.lang.types import SCALARS, FloatScalar, Scalar

if TYPE_CHECKING:
    from atlas_lab.simt.clocks import Knowledge
    from atlas_lab.simt.mbarrier import Mbarrier
    from atlas_lab.simt.shadow import Shadow

# Uninitialised bytes: a NaN in every floating-point format and -1 as an integer, so that a use shows.
POISON = 0xFF


class Memory:
    """One allocation. `align` is what its base address is guaranteed to be a multiple of.

    `gaps` marks initialised bytes with 1 and is None when all are. `shadow` remembers accesses where races are
    looked for. `sync` keeps, for each address, what a release there passes on. `watched` says that an access
    has more to check than its address. `mbarriers` are those in it, by byte offset.
    """

    __slots__ = ("align", "bytes", "floats", "gaps", "mbarriers", "name", "shadow", "size", "space", "sync", "watched")

    def __init__(self, name: str, size: int, space: str, align: int) -> None:
        self.name, self.size, self.space, self.align = name, size, space, align
        padded = max(16, -(-size // 16) * 16)
        self.bytes = bytearray(b"\xff" * padded)
        self.floats: npt.NDArray[np.float32] = np.frombuffer(self.bytes, np.float32)
        self.gaps: bytearray | None = None
        self.shadow: Shadow | None = None
        self.sync: dict[int, Knowledge] = {}
        self.watched = False
        self.mbarriers: dict[int, Mbarrier] = {}

    def __str__(self) -> str:
        return f"{self.space} buffer {self.name!r}" if self.space == "global" else self.name

    __repr__ = __str__


class Layout(NamedTuple):
    """How `count` registers of one type lie in memory. `unpack` and `pack` are None for f32, which keeps its
    payload only through a NumPy view."""

    width: int
    unpack: Callable[[bytearray, int], tuple[Any, ...]] | None
    pack: Callable[..., None] | None
    mask: int
    registers: int


ITEM: dict[Scalar, int] = {s: s.bytes for s in SCALARS.values()}
LAYOUTS: dict[tuple[Scalar, int], Layout] = {}
_CODE = {8: "b", 16: "h", 32: "i", 64: "q"}


def layout(unit: Scalar, count: int) -> Layout:
    """The layout of `count` registers of `unit`; the same object every time."""
    known = LAYOUTS.get((unit, count))
    if known is None:
        code = _CODE[unit.bits]
        if isinstance(unit, FloatScalar):
            known = Layout(4 * count, None, None, 0, count)
        else:
            read = struct.Struct(f"<{count}{code if unit.signed else code.upper()}")
            write = struct.Struct(f"<{count}{code.upper()}")
            known = Layout(read.size, read.unpack_from, write.pack_into, unit.mask, count)
        LAYOUTS[unit, count] = known
    return known
