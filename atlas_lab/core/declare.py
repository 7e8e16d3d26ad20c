"""What an arm declares about weights: tensors it reads in place, and tensors built at load time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atlas_lab.core.projection import Packed, WeightSource
from atlas_lab.core.tensor import Tensor

Arrays = Mapping[str, np.ndarray]
Source = WeightSource | Packed


@dataclass(frozen=True)
class Bind:
    """Stored tensors read in place. `call.weights[key]` has them by field; a group's arm binds each member under
    a key of its own."""

    source: WeightSource
    key: str = "weight"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.source.tensors


@dataclass(frozen=True, init=False)
class Derived:
    """Tensors built at load time from stored ones: the finalize, the residency and the oracle in one declaration.

    `Derived("int8_row", source=p.weight, build=quantize, dequantize=dequantize, q=Tensor("i8", (n, k)), ...)`.

    `build` is handed one argument a source: float32 `[N, K]` values for a `WeightSource`, or its stored tensors by
    field, `dict[str, ndarray]`, for `WeightSource.packed`; it returns the declared tensors by field. `dequantize`
    takes those and returns the float64 `[N, K]` they stand for. `parameters` (hashable) tell apart builds under one
    key. Two declarations with equal sources, key and parameters are one buffer, built once and charged once.
    """

    key: str
    sources: tuple[Source, ...]
    build: Callable[..., Arrays] = field(compare=False)
    dequantize: Callable[[Arrays], np.ndarray] = field(compare=False)
    parameters: tuple[tuple[str, Any], ...]
    fields: tuple[tuple[str, Tensor], ...] = field(compare=False)

    def __init__(
        self,
        key: str,
        *,
        source: Source | tuple[Source, ...],
        build: Callable[..., Arrays],
        dequantize: Callable[[Arrays], np.ndarray],
        parameters: Mapping[str, Any] | None = None,
        **tensors: Tensor,
    ) -> None:
        if not tensors:
            raise ValueError(f"derived weight {key!r}: found no tensors, expected one or more fields")
        sources = source if isinstance(source, tuple) else (source,)
        for name, value in (
            ("key", key),
            ("sources", sources),
            ("build", build),
            ("dequantize", dequantize),
            ("parameters", tuple(sorted((parameters or {}).items()))),
        ):
            object.__setattr__(self, name, value)
        object.__setattr__(
            self, "fields", tuple((f, t.named(f"{self.owner}/{self.label}.{f}")) for f, t in tensors.items())
        )

    @property
    def weights(self) -> tuple[WeightSource, ...]:
        return tuple(s.weight if isinstance(s, Packed) else s for s in self.sources)

    @property
    def owner(self) -> str:
        """The first source tensor's name without its last component: what the derived tensors are filed under."""
        return self.weights[0].fields[0][1].name.rpartition(".")[0] or self.weights[0].fields[0][1].name

    @property
    def label(self) -> str:
        return self.key + "".join(f",{k}={v}" for k, v in self.parameters)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes two declarations one buffer."""
        return (self.key, self.parameters, tuple((type(s).__name__, s) for s in self.sources))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return dict(self.fields)


Declaration = Bind | Derived
