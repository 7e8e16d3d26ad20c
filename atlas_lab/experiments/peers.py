"""What an engineer would use instead, called as they would call it. Each package is imported when its peer is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from atlas_lab.core.levers import nearest
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.runtime.timing import CALLS, Timed

WARM = 3


@dataclass(frozen=True)
class Peer:
    """A peer on the device. `version` is of its package, `kernels` what one call launches ([] and `reason` where that
    is not known), `output` its result for the first of the rotated weights, float64 `[M, N]`."""

    name: str
    version: str
    timed: Timed
    output: np.ndarray
    kernels: tuple[str, ...] = ()
    reason: str = ""


def torch_mv(w: np.ndarray, x: np.ndarray, sets: int) -> Peer:
    """cuBLAS through `torch.mv`, BF16, one row."""
    return _torch("torch.mv", lambda torch, a, b: torch.mv(a, b[0]), w, x, sets)


def torch_mm(w: np.ndarray, x: np.ndarray, sets: int) -> Peer:
    """cuBLAS through `torch.mm`, BF16."""
    return _torch("torch.mm", lambda torch, a, b: torch.mm(b, a.T), w, x, sets)


PEERS: dict[str, Callable[[np.ndarray, np.ndarray, int], Peer]] = {"torch.mv": torch_mv, "torch.mm": torch_mm}


def make(name: str, w: np.ndarray, x: np.ndarray, sets: int) -> Peer:
    """A peer over `sets` copies of BF16 weights `[N, K]` and x `[M, K]`; raises ConfigError for one that is unknown or
    whose package is not installed."""
    if name not in PEERS:
        raise ConfigError(f"peer {name!r}: expected one of {', '.join(PEERS)}{nearest(name, PEERS)}")
    try:
        return PEERS[name](w, x, sets)
    except ImportError as e:
        raise ConfigError(f"peer {name}: {e.name or e} is not installed; pip install 'atlas-lab[peers]'") from None


def _torch(name: str, call: Callable[[Any, Any, Any], Any], w: np.ndarray, x: np.ndarray, sets: int) -> Peer:
    torch = import_module("torch")
    device = torch.device("cuda")

    def upload(a: np.ndarray) -> Any:
        return torch.from_numpy(a.view(np.int16).copy()).to(device).view(torch.bfloat16)

    first = upload(w)
    weights = [first, *(first.clone() for _ in range(sets - 1))]
    rows = upload(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            for a in weights:
                call(torch, a, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, -(-CALLS // len(weights)))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for a in weights:
                call(torch, a, rows)

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    output = call(torch, first, rows).float().cpu().numpy().astype(np.float64).reshape(x.shape[0], w.shape[0])
    kernels, reason = _kernels(torch, lambda: call(torch, first, rows))
    timed = Timed(name, replay, repeats * len(weights), stream, keep=(graph, weights, rows))
    return Peer(name, f"torch {torch.__version__}", timed, output, kernels, reason)


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
