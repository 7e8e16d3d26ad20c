"""A peer on the device: calls of torch over rotated weights, as one CUDA graph, and the kernels of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from atlas_lab import formats
from atlas_lab.runtime.timing import CALLS, Timed

WARM = 3


@dataclass(frozen=True)
class Stored:
    """A weight `[n, k]` as a checkpoint stores it, by field: all that a peer may read of it."""

    format: str
    n: int
    k: int
    tensors: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.tensors.values())

    @cached_property
    def values(self) -> np.ndarray:
        """float64 `[N, K]`: what the weight stands for."""
        return formats.get(self.format).dequantize(self.tensors)

    def product(self, x: np.ndarray) -> np.ndarray:
        """float64 `[M, N]` of BF16 x `[M, K]` and the weight's values."""
        exact: np.ndarray = x.astype(np.float64) @ self.values.T
        return exact


@dataclass(frozen=True)
class Peer:
    """A peer on the device. `version` is of its package, `weights` the format of those it reads, `kernels` what one
    call launches ([] and `reason` where that is not known), `output` its result for the first of the rotated weights,
    float64 `[M, N]`; `x` the activations that it multiplied, float64 `[M, K]`, where they are not the BF16 ones."""

    name: str
    version: str
    weights: str
    timed: Timed
    output: np.ndarray
    kernels: tuple[str, ...] = ()
    reason: str = ""
    x: np.ndarray | None = None


def cuda() -> Any:
    """The module torch; raises ImportError."""
    return import_module("torch")


def upload(torch: Any, a: np.ndarray, dtype: str = "bfloat16") -> Any:
    """An array on the GPU, bit for bit, as elements of a torch dtype of its size."""
    plain = np.ascontiguousarray(a).reshape(-1).view(f"i{a.dtype.itemsize}")
    return torch.from_numpy(plain.copy()).to(torch.device("cuda")).view(getattr(torch, dtype)).reshape(a.shape)


def graph_of(
    name: str,
    version: str,
    stored: Stored,
    calls: Sequence[Callable[[], Any]],
    m: int,
    keep: tuple[Any, ...],
    x: np.ndarray | None = None,
) -> Peer:
    """A peer of `calls`, one for each set of weights, for `m` rows: run, captured, its output and kernels read."""
    torch = cuda()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, -(-CALLS // len(calls)))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    output = calls[0]().float().cpu().numpy().astype(np.float64).reshape(m, stored.n)
    kernels, reason = _kernels(torch, calls[0])
    timed = Timed(name, replay, repeats * len(calls), stream, keep=(graph, *keep))
    return Peer(name, version, stored.format, timed, output, kernels, reason, x)


def _kernels(torch: Any, run: Callable[[], Any]) -> tuple[tuple[str, ...], str]:
    """Names of the kernels of one call, in order, from torch's profiler."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        names = tuple(str(e.name) for e in profile.events() if "cuda" in str(e.device_type).lower())
    except Exception as e:  # a profiler that the machine does not allow is no reason to measure nothing
        return (), f"{type(e).__name__}: {e}"
    return names, "" if names else "the profiler saw no kernel"
