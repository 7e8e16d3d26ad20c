"""Intrinsics: one object with two meanings, its PTX and what it does on the interpreter.

An `Op` called from Python runs `numpy`; Numba types and lowers the same object through `lang.lower`. The table of
them all is the modules beside this one; `intrinsic(...)` adds one from anywhere.
"""

from __future__ import annotations

import re
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

    @classmethod
    def parse(cls, architecture: str) -> Needs:
        """From "sm_89" or "sm_90a"; raises ValueError for another spelling."""
        match = re.fullmatch(r"sm_(\d+)(\d)(a?)", architecture)
        if match is None:
            raise ValueError(f"found architecture {architecture!r}, expected a spelling such as 'sm_89' or 'sm_90a'")
        return cls((int(match[1]), int(match[2])), match[3])

    def union(self, other: Needs) -> Needs:
        """What both need; raises ValueError where no architecture has both."""
        low, high = sorted((self, other), key=lambda n: n.capability)
        if low.suffix and high.capability != low.capability:
            raise ValueError(f"no architecture is both {low} and {high}")
        return Needs(high.capability, high.suffix or low.suffix)

    def met_by(self, capability: tuple[int, int]) -> bool:
        return self.capability == capability if self.suffix else self.capability <= capability

    def __str__(self) -> str:
        major, minor = self.capability
        return f"sm_{major}{minor}{self.suffix}" + ("" if self.suffix else " or later")


SM90 = Needs((9, 0))
SM90A = Needs((9, 0), "a")  # what later architectures lack, or have but slowly


@dataclass(frozen=True)
class Ptr:
    """Operand spec: a pointer, then (if `indexed`) an element index. `spaces` and `modes` say which are accepted: modes
    of parameters, or `waited`, an `in` pointer as `grid_wait_for` returns it."""

    spaces: tuple[str, ...] = ("global",)
    modes: tuple[str, ...] = ("in", "out", "inout", "waited")
    indexed: bool = True


@dataclass(frozen=True)
class PtrTo:
    """Result spec: a pointer to `dtype`."""

    dtype: Scalar
    space: str
    mode: str


@dataclass(frozen=True)
class Vec:
    """Operand or result spec: `count` registers of one type, a homogeneous tuple in kernel code."""

    dtype: Scalar
    count: int


@dataclass(frozen=True)
class Const:
    """Operand spec: an integer known at compile time, substituted into the PTX text (`{name}`)."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """Operand spec: an element type, named in the kernel."""

    name: str


Operand = Scalar | Vec | Ptr | Const | Dtype
Result = Scalar | Vec | PtrTo | None


class Op:
    """An intrinsic.

    `operands` and `result` describe registers in order; `ptx` is one asm text whose `$0…` count results first,
    then operands (a `Ptr` is one register: the address, index already applied; a `Const` or `Dtype` is none), or a
    function `(emit, *llvm values, **constants) -> llvm value` for one that takes several instructions. In the text
    `{space}` is the state space of the first pointer. `result` may be a function of what is known when compiling:
    one argument for each `Ptr` (its `PtrTo`), `Const` (an int) and `Dtype` (a Scalar), in order.
    `tied` operands (by position) are updated in place: results and those operands share registers.
    `convergent` operations involve the whole warp or block and are never moved into a branch.
    `numpy` is called with the operands as written in the kernel; None: only a GPU can run it.
    `unit_roundoff` bounds the relative error of one multiply-add. `section` cites the PTX ISA.
    """

    def __init__(
        self,
        name: str,
        operands: Iterable[Operand],
        result: Result | Callable[..., Result],
        *,
        ptx: str | Callable[..., Any],
        numpy: Callable[..., Any] | None,
        effect: Effect = Effect.PURE,
        needs: Needs = Needs(),
        section: str = "",
        tied: tuple[int, ...] = (),
        convergent: bool = False,
        unit_roundoff: float | None = None,
    ) -> None:
        self.name, self.operands, self.result = name, tuple(operands), result
        self.ptx, self.numpy, self.effect, self.needs, self.section = ptx, numpy, effect, needs, section
        self.tied, self.convergent, self.unit_roundoff = tied, convergent, unit_roundoff
        self.__name__ = name
        self.__doc__ = numpy.__doc__ if numpy is not None else None
        self.run: Callable[..., Any] = numpy or self._gpu_only

    @property
    def infers(self) -> bool:
        """Whether `result` is a function of the compile-time operands."""
        return callable(self.result) and not isinstance(self.result, Scalar)

    def _gpu_only(self, *args: Any) -> Any:
        raise RuntimeError(f"{self.name} has no NumPy meaning: it runs on a GPU only")

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def __repr__(self) -> str:
        return f"<intrinsic {self.name}>"
