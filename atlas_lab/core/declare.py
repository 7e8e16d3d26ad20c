"""What an arm declares about weights: tensors it reads in place, and tensors built at load time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_lab.core.projection import Packed, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import dtype

if TYPE_CHECKING:
    from atlas_lab.core.building import BuildCall
    from atlas_lab.core.launch import Launch

Arrays = Mapping[str, np.ndarray]
Source = WeightSource | Packed


@dataclass(frozen=True)
class Bind:
    """Stored tensors read in place. `call.weights[key]` has them by field, as in `call.weights["weight"].scale` (the
    fields are those of the weight's format); a group's arm binds each member under a key of its own."""

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

    `device`, where given, lowers the build to launches over the stored tensors: `device(call: BuildCall)` returns a
    list of Launch that write every declared tensor, with the bits that `build` makes. The sources are then on the
    device for the time of the build; without it they never get there, unless something binds them.

    `part` declares some of the tensors, or views into them, under another key: what a projection reads of a fused
    weight. Whoever binds a part keeps the whole.
    """

    key: str
    sources: tuple[Source, ...]
    build: Callable[..., Arrays] = field(compare=False)
    dequantize: Callable[[Arrays], np.ndarray] = field(compare=False)
    parameters: tuple[tuple[str, Any], ...]
    device: Callable[[BuildCall], Sequence[Launch]] | None = field(compare=False)
    fields: tuple[tuple[str, Tensor], ...] = field(compare=False)
    _whole: Derived | None = field(compare=False)

    def __init__(
        self,
        key: str,
        *,
        source: Source | tuple[Source, ...],
        build: Callable[..., Arrays],
        dequantize: Callable[[Arrays], np.ndarray],
        parameters: Mapping[str, Any] | None = None,
        device: Callable[[BuildCall], Sequence[Launch]] | None = None,
        **tensors: Tensor,
    ) -> None:
        if not tensors:
            raise ValueError(f"derived weight {key!r}: found no tensors, expected one or more fields")
        self._set(
            key=key,
            sources=source if isinstance(source, tuple) else (source,),
            build=build,
            dequantize=dequantize,
            parameters=tuple(sorted((parameters or {}).items())),
            device=device,
            _whole=None,
        )
        self._set(fields=tuple((f, t.named(f"{self.owner}/{self.label}.{f}")) for f, t in tensors.items()))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def part(self, key: str, dequantize: Callable[[Arrays], np.ndarray], **views: Tensor) -> Derived:
        """`views` of these tensors (`whole.tensors["weight"].view(...)`) under `key`, contiguous ones; `dequantize`
        takes their arrays. Raises ValueError for a view of anything else."""
        whole, lengths = self.whole, {t.name: t.bytes for _, t in self.whole.fields}
        for name, t in views.items():
            if not t.is_contiguous or t.offset + t.bytes > lengths.get(t.name, -1):
                known = ", ".join(lengths)
                raise ValueError(f"part {key!r} of {whole.label}: {name} is {t}, expected a contiguous view of {known}")
        made = object.__new__(Derived)
        made._set(
            key=key,
            sources=whole.sources,
            build=whole.build,
            dequantize=dequantize,
            parameters=whole.parameters,
            device=whole.device,
            fields=tuple(views.items()),
            _whole=whole,
        )
        return made

    @property
    def whole(self) -> Derived:
        """What is built and held: the declaration itself, or the one it is a part of."""
        return self._whole or self

    @property
    def weights(self) -> tuple[WeightSource, ...]:
        return tuple(s.weight if isinstance(s, Packed) else s for s in self.sources)

    @property
    def owner(self) -> str:
        """The first source tensor's name without its last component: what the derived tensors are filed under."""
        return self.weights[0].fields[0][1].name.rpartition(".")[0] or self.weights[0].fields[0][1].name

    @property
    def label(self) -> str:
        if self._whole is not None:
            return f"{self.key} of {self._whole.label}"
        return self.key + "".join(f",{k}={v}" for k, v in self.parameters)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes two declarations one buffer; a part's is that of its whole."""
        key = self.whole.key
        return (key, self.parameters, tuple((type(s).__name__, s) for s in self.sources))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return dict(self.fields)

    def arrays(self, built: Arrays) -> dict[str, np.ndarray]:
        """This declaration's tensors by field, of what `build` returned."""
        if self._whole is None:
            return dict(built)
        fields = {t.name: f for f, t in self._whole.fields}
        return {f: _seen(t, built[fields[t.name]]) for f, t in self.fields}


def _seen(view: Tensor, of: np.ndarray) -> np.ndarray:
    """What a contiguous view shows of the array its buffer holds."""
    first = view.offset // dtype(view.dtype).bytes
    return of.reshape(-1)[first : first + view.elements].reshape(view.shape)


Declaration = Bind | Derived
