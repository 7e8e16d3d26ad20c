"""Checkpoint files: safetensors read lazily, what each tensor is, a model's projections, and writing checkpoints."""

from __future__ import annotations

import os
from typing import Any

from atlas_lab.checkpoint.checkpoint import Checkpoint, Described, ModelFamily, Shown, describe, open_checkpoint, show
from atlas_lab.checkpoint.convert import quantize_checkpoint
from atlas_lab.checkpoint.files import Progress, silent
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.layout import Layout, Parameter
from atlas_lab.checkpoint.presets import model
from atlas_lab.checkpoint.qwen35 import synthetic_sites
from atlas_lab.checkpoint.recognise import check_values, recognise
from atlas_lab.checkpoint.sizes import SIZES, Sizes, sizes
from atlas_lab.checkpoint.slicing import slice_source
from atlas_lab.checkpoint.store import Store
from atlas_lab.checkpoint.writer import write_checkpoint, write_model


def new(
    path: str | os.PathLike[str],
    format: str = "bf16",
    size: str = "tiny",
    seed: int = 0,
    *,
    producer: str = "",
    headers_only: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress = silent,
    **overrides: Any,
) -> None:
    """Write a whole synthetic model: preset `size` with some of its sizes replaced (`layers=2`, `hidden=512`).

    With `headers_only` files have true headers and holes for values. Raises CheckpointError.
    """
    family, config = model(size, **overrides)
    write_model(
        path,
        family,
        config,
        format,
        seed,
        producer=producer,
        headers_only=headers_only,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


__all__ = [
    "SIZES",
    "Checkpoint",
    "CheckpointError",
    "Described",
    "Layout",
    "ModelFamily",
    "Parameter",
    "Shown",
    "Sizes",
    "Store",
    "check_values",
    "describe",
    "model",
    "new",
    "open_checkpoint",
    "quantize_checkpoint",
    "recognise",
    "show",
    "sizes",
    "slice_source",
    "synthetic_sites",
    "write_checkpoint",
    "write_model",
]
