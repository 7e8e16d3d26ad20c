"""What launches of kernels and calls of libraries have in common: what they read and write, and how much they do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from atlas_lab.core.target import PIPES
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels.lang.types import Parameter


class LaunchError(ValueError):
    """A launch whose arguments do not fit its kernel; one sentence."""


class Enqueued(ABC):
    """One thing that a program enqueues on its stream, with `args` in the order of `params`.

    `pipe` is the math unit that does the work (`fma`, `mma_bf16`, …) and `flops` how much, for the roofline. `pdl`
    lets it start before what is before it in the stream is over. `quantizes`: it makes the quantized operand of x that
    launches after it multiply.
    """

    kind: ClassVar[str]
    args: tuple[Any, ...]
    flops: int
    pipe: str
    pdl: bool | None
    quantizes: bool
    label: str

    @property
    @abstractmethod
    def entry(self) -> str:
        """What plans, records and results call it."""

    @property
    @abstractmethod
    def params(self) -> tuple[Parameter, ...]: ...

    @property
    @abstractmethod
    def form(self) -> tuple[object, ...]:
        """What it runs, its arguments aside."""

    @property
    def title(self) -> str:
        """How sentences name it."""
        return f"{self.kind} {self.entry}" + (f" ({self.label})" if self.label else "")

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return tuple(_tensor(a) for a, p in zip(self.args, self.params, strict=True) if p.reads)

    @property
    def writes(self) -> tuple[Tensor, ...]:
        return tuple(_tensor(a) for a, p in zip(self.args, self.params, strict=True) if p.writes)

    @property
    def traffic(self) -> int:
        """Fewest bytes it moves through device memory: each read once, each written once."""
        return sum(t.bytes for t in dict.fromkeys(self.reads)) + sum(t.bytes for t in dict.fromkeys(self.writes))

    def _check_count(self, where: str) -> None:
        if len(self.args) != len(self.params):
            raise LaunchError(f"{where}: found {len(self.args)} arguments, expected {len(self.params)}")

    def _check_pipe(self, where: str) -> None:
        if self.pipe not in PIPES:
            raise LaunchError(f"{where}: found pipe {self.pipe!r}, expected one of {', '.join(PIPES)}")


def _tensor(a: Any) -> Tensor:
    found: Tensor = a.view if isinstance(a, TensorMap) else a
    return found
