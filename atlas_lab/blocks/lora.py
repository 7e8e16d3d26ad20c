"""The LoRA addend of a projection, y += s·B(A·x), as launches before its product (Hu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from atlas_lab.core.context import Context
from atlas_lab.core.launch import Launch
from atlas_lab.core.program import PlanError, settled
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.lora.low_rank import THREADS, VECTOR, WARPS, low_rank_in, low_rank_out


@dataclass(frozen=True)
class Adapter:
    """That of one projection: `a` BF16 `[r, K]`, `b` BF16 `[N, r]`, both whole, and the factor `scale`, s: where a
    checkpoint says alpha, alpha / r."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Delta:
    """The addend BF16 `[M, N]` and the launches that make it; `temporaries` are theirs, `persistent` A and B."""

    addend: Tensor
    launches: tuple[Launch, ...]
    temporaries: tuple[Tensor, ...]
    persistent: tuple[Tensor, ...]


def delta(adapter: Adapter, x: Tensor, n: int, context: Context, label: str) -> Delta:
    """s·B(A·x) of x BF16 `[M, K]`, whole, for `n` columns of y. Temporaries: `{label}/t` F32 `[M, r]`, what A makes of
    x, and `{label}/delta`, the addend, rounded to BF16 once.

    Raises PlanError for an adapter of another projection, of other dtypes or whose factor is not finite.
    """
    (m, k), r = x.shape, adapter.rank
    for name, t, shape in (("A", adapter.a, (r, k)), ("B", adapter.b, (n, r))):
        if (t.dtype, t.shape) != ("bf16", shape) or not t.is_contiguous or 0 in shape:
            raise PlanError(
                f"{label}: {name} of the adapter is {t}, expected contiguous bf16{list(shape)}, a rank from 1"
            )
    if not isfinite(adapter.scale):
        raise PlanError(f"{label}: found a factor of {adapter.scale}, expected a finite one")
    t, addend = Tensor("f32", (m, r), f"{label}/t"), Tensor("bf16", (m, n), f"{label}/delta")
    vector = k % VECTOR == 0 and not any(v.offset % 16 for v in (x, adapter.a))
    launches = (
        Launch(
            low_rank_in(vector=vector),
            grid=(m, -(-r // WARPS)),
            block=THREADS,
            args=(x, adapter.a, t, k, r),
            flops=2 * m * r * k,
            label="LoRA A",
        ),
        Launch(
            low_rank_out(),
            grid=(m, -(-n // THREADS)),
            block=THREADS,
            args=(t, adapter.b, addend, n, r, adapter.scale),
            flops=2 * m * r * n,
            label="LoRA B",
        ),
    )
    return Delta(addend, tuple(settled(x, context) for x in launches), (t, addend), (adapter.a, adapter.b))
