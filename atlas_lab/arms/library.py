"""Arms over BF16 weights that a library multiplies."""

from __future__ import annotations

import numpy as np

from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Call
from atlas_lab.core.context import Context
from atlas_lab.core.declare import Bind
from atlas_lab.core.library import LibraryCall, LibraryLaunch
from atlas_lab.core.numbers import Rounded
from atlas_lab.core.projection import Projection
from atlas_lab.core.rows import rows_from
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.lang import Needs, bf16, u8
from atlas_lab.kernels.lang.types import Parameter
from atlas_lab.runtime.cublaslt import LIBRARY, WORKSPACE, Matmul, missing


def product(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x·Wᵀ in float64: `[M, N]` of `[N, K]` and `[M, K]`."""
    y: np.ndarray = x.astype(np.float64) @ w.astype(np.float64).T
    return y


CUBLASLT_BF16 = LibraryCall(
    "cublaslt_matmul_bf16",
    LIBRARY,
    (
        Parameter("in", bf16, name="w"),
        Parameter("in", bf16, name="x"),
        Parameter("out", bf16, name="y"),
        Parameter("out", u8, name="workspace"),
    ),
    Needs((8, 0)),
    Matmul,
    missing,
    product,
    workspace="workspace",
)


class Bf16Library(Arm):
    """Weights BF16 `[N, K]` as stored, any N and K; cuBLASLt through the extra `library`; 32 MB of workspace a call.

    M from 2: one row is a product of a matrix and a vector, which cuBLASLt serves with tiles of a GEMM. K cut into
    parts is summed in FP32, one rounding for each of them, and a part has an instruction's K or more: no chain is
    longer than that of K in one part and one addition. There is no reduction class: the library chooses by M, and no
    version of it promises the bits of another.
    """

    name = "bf16_library"
    roles = ("*",)
    rows = rows_from(2)
    source = "bf16"
    library_calls = (CUBLASLT_BF16,)
    tolerance = Rounded(accumulate="mma_bf16", out="bf16", depth=lambda k: -(-k // 16), extra_roundings=1)

    def finalize(self, p: Projection, ctx: Context) -> list[Bind]:
        return [Bind(p.weight)]

    def scratch(self, c: Call) -> dict[str, Tensor]:
        return {"workspace": Tensor("u8", (WORKSPACE,))}

    def lower(self, c: Call) -> list[LibraryLaunch]:
        args = (c.weights["weight"].weight, c.x, c.y, c.scratch["workspace"])
        return [LibraryLaunch(CUBLASLT_BF16, args, 2 * c.m * c.n * c.k, "mma_bf16", label=self.name)]
