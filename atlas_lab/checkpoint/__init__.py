"""Checkpoint files: safetensors read lazily, what each tensor is, a model's projections, and writing checkpoints."""

from __future__ import annotations

import os
from typing import Any

from atlas_lab.checkpoint.checkpoint import Checkpoint, Described, ModelFamily, Shown, describe, open_checkpoint, show
from atlas_lab.checkpoint.convert import quantize_checkpoint
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.qwen35 import synthetic_sites
from atlas_lab.checkpoint.recognise import check_values, recognise
from atlas_lab.checkpoint.sizes import SIZES, Sizes, sizes
from atlas_lab.checkpoint.store import Store
from atlas_lab.checkpoint.writer import write_checkpoint


def new(
    path: str | os.PathLike[str],
    format: str = "bf16",
    size: str = "tiny",
    seed: int = 0,
    *,
    max_shard_bytes: int | None = None,
    **overrides: Any,
) -> None:
    """Write a whole synthetic model: preset `size` with some of its `Sizes` replaced (`layers=2`, `hidden=512`)."""
    write_checkpoint(path, sizes(size, **overrides), format, seed=seed, max_shard_bytes=max_shard_bytes)


__all__ = [
    "SIZES",
    "Checkpoint",
    "CheckpointError",
    "Described",
    "ModelFamily",
    "Shown",
    "Sizes",
    "Store",
    "check_values",
    "describe",
    "new",
    "open_checkpoint",
    "quantize_checkpoint",
    "recognise",
    "show",
    "sizes",
    "synthetic_sites",
    "write_checkpoint",
]
