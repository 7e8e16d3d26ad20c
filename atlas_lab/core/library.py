"""Calls of libraries: functions that launch kernels of their own, which a program has beside launches of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np

from atlas_lab.core.call import Operand
from atlas_lab.core.enqueued import Enqueued, LaunchError
from atlas_lab.core.launch import Launch
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.lang import Needs
from atlas_lab.kernels.lang.types import Parameter


class Prepared(Protocol):
    """A call made ready for its arguments: enqueues on the stream it was prepared for. `description` says what the
    library chose."""

    @property
    def description(self) -> str: ...

    def __call__(self) -> None: ...


class Prepare(Protocol):
    """Makes a call ready: `tensors` and `addresses` in the order of its parameters, the handles of a stream and of its
    context. It enqueues nothing, and what it returns can be captured in a CUDA graph. Raises whatever the library
    raises."""

    def __call__(
        self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...], stream: int, context: int
    ) -> Prepared: ...


@dataclass(frozen=True)
class LibraryCall:
    """A function of a library as arms and runtimes see it; `name` stands in plans and records.

    `params` are pointers: `in`, one `out`, and the one called `workspace`, if any, whose contents nobody reads.
    `numpy` is what the interpreter computes: the array of the output from those of the inputs, in order. `missing`
    says why `library` cannot be called on this machine, in one sentence that names the extra to install; "" if it can.
    """

    name: str
    library: str
    params: tuple[Parameter, ...]
    needs: Needs
    prepare: Prepare
    missing: Callable[[], str]
    numpy: Callable[..., np.ndarray]
    workspace: str = ""

    def __post_init__(self) -> None:
        outputs = [p.name for p in self.params if p.writes and p.name != self.workspace]
        if len(outputs) != 1 or not all(p.mode in ("in", "out") and p.abi == "pointer" for p in self.params):
            raise LaunchError(f"library call {self.name}: found outputs {outputs}, expected pointers, one of them out")

    @property
    def output(self) -> int:
        """Position of the argument that it computes."""
        return next(i for i, p in enumerate(self.params) if p.writes and p.name != self.workspace)


@dataclass(frozen=True)
class LibraryLaunch(Enqueued):
    """One call of a library: `args` are contiguous tensors in the order of its parameters; an `Operand` among them
    stands for its values.

    What it launches is the library's, and so are grids and blocks. It never starts before what is before it is over.
    Raises LaunchError where counts, dtypes or layouts do not fit the call's parameters.
    """

    kind: ClassVar[str] = "library call"
    call: LibraryCall
    args: tuple[Any, ...]
    flops: int = 0
    pipe: str = "fma"
    quantizes: bool = False
    label: str = ""
    pdl: bool | None = field(default=False, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(a.data if isinstance(a, Operand) else a for a in self.args))
        where = f"library call {self.entry}"
        self._check_count(where)
        for a, p in zip(self.args, self.params, strict=True):
            if not isinstance(a, Tensor) or a.dtype != p.dtype.name:
                found = a.dtype if isinstance(a, Tensor) else type(a).__name__
                raise LaunchError(f"{where}: argument {p.name!r} is {found}, expected {p.dtype}")
            if not a.is_contiguous:
                raise LaunchError(f"{where}: argument {p.name!r} has strides {a.strides}, expected a contiguous tensor")
        self._check_pipe(where)

    @property
    def entry(self) -> str:
        return self.call.name

    @property
    def params(self) -> tuple[Parameter, ...]:
        return self.call.params

    @property
    def form(self) -> tuple[object, ...]:
        return (self.call,)

    @property
    def traffic(self) -> int:
        """As of a launch; what the library does with its workspace is not known and left out."""
        named = zip(self.args, self.params, strict=True)
        return sum(a.bytes for a, p in named if p.name != self.call.workspace)

    @property
    def said(self) -> str:
        """What results say of it in place of registers and, on the interpreter, of its numbers."""
        return (
            f"{self.title}: {self.call.library} launches kernels of its own; the interpreter computes its meaning in "
            "NumPy instead"
        )


def missing_of(calls: Iterable[LibraryCall]) -> str:
    """Why the first of them that cannot be made on this machine cannot; "" if all can."""
    return next((said for said in (c.missing() for c in calls) if said), "")


def after_libraries(launches: Sequence[Enqueued]) -> tuple[Enqueued, ...]:
    """The launches, those right after a library's call never dependent: the last that a library enqueues need not be a
    kernel, and only kernels have dependent launches."""
    out = list(launches[:1])
    for before, x in pairwise(launches):
        follows = isinstance(before, LibraryLaunch) and isinstance(x, Launch) and x.pdl
        out.append(replace(x, pdl=False) if follows and isinstance(x, Launch) else x)
    return tuple(out)
