"""Humming, vLLM's quantized GEMM: weights as the checkpoint stores them, BF16 x, its own choice of kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from atlas_lab.experiments.peer_graph import Peer, Stored, cuda, graph_of, upload

NAME = "humming"


def humming(stored: Stored, x: np.ndarray, sets: int) -> Peer:
    """W4A16 over NVFP4, W8A16 over FP8 in blocks of 128x128."""
    torch = cuda()
    layers = import_module("humming.layer")
    config, tensors = READS[stored.format](torch, stored)
    rows = upload(torch, x)
    made = [_layer(torch, layers, stored, config, tensors) for _ in range(sets)]
    chosen = _chosen(layers, made[0], x.shape[0])

    def call_of(layer: Any) -> Callable[[], Any]:
        return lambda: layer(rows, tuning_config=chosen)

    version = f"humming-kernels {import_module('humming').__version__}, torch {torch.__version__}"
    return graph_of(NAME, version, stored, [call_of(layer) for layer in made], x.shape[0], (made, rows))


def _nvfp4(torch: Any, stored: Stored) -> tuple[dict[str, Any], dict[str, Any]]:
    t = stored.tensors
    return {"quant_method": "modelopt", "quant_algo": "nvfp4"}, {
        "weight": upload(torch, t["weight"], "uint8"),
        "weight_scale": upload(torch, t["scale"], "float8_e4m3fn"),
        "weight_scale_2": upload(torch, t["global_scale"].reshape(1), "float32"),
    }


def _fp8(torch: Any, stored: Stored) -> tuple[dict[str, Any], dict[str, Any]]:
    t = stored.tensors
    return {"quant_method": "fp8", "weight_block_size": [128, 128]}, {
        "weight": upload(torch, t["weight"], "float8_e4m3fn"),
        "weight_scale_inv": upload(torch, t["scale"].astype(np.float32), "float32"),
    }


READS: dict[str, Callable[[Any, Stored], tuple[dict[str, Any], dict[str, Any]]]] = {"nvfp4": _nvfp4, "fp8": _fp8}


def _layer(torch: Any, layers: Any, stored: Stored, config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    layer = layers.HummingLayer(
        shape_n=stored.n, shape_k=stored.k, weight_config=dict(config), torch_dtype=torch.bfloat16
    ).cuda()
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def _chosen(layers: Any, layer: Any, m: int) -> dict[str, Any]:
    """What its heuristics choose for `m` rows. Left to itself it chooses the same, and compiles the kernels of all
    other row counts before the first call."""
    for above, most, config in layers.HummingLayerMethod.get_default_tuning_configs(layer):
        if above < m <= most:
            return dict(config)
    raise RuntimeError(f"humming chose no kernel for {m} rows of [{layer.shape_n}, {layer.shape_k}]")
