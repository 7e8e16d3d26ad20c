"""Shapes that weights have in released models: what figures of one shape alone would hide."""

from __future__ import annotations

from atlas_lab import checkpoint
from atlas_lab.checkpoint.naming import KEPT

MODELS = ("qwen3.5-27b", "qwen3.5-9b", "qwen3.5-4b", "llama-3-8b", "llama-3-70b", "gemma-4-31b")


def shapes() -> dict[tuple[int, int], tuple[str, ...]]:
    """N and K of every projection of a layer that is quantized, each once, with the models and roles that have it."""
    found: dict[tuple[int, int], dict[str, None]] = {}
    for name in MODELS:
        family, config = checkpoint.model(name)
        for layer in family.layout(config).layers:
            for w in layer.weights:
                if w.role not in KEPT:
                    found.setdefault((w.n, w.k), {})[f"{name} {w.role}"] = None
    return {shape: tuple(used) for shape, used in found.items()}
