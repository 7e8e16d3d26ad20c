"""Faulty kernels of the asynchronous machinery: how they are listed, launched and checked.

The line that must be named ends in a comment that starts with `!`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ring import ring_input

from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import Kernel, cuda
from atlas_lab.simt import Buffer, Options, SimtError, run

BULK, STORE = L.bulk_load(), L.bulk_store()
TILE = 8 * 128  # bytes of a box of m and o


@dataclass
class Fault:
    kernel: Kernel
    error: type[SimtError]
    words: tuple[str, ...]
    block: int = 64
    cluster: int = 1
    random: tuple[type[SimtError], ...] = ()  # what else it may be where order and landing are drawn


def faults(into: list[Fault]) -> Any:
    """The decorator `@fault(error, *words)` that puts a faulty kernel into a list."""

    def fault(error: type[SimtError], *words: str, **more: Any) -> Any:
        def add(function: Any) -> Kernel:
            into.append(Fault(made := L.kernel(function), error, words, **more))
            return made

        return add

    return fault


@L.device
def made(count):
    """An mbarrier behind 8 KB of dynamic shared memory, ready for use by the block."""
    bar = L.dynamic_shared(L.u64, 8192)
    if cuda.threadIdx.x == 0:
        L.mbarrier_init(bar, 0, count)
        L.fence_mbarrier_init()
    cuda.syncthreads()
    return bar


@L.device
def fetched(m, tile, bar):
    """Thread 0 loads the first box."""
    if cuda.threadIdx.x == 0:
        L.mbarrier_arrive_expect_tx(bar, 0, TILE)
        L.tma_load_2d(tile, 0, m, (0, 0), bar, 0)


@L.device
def filled(tile):
    t = cuda.threadIdx.x
    L.sts_v4_b32(tile, 16 * t, (t, t, t, t))
    L.fence_proxy_async()
    cuda.syncthreads()


def marked_line(kernel: Kernel) -> int:
    lines, first = inspect.getsourcelines(kernel.function)
    return next(first + i for i, text in enumerate(lines) if "# !" in text)


def launched(kernel: Kernel, block: int, cluster: int, seed: int, options: Options) -> None:
    m, o = Buffer.of("m", ring_input(16, 64)), Buffer("o", 16 * 128)
    x, y = Buffer.of("x", np.arange(64, dtype=np.uint32)), Buffer("y", 4 * 64 * cluster)
    maps = (TensorMap(Tensor("bf16", (16, 64), name), (8, 64)) for name in "mo")
    args = (*zip((m, o), maps, strict=True), x, y)
    run(
        kernel, grid=cluster, block=block, cluster=cluster, args=args, shared_bytes=8200, seed=seed, options=options
    )  # fmt: skip


def check(f: Fault, way: str, file: str) -> None:
    """The kernel is reported; in program order with its words, at its marked line."""
    options = Options(order=way, late_async="random" if way == "random" else True)  # type: ignore[arg-type]
    with pytest.raises((f.error, *(f.random if way == "random" else ()))) as caught:
        launched(f.kernel, f.block, f.cluster, 3, options)
    e, text = caught.value, str(caught.value)
    assert text.startswith(f"kernel {e.kernel}, block {e.block}, thread {e.thread}, {e.file}:{e.line}: ")
    assert e.file is not None
    assert file.endswith(e.file)
    assert "\n" not in text
    if way == "program":
        assert type(e) is f.error
        assert e.line == marked_line(f.kernel), text
        assert all(w in text for w in f.words), text
