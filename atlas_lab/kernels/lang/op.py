"""Intrinsics: one object with two meanings, its PTX and what it does on the interpreter.

An `Op` called from Python runs `numpy`; Numba types and lowers the same object through `lang.lower`. The table of
them all is the modules beside this one; `intrinsic(...)` adds one from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from atlas_lab.kernels.lang.types import Scalar


class Effect(Enum):
    """What the compiler and the interpreter may assume. PURE: arithmetic, or a load of memory that nothing
    writes during the grid: may be moved and removed. READ: may not pass a write or a synchronisation. WRITE:
    changes memory. SYNC: orders threads; nothing passes it."""

    PURE = "pure"
    READ = "reads"
    WRITE = "writes"
    SYNC = "synchronises"


@dataclass(frozen=True, order=True)
class Needs:
    """Hardware an intrinsic needs: at least `capability`; with `suffix` "a", exactly that architecture."""

    capability: tuple[int, int] = (7, 5)
    suffix: str = ""

    def union(self, other: Needs) -> Needs:
        """What both need; raises ValueError where no architecture has both."""
        high, low = max(self, other, key=lambda n: n.capability), min(self, other, key=lambda n: n.capability)
        if low.suffix and high.capability != low.capability:
            raise ValueError(f"no architecture is both {low} and {high}")
        return Needs(high.capability, high.suffix or low.suffix)

    def met_by(self, capability: tuple[int, int]) -> bool:
        return self.capability == capability if self.suffix else self.capability <= capability

    def __str__(self) -> str:
        major, minor = self.capability
        return f"sm_{major}{minor}{self.suffix}" + ("" if self.suffix else " or later")


@dataclass(frozen=True)
class Ptr:
    """Operand spec: a pointer, then an element index. `spaces` and `modes` say which pointers are accepted."""

    spaces: tuple[str, ...] = ("global",)
    modes: tuple[str, ...] = ("in", "out", "inout")


@dataclass(frozen=True)
class Vec:
    """Operand or result spec: `count` registers of one type, a homogeneous tuple in kernel code."""

    dtype: Scalar
    count: int


@dataclass(frozen=True)
class Const:
    """Operand spec: an integer known at compile time, substituted into the PTX text (`{name}`)."""

    name: str


Operand = Scalar | Vec | Ptr | Const


class Op:
    """An intrinsic.

    `operands` and `result` describe registers in order; `ptx` is one asm text whose `$0…` count results first,
    then operands (a `Ptr` is one register: the address, index already applied; a `Const` is none), or a function
    `(emit, *llvm values) -> llvm value` for one that takes several instructions. `tied` operands (by position)
    are updated in place: results and those operands share registers. `numpy` is called with the operands as
    written in the kernel. `section` cites the PTX ISA.
    """

    def __init__(
        self,
        name: str,
        operands: Iterable[Operand],
        result: Scalar | Vec | None,
        *,
        ptx: str | Callable[..., Any],
        numpy: Callable[..., Any],
        effect: Effect = Effect.PURE,
        needs: Needs = Needs(),
        section: str = "",
        tied: tuple[int, ...] = (),
    ) -> None:
        self.name, self.operands, self.result = name, tuple(operands), result
        self.ptx, self.numpy, self.effect, self.needs, self.section = ptx, numpy, effect, needs, section
        self.tied = tied
        self.__name__ = name
        self.__doc__ = numpy.__doc__

    def __call__(self, *args: Any) -> Any:
        return self.numpy(*args)

    def __repr__(self) -> str:
        return f"<intrinsic {self.name}>"
