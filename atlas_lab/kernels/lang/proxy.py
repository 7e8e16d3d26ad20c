"""`cuda` as kernels import it: thread coordinates and block barriers, on the interpreter and in Numba's typing."""

from __future__ import annotations

from typing import Any

from atlas_lab.kernels.lang.machine import Dim3, current
from atlas_lab.kernels.lang.types import Scalar


class Local:
    """Arrays private to a thread. Index them with values known after unrolling: the compiler then keeps them in
    registers; its report of `.local` memory tells when it does not."""

    def array(self, shape: int, dtype: Scalar) -> list[Any]:
        """`shape` uninitialised elements."""
        return [None] * shape


class CudaProxy:
    """Stands for `numba.cuda` inside kernels; only what is defined here may be used."""

    local = Local()

    @property
    def threadIdx(self) -> Dim3:  # noqa: N802
        return current().threadIdx

    @property
    def blockIdx(self) -> Dim3:  # noqa: N802
        return current().blockIdx

    @property
    def blockDim(self) -> Dim3:  # noqa: N802
        return current().blockDim

    @property
    def gridDim(self) -> Dim3:  # noqa: N802
        return current().gridDim

    def syncthreads(self) -> None:
        """bar.sync 0: every thread of the block meets."""
        current().barrier(0, None)

    def syncwarp(self) -> None:
        """bar.warp.sync of the whole warp."""
        current().warp_op("syncwarp", 0xFFFFFFFF, None, lambda threads, args: args)


cuda = CudaProxy()
