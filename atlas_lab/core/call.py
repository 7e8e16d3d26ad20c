"""One projection as an arm sees it: operands, weights, sizes, and what follows the product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atlas_lab.core.declare import Declaration
from atlas_lab.core.tensor import Tensor

if TYPE_CHECKING:
    from atlas_lab.core.context import Context


class Fields(Mapping[str, Tensor]):
    """Tensors by field, as items and as attributes: `w["q"]` is `w.q`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"no field {name!r}, expected one of {', '.join(self.__dict__['_tensors'])}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def weights_of(declarations: tuple[Declaration, ...]) -> dict[str, Fields]:
    """`call.weights` of an arm's declarations; raises ValueError for a key declared twice."""
    out: dict[str, Fields] = {}
    for d in declarations:
        if d.key in out:
            raise ValueError(f"weights: key {d.key!r} is declared twice")
        out[d.key] = Fields(d.tensors)
    return out


@dataclass(frozen=True)
class Operand:
    """Activations or outputs: the values, their format (`bf16`, `fp8`, …), and scales where the format has any."""

    data: Tensor
    format: str = "bf16"
    scales: tuple[tuple[str, Tensor], ...] = ()


@dataclass(frozen=True)
class Epilogue:
    """What follows the product, in this order: `alpha` (one factor, or one a segment of N rows), a LoRA addend
    (`lora`, BF16 `[M, N]`, that launches before make: s·B(A·x)), a gated product (`activation`, `silu` or `gelu_tanh`,
    of one half of the columns, rounded to BF16, times the other half, rounded likewise; with a `limit` above 0 the
    first half is clamped at it from above, the second to within it on both sides), a residual (BF16, of y's shape),
    quantization of y, rounded to BF16 as ever, to a format. Addends are added in FP32, before the one rounding of what
    they are added to.

    An arm's `epilogues` names the parts it fuses; a plan that needs another part of it is refused.
    """

    alpha: tuple[tuple[int, Tensor], ...] = ()
    lora: Tensor | None = None
    activation: str = ""
    limit: float = 0.0
    residual: Tensor | None = None
    quantize: str = ""

    @property
    def addends(self) -> tuple[Tensor, ...]:
        """The LoRA addend and the residual, those that there are, in order."""
        return tuple(t for t in (self.lora, self.residual) if t is not None)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts asked for, in order."""
        return tuple(n for n in ("alpha", "lora", "activation", "limit", "residual", "quantize") if getattr(self, n))


@dataclass(frozen=True)
class Call:
    """`y[M, N] = x[M, K] · Wᵀ` for one row count. `roles` says which projections (several for a group's arm),
    `counts` the N of each.

    An epilogue with an activation halves y: `[M, N/2]`, of the gated product of its first half of columns with its
    second. With `quantize` y is of that format, its scales beside it. With `prologue` (`silu`, `gelu_tanh`) x is
    `[M, 2K]`, and what is multiplied the gated product of its halves, clamped as an epilogue's are where
    `prologue_limit` is above 0.
    """

    roles: tuple[str, ...]
    weights: Mapping[str, Fields]
    x: Operand
    y: Operand
    m: int
    n: int
    k: int
    context: Context
    epilogue: Epilogue = Epilogue()
    scratch: Mapping[str, Tensor] = field(default_factory=dict)
    prologue: str = ""
    prologue_limit: float = 0.0
    counts: tuple[int, ...] = ()
