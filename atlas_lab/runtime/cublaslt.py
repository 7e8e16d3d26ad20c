"""cuBLASLt through nvmath-python's bindings, imported when first used: y = x·Wᵀ of BF16.

Descriptors are columns first: row-major W `[N, K]` is to it a matrix of K rows and N columns, K elements apart; x
`[M, K]` one of K by M, y `[M, N]` one of N by M. So y = Wᵀ·x with W transposed and x as it lies. Source: the cuBLAS
documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from atlas_lab.core.tensor import Tensor

LIBRARY = "cuBLASLt"
EXTRA = "pip install 'atlas-lab[library]'"
WORKSPACE = 32 << 20  # bytes; what cuBLAS takes for itself on Hopper
MOST_ALIGNED = 256  # bytes; more is not asked about
CONFIG = (("algorithm", "ID"), ("tile", "TILE_ID"), ("stages", "STAGES_ID"), ("parts of K", "SPLITK_NUM"))


@dataclass(frozen=True)
class Bindings:
    """nvmath's modules `bindings.cublasLt` and `bindings.cublas`, and its enum of element types."""

    lt: Any
    cublas: Any
    types: Any


@cache
def bindings() -> Bindings:
    """Raises ImportError without the package."""
    from nvmath import CudaDataType
    from nvmath.bindings import cublas, cublasLt

    return Bindings(cublasLt, cublas, CudaDataType)


def version() -> str:
    """Of the library that is loaded, as 13.1.0; raises what nvmath raises where it, the library or a driver is not
    there."""
    found = int(bindings().lt.get_version())
    return f"{found // 10000}.{found // 100 % 100}.{found % 100}"


def missing() -> str:
    """Why it cannot be called on this machine, in one sentence that says what to install; "" if it can."""
    try:
        version()
    except ImportError as e:
        return f"{LIBRARY}: {e.name or e} is not installed; {EXTRA}"
    except Exception as e:  # nvmath has classes of its own for a missing library and a missing driver
        said = str(e).partition("\n")[0]
        return f"{LIBRARY} cannot be loaded ({type(e).__name__}: {said}); {EXTRA}"
    return ""


class Matmul:
    """`w` `[N, K]`, `x` `[M, K]`, `y` `[M, N]`, BF16, and a workspace of bytes; FP32 sums. Enqueues the product.

    The algorithm is the first that the library's heuristic offers for the shape, the alignment of the addresses and
    the size of the workspace. Sums over parts of K are allowed in FP32 alone: kept in the workspace, added in a step of
    their own. Raises RuntimeError where the library has none, and its own errors.
    """

    def __init__(self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...], stream: int, context: int) -> None:
        (n, k), m, size = tensors[0].shape, tensors[1].shape[0], tensors[3].bytes
        w, x, y, workspace = addresses
        plan = _plan(context, m, n, k, tuple(_aligned(a) for a in (w, x, y)), size)
        self.description = plan.description
        at = [f.ctypes.data for f in FACTORS]
        matrices = (w, plan.w, x, plan.x, at[1], y, plan.y, y, plan.y)
        self._call: Callable[[], object] = partial(
            bindings().lt.matmul, plan.handle, plan.product, at[0], *matrices, plan.algorithm, workspace, size, stream
        )

    def __call__(self) -> None:
        self._call()


FACTORS = (np.ones(1, np.float32), np.zeros(1, np.float32))  # of the product, and of what y held


@dataclass(frozen=True)
class _Plan:
    """What a shape needs, by the library's handles; kept as long as the process, as are the objects they stand for."""

    handle: int
    product: int
    w: int
    x: int
    y: int
    algorithm: int
    description: str
    keep: Any


@cache
def _handle(context: int) -> int:
    """The library's handle in a CUDA context, which is current."""
    return int(bindings().lt.create())


@cache
def _plan(context: int, m: int, n: int, k: int, aligned: tuple[int, ...], workspace: int) -> _Plan:
    b = bindings()
    lt, bf16 = b.lt, int(b.types.CUDA_R_16BF)
    product = lt.matmul_desc_create(int(b.cublas.ComputeType.COMPUTE_32F), int(b.types.CUDA_R_32F))
    for attribute, operation in (("TRANSA", b.cublas.Operation.T), ("TRANSB", b.cublas.Operation.N)):
        _set(product, lt.matmul_desc_set_attribute, lt.MatmulDescAttribute[attribute], np.int32(operation))
    # rows, columns, elements from one column to the next
    w, x, y = (lt.matrix_layout_create(bf16, *extents) for extents in ((k, n, k), (k, m, k), (n, m, n)))
    preference = lt.matmul_preference_create()
    try:
        wanted: list[tuple[str, np.generic]] = [
            ("MAX_WORKSPACE_BYTES", np.uint64(workspace)),
            ("REDUCTION_SCHEME_MASK", np.uint32(lt.ReductionScheme.COMPUTE_TYPE)),
        ]
        for letter, least in zip("ABCD", (*aligned, aligned[2]), strict=True):
            wanted.append((f"MIN_ALIGNMENT_{letter}_BYTES", np.uint32(least)))
        for attribute, value in wanted:
            _set(preference, lt.matmul_preference_set_attribute, lt.MatmulPreferenceAttribute[attribute], value)
        found, count = lt.MatmulHeuristicResult(1), np.zeros(1, np.int32)
        handle = _handle(context)
        lt.matmul_algo_get_heuristic(handle, product, w, x, y, y, preference, 1, found.ptr, count.ctypes.data)
    finally:
        lt.matmul_preference_destroy(preference)
    if not count[0] or found.state:
        raise RuntimeError(f"no algorithm for M={m}, N={n}, K={k}")
    algorithm = found.ptr  # the first member of a result
    return _Plan(handle, product, w, x, y, algorithm, _described(algorithm), found)


def _set(of: int, setter: Callable[..., object], attribute: Any, value: np.generic) -> None:
    held = np.array([value])
    setter(of, int(attribute), held.ctypes.data, held.nbytes)


def _described(algorithm: int) -> str:
    """`cuBLASLt 13.1.0, algorithm 66, tile 20, stages 36, parts of K 1`."""
    lt = bindings().lt
    said = [f"{LIBRARY} {version()}"]
    for name, attribute in CONFIG:
        which = int(lt.MatmulAlgoConfigAttribute[attribute])
        value, written = np.zeros(1, lt.get_matmul_algo_config_attribute_dtype(which)), np.zeros(1, np.uint64)
        at = (value.ctypes.data, value.nbytes, written.ctypes.data)
        lt.matmul_algo_config_get_attribute(algorithm, which, *at)
        said.append(f"{name} {value[0]}")
    return ", ".join(said)


def _aligned(address: int) -> int:
    """The largest power of two up to 256 that divides it."""
    return min(address & -address, MOST_ALIGNED)
