"""Checkpoints that are made: synthetic ones from a seed, and quantized copies of BF16 ones."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from atlas_lab.checkpoint import qwen35, synthetic
from atlas_lab.checkpoint.checkpoint import Checkpoint
from atlas_lab.checkpoint.files import Group, write_files, write_json
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.naming import KEPT, Convention, convention, quantization_config
from atlas_lab.checkpoint.sizes import Sizes
from atlas_lab.checkpoint.store import CONFIG
from atlas_lab.core.projection import Projection
from atlas_lab.core.tensor import Tensor

METADATA = {"format": "pt"}  # what loaders of the usual libraries look for


def write_checkpoint(
    path: str | os.PathLike[str],
    s: Sizes,
    format_name: str,
    layers: Iterable[int] | None = None,
    roles: Sequence[str] | None = None,
    seed: int = 0,
    *,
    producer: str = "",
    text_only: bool = False,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a synthetic checkpoint folder of the Qwen3.5 family, with the names and dtypes of real ones.

    Equal seeds give equal BF16 weights in every format and for every choice of layers and roles, and equal bytes.
    `roles` (patterns) leaves out the rest and the tensors that are no projections. Raises CheckpointError, also where
    `path` exists; nothing is left of a checkpoint that was not finished.
    """
    c = convention(format_name, producer)
    prefix = qwen35.TEXT_PREFIX if text_only else qwen35.PREFIX
    chosen = qwen35.selected(s, layers, roles)
    groups = []
    ignored = []
    for layer in dict.fromkeys(layer for layer, _ in chosen):
        for role in (r for at, group in chosen if at == layer for r in group):
            stored = qwen35.convention_of(role, c)
            module = qwen35.module(prefix, layer, role)
            groups.append(_synthetic(stored, module, seed, f"layers.{layer}.{role}", *s.shapes[role]))
            ignored += [module] if stored.format != c.format else []
        if roles is None:
            groups += [
                _auxiliary(Tensor("bf16", shape, f"{prefix}{layer}.{name}"), seed, f"layers.{layer}.{name}")
                for name, shape in qwen35.auxiliary(s, layer).items()
            ]
    config = s.config(text_only=text_only)
    if layers is not None or roles is not None:
        held = {role for _, group in chosen for role in group}
        config[qwen35.PART] = {
            "layers": sorted({layer for layer, _ in chosen}),
            "roles": [r for r in qwen35.MODULES if r in held],
        }
    _write(Path(path), config, quantization_config(c, ignored), groups, max_shard_bytes)


def quantize_checkpoint(
    source: Checkpoint,
    format_name: str,
    path: str | os.PathLike[str],
    *,
    roles: Sequence[str] = ("*",),
    keep: Sequence[str] = KEPT,
    producer: str = "",
    max_shard_bytes: int | None = None,
) -> None:
    """Write a copy of a BF16 checkpoint with its projections in `format_name`, one weight in memory at a time.

    Only `roles` and none of `keep` are quantized; every other tensor is copied as it is. Raises CheckpointError for a
    weight that is not BF16 or that the format cannot hold, and where `path` exists.
    """
    c = convention(format_name, producer)
    groups = []
    ignored = []
    for p in (p for site in source.sites for p in site.projections):
        stored = p.weight["weight"]
        if p.weight.format != "bf16":
            raise CheckpointError(f"{source.path}: {stored.name}: found {p.weight.format}, expected bf16 to quantize")
        if _any(p.role, roles) and not _any(p.role, keep):
            groups.append(_quantized(c, p, source))
        else:
            groups.append(_copied(stored, source))
            ignored.append(stored.name.removesuffix(".weight"))
    groups += [_copied(t, source) for t in source.unread]
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    _write(Path(path), config, quantization_config(c, ignored), groups, max_shard_bytes)


def _synthetic(c: Convention, module: str, seed: int, label: str, n: int, k: int) -> Group:
    handles = tuple(c.tensors(module, n, k).values())
    return Group(handles, lambda: c.encode(module, synthetic.weight(seed, label, n, k)))


def _auxiliary(t: Tensor, seed: int, label: str) -> Group:
    return Group((t,), lambda: {t.name: synthetic.auxiliary(seed, label, t.shape)})


def _quantized(c: Convention, p: Projection, source: Checkpoint) -> Group:
    name = p.weight["weight"].name
    module = name.removesuffix(".weight")
    return Group(tuple(c.tensors(module, p.n, p.k).values()), lambda: c.encode(module, source.store.read(name)))


def _copied(t: Tensor, source: Checkpoint) -> Group:
    return Group((t,), lambda: {t.name: source.store.read(t.name)})


def _any(role: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(role, p) for p in patterns)


def _write(
    path: Path,
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    groups: Sequence[Group],
    max_shard_bytes: int | None,
) -> None:
    if quantization is not None:
        config = {**config, "quantization_config": quantization}
    with _new_folder(path) as folder:
        write_files(folder, groups, METADATA, max_shard_bytes)
        write_json(folder / CONFIG, config)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which becomes `path` on success and is removed on failure."""
    if path.exists():
        raise CheckpointError(f"{path}: exists, expected a new path for a checkpoint")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None
    try:
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # mkdtemp's is for its owner alone
        yield folder
        folder.rename(path)
    except OSError as e:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
