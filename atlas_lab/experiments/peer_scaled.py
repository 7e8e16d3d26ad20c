"""cuBLASLt's FP8 product through torch: weights E4M3 with a scale for 128x128, activations E4M3 with one for 1x128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atlas_lab.experiments.peer_graph import Peer, Stored, cuda, graph_of, upload
from atlas_lab.formats import fp8_groups

NAME = "torch.scaled_mm"


def scaled_mm(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """The product alone (W8A8): x is quantized before it, on the host, in time that is not measured."""
    torch = cuda()
    functional = torch.nn.functional
    kinds = functional.ScalingType
    codes, scales = fp8_groups.quantize(x.astype(np.float32))
    a, of_a = upload(torch, codes, "float8_e4m3fn"), upload(torch, scales, "float32").T
    of_b = upload(torch, stored.tensors["scale"].astype(np.float32), "float32").T
    first = upload(torch, stored.tensors["weight"], "float8_e4m3fn")
    weights = [first, *(first.clone() for _ in range(sets - 1))]

    def call_of(b: Any) -> Callable[[], Any]:
        return lambda: functional.scaled_mm(
            *(a, b.T, of_a, kinds.BlockWise1x128, of_b, kinds.BlockWise128x128), output_dtype=torch.bfloat16
        )

    version, keep = f"torch {torch.__version__}", (weights, a, of_a, of_b)
    multiplied = fp8_groups.dequantize(codes, scales)
    return graph_of(NAME, version, stored, [call_of(b) for b in weights], x.shape[0], keep, multiplied)
