"""What an engineer would use instead, called as they would call it. Each package is imported when its peer is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_lab.core.levers import nearest
from atlas_lab.experiments import peer_humming, peer_scaled
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.peer_graph import Peer, Stored, cuda, graph_of, upload
from atlas_lab.formats import fp8_groups

Make = Callable[[Stored, np.ndarray, int], Peer]


@dataclass(frozen=True)
class Kind:
    """`make` is handed a weight in one of the formats `reads`: the case's own where that is among them, else the first,
    made of the same values. `quantized`: what it multiplies of x, where that is not x."""

    reads: tuple[str, ...]
    make: Make
    quantized: Callable[[np.ndarray], np.ndarray] | None = None


def torch_mv(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """cuBLAS through `torch.mv`, BF16, one row."""
    return _torch("torch.mv", lambda torch, a, b: torch.mv(a, b[0]), stored, x, sets)


def torch_mm(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """cuBLAS through `torch.mm`, BF16."""
    return _torch("torch.mm", lambda torch, a, b: torch.mm(b, a.T), stored, x, sets)


PEERS: dict[str, Kind] = {
    "torch.mv": Kind(("bf16",), torch_mv),
    "torch.mm": Kind(("bf16",), torch_mm),
    peer_scaled.NAME: Kind(("fp8",), peer_scaled.scaled_mm, fp8_groups.rounded),
    peer_humming.NAME: Kind(tuple(peer_humming.READS), peer_humming.humming),
}


def reads(name: str, format: str) -> str:
    """The format of the weights that a peer of a weight in `format` reads; raises ConfigError for an unknown peer."""
    kind = _kind(name)
    return format if format in kind.reads else kind.reads[0]


def multiplies(name: str, x: np.ndarray) -> np.ndarray | None:
    """float64 `[M, K]`: what a peer multiplies of x; None where that is x. Raises ConfigError for an unknown peer."""
    quantized = _kind(name).quantized
    return quantized(x) if quantized else None


def make(name: str, stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """A peer over `sets` copies of a weight in a format that it reads, and BF16 x `[M, K]`; raises ConfigError for one
    that is unknown or whose package is not installed."""
    kind = _kind(name)
    if stored.format not in kind.reads:
        raise ConfigError(f"peer {name}: found weights in {stored.format}, expected {' or '.join(kind.reads)}")
    try:
        return kind.make(stored, x, sets)
    except ImportError as e:
        raise ConfigError(f"peer {name}: {e.name or e} is not installed; pip install 'atlas-lab[peers]'") from None


def _kind(name: str) -> Kind:
    if name not in PEERS:
        raise ConfigError(f"peer {name!r}: expected one of {', '.join(PEERS)}{nearest(name, PEERS)}")
    return PEERS[name]


def _torch(name: str, call: Callable[[Any, Any, Any], Any], stored: Stored, x: np.ndarray, sets: int) -> Peer:
    torch = cuda()
    first = upload(torch, stored.tensors["weight"])
    weights = [first, *(first.clone() for _ in range(sets - 1))]
    rows = upload(torch, x)

    def call_of(a: Any) -> Callable[[], Any]:
        return lambda: call(torch, a, rows)

    return graph_of(name, f"torch {torch.__version__}", stored, [call_of(a) for a in weights], x.shape[0], (weights,))
