"""A case's peer: the weights it is handed, whether its output is their product, and its time beside ours."""

from __future__ import annotations

import threading

import numpy as np

from atlas_lab.checkpoint import Checkpoint
from atlas_lab.experiments import peers
from atlas_lab.experiments.bench_results import PeerResult, measured, relative
from atlas_lab.experiments.errors import ConfigError, sentence
from atlas_lab.experiments.peer_graph import Peer, Stored

MOST_ERROR = 1e-2  # relative, over all that is compared: six times what rounding it to BF16 makes
MOST_ROWS = 256  # of an output that are compared


def compared(m: int) -> np.ndarray:
    """The rows of an output of m that are compared: evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, m - 1, min(m, MOST_ROWS)).astype(int))


class Products:
    """Float64 products of stored weights, the last few kept: peers of several arms read the same ones."""

    MOST = 64

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], np.ndarray] = {}
        self._lock = threading.Lock()

    def of(self, weight: Stored, x: np.ndarray, made_by: str = "") -> np.ndarray:
        """float64 `[rows, N]` of the rows of x `[M, K]` that are compared. Weights of one format and shape are one
        weight here, and so are x of as many rows that came from `made_by`."""
        key = (weight.format, weight.n, weight.k, x.shape[0], made_by)
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = weight.product(x[compared(x.shape[0])])
            with self._lock:
                while len(self._known) >= self.MOST:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        return found


def stored(held: Checkpoint) -> Stored:
    """The one weight of a checkpoint, as it is stored."""
    (p,) = held.projections
    return Stored(p.weight.format, p.n, p.k, {field: held.store.read(t.name) for field, t in p.weight.fields})


def made(name: str, weight: Stored, x: np.ndarray, sets: int) -> tuple[Peer | None, str]:
    """The peer, or why it does not run here; raises ConfigError where its package is not installed."""
    try:
        return peers.make(name, weight, x, sets), ""
    except ConfigError:
        raise
    except Exception as e:  # whatever a foreign package does is no reason to lose ours
        return None, f"peer {name}: {sentence(e)}"


def result(peer: Peer, exact: np.ndarray, blocks: list[float], ours: list[float], seed: int) -> PeerResult:
    """The peer's time from blocks in microseconds, and how far its output is from `exact`, float64 `[rows, N]` of the
    rows that are compared."""
    found = peer.output[compared(peer.output.shape[0])]
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    wrong = f"found a relative error of {error:.2e} against the float64 product of the {peer.weights} weights it read"
    return PeerResult(
        name=peer.name,
        version=peer.version,
        weights=peer.weights,
        kernels=list(peer.kernels),
        reason=peer.reason,
        time=measured(blocks, seed),
        rel_l2=error,
        wrong="" if error <= MOST_ERROR else f"{wrong}, expected at most {MOST_ERROR:g}",
        ours=relative(blocks, ours, seed),
    )
