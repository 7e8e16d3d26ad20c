"""Compile the kernels of peers for cases of a suite in several processes, into their own caches on disk.

python tools/warm_peers.py prefill 'nvfp4_wgmma * M=64,nvfp4_wgmma * M=512'
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from atlas_lab import formats
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments import peer_humming, peers
from atlas_lab.experiments.bench_case import BenchCase
from atlas_lab.experiments.peer_graph import Stored
from atlas_lab.experiments.suites import suite
from atlas_lab.formats.dtypes import dtype

PROCESSES = 8


def _zeros(t: Tensor) -> np.ndarray:
    return np.zeros(t.shape, dtype(t.dtype).numpy)


def _made(name: str, format: str, n: int, k: int, m: int) -> str:
    """What went wrong; empty if nothing did."""
    tensors = {f: _zeros(Tensor(s.dtype, s.shape, f)) for f, s in formats.get(format).tensors(n, k).items()}
    x = np.zeros((m, k), dtype("bf16").numpy)
    try:
        peers.make(name, Stored(format, n, k, tensors), x, sets=1)
    except Exception as e:  # the benchmark will say so itself
        return f"{name} N={n} K={k} M={m}: {type(e).__name__}: {e}"
    return ""


def main(name: str, only: str = "") -> int:
    begin, todo = time.monotonic(), {}
    for c in suite(name, only):
        if isinstance(c, BenchCase) and c.peer == peer_humming.NAME:
            todo[c.peer, peers.reads(c.peer, c.format), c.n, c.k, c.m] = None
    with ProcessPoolExecutor(min(PROCESSES, len(todo) or 1), mp_context=get_context("spawn")) as pool:
        wrong = [w for w in pool.map(_made, *zip(*todo, strict=True)) if w] if todo else []
    print(f"{len(todo)} peers, {time.monotonic() - begin:.0f} s", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
