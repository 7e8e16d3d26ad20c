"""Quantized copies of BF16 checkpoints, made a few rows at a time: memory holds the new tensors of one weight."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atlas_lab.checkpoint.files import Group, Progress, new_folder, silent, write_files, write_json
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.mix import mix, quantization_config
from atlas_lab.checkpoint.naming import BF16, Convention
from atlas_lab.checkpoint.sliced import Slice, base_name
from atlas_lab.checkpoint.store import CONFIG
from atlas_lab.checkpoint.writer import HEADERS_ONLY, METADATA
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import scan

if TYPE_CHECKING:
    from atlas_lab.checkpoint.checkpoint import Checkpoint


def quantize_checkpoint(
    source: Checkpoint,
    format_name: str,
    path: str | os.PathLike[str],
    *,
    roles: Sequence[str] = ("*",),
    keep: Sequence[str] = (),
    producer: str = "",
    max_shard_bytes: int | None = None,
    progress: Progress = silent,
) -> None:
    """Write a copy of a BF16 checkpoint with its projections in `format_name`, or in a mix (`nvfp4+fp8`).

    Only `roles` and none of `keep` are quantized; the gates, an output head that is the embedding, and every other
    tensor are copied as they are. Raises CheckpointError for a weight that is not BF16 or that the format cannot hold,
    for a source of headers alone, and where `path` exists; nothing is left of a copy that was not finished.
    """
    m = mix(format_name, producer)
    if source.config.get(HEADERS_ONLY):
        raise CheckpointError(f"{source.path}: found headers alone, expected values to quantize")
    embedding = {p.tensor.name for p in source.parameters}
    groups, ignored, quantized = [], [], {}
    for name, p in _weights(source).items():
        if name in embedding:  # which is the output head, too
            groups.append(_copied(source.store.tensors[name], source))
            continue
        module = name.removesuffix(".weight")
        chosen = _any(p.role, roles) and not _any(p.role, keep)
        c = m.of(p.role) if chosen else BF16
        if c.format == "bf16":
            ignored.append(module)
            groups.append(_copied(source.store.tensors[name], source))
        else:
            quantized[module] = c
            groups.append(_quantized(c, source.store.tensors[name], source))
    groups += [_copied(t, source) for t in source.unread]
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    made = quantization_config(m, quantized, ignored)
    if made is not None:
        config["quantization_config"] = made
    with new_folder(Path(path)) as folder:
        write_files(folder, groups, METADATA, max_shard_bytes, progress)
        write_json(folder / CONFIG, config)


def _weights(source: Checkpoint) -> dict[str, Projection]:
    """A projection of every stored weight by its tensor's name; raises CheckpointError for one that is not BF16."""
    out: dict[str, Projection] = {}
    for p in source.projections:
        stored = p.weight.fields[0][1]
        if p.weight.format != "bf16":
            raise CheckpointError(f"{source.path}: {stored.name}: found {p.weight.format}, expected bf16 to quantize")
        out.setdefault(base_name(stored.name), p)
    return out


def _quantized(c: Convention, stored: Tensor, source: Checkpoint) -> Group:
    module = stored.name.removesuffix(".weight")
    n, k = stored.shape

    def rows(at: slice) -> np.ndarray:
        return source.store.read(_rows(stored, at))

    return Group(tuple(c.tensors(module, n, k).values()), lambda: c.encode(module, n, k, rows))


def _copied(t: Tensor, source: Checkpoint) -> Group:
    def pieces() -> Iterator[np.ndarray]:
        if not t.shape:
            yield source.store.read(t.name)
            return
        for rows in scan.row_chunks(t.shape[0], prod(t.shape[1:])):
            yield source.store.read(_rows(t, rows))

    return Group((t,), lambda: {t.name: pieces()})


def _rows(t: Tensor, rows: slice) -> str:
    """Rows by name: read, and not mapped, also where they are all."""
    return str(Slice(t.name, (((rows.start, rows.stop),),)))


def _any(role: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(role, p) for p in patterns)
