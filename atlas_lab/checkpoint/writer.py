"""Checkpoints that are made from nothing: synthetic ones from a seed, and files of headers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atlas_lab.checkpoint import synthetic
from atlas_lab.checkpoint.family import PART, Family
from atlas_lab.checkpoint.files import Group, Progress, new_folder, silent, write_files, write_headers, write_json
from atlas_lab.checkpoint.layout import EMBED, Layout, Other, Weight
from atlas_lab.checkpoint.mix import Mix, mix, quantization_config
from atlas_lab.checkpoint.naming import Convention
from atlas_lab.checkpoint.qwen35 import QWEN35
from atlas_lab.checkpoint.sizes import Sizes
from atlas_lab.checkpoint.store import CONFIG
from atlas_lab.core.projection import HEAD, label_of
from atlas_lab.core.tensor import Tensor

METADATA = {"format": "pt"}  # what loaders of the usual libraries look for

# Key of config.json that says that the files hold headers and no values.
HEADERS_ONLY = "atlas_lab_headers_only"


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
    progress: Progress = silent,
) -> None:
    """Write a synthetic checkpoint folder of the Qwen3.5 family, as `write_model`."""
    config = s.config(text_only=text_only)
    root = QWEN35.layout(config).prefixes[1 if text_only else 0]
    made = _plan(QWEN35, config, mix(format_name, producer), layers, roles, root, seed)
    _write(Path(path), made, lambda folder: write_files(folder, made.groups, METADATA, max_shard_bytes, progress))


def write_model(
    path: str | os.PathLike[str],
    family: Family,
    config: Mapping[str, Any],
    format_name: str,
    seed: int = 0,
    *,
    producer: str = "",
    headers_only: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress = silent,
) -> None:
    """Write a synthetic checkpoint folder of the model of a config.json, with the names and dtypes of real ones.

    Equal seeds give equal BF16 weights in every format, and equal bytes. With `headers_only` files have true headers
    and holes for values: as long as a real model's, and next to nothing on disk. Raises CheckpointError, also where
    `path` exists; nothing is left of a checkpoint that was not finished.
    """
    if headers_only:
        config = {**config, HEADERS_ONLY: True}
    made = _plan(family, config, mix(format_name, producer), None, None, family.layout(config).prefixes[0], seed)
    if headers_only:
        _write(Path(path), made, lambda folder: write_headers(folder, made.groups, METADATA, max_shard_bytes))
    else:
        _write(Path(path), made, lambda folder: write_files(folder, made.groups, METADATA, max_shard_bytes, progress))


@dataclass
class _Planned:
    """What is written: config.json and the tensors, those that are made together in one group."""

    config: dict[str, Any]
    mix: Mix
    groups: list[Group] = field(default_factory=list)
    quantized: dict[str, Convention] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def weight(self, module: str, w: Weight, seed: int, label: str) -> None:
        c = self.mix.of(w.role)
        if c.format != "bf16":
            self.quantized[module] = c
        else:
            self.ignored.append(module)
        handles = tuple(c.tensors(module, w.n, w.k).values())

        def make() -> dict[str, np.ndarray]:
            values = synthetic.weight(seed, label, w.n, w.k)
            return {handles[0].name: values} if c.format == "bf16" else c.encode(module, w.n, w.k, values.__getitem__)

        self.groups.append(Group(handles, make))

    def other(self, name: str, o: Other, seed: int, label: str) -> None:
        t = Tensor("bf16", o.shape, name)
        if o.role == EMBED or (len(o.shape) == 2 and o.role.startswith("mtp.")):
            self.groups.append(Group((t,), lambda: {name: synthetic.weight(seed, label, *o.shape)}))
        else:
            about_one = not o.centred and ("norm" in o.role or o.role.endswith(".scale"))
            self.groups.append(Group((t,), lambda: {name: synthetic.auxiliary(seed, label, o.shape, about_one)}))


def _plan(
    family: Family,
    config: Mapping[str, Any],
    m: Mix,
    layers: Iterable[int] | None,
    roles: Sequence[str] | None,
    root: str,
    seed: int,
) -> _Planned:
    """A model, or some layers and roles of it: `roles` (patterns) leaves out the rest, and what no projection reads."""
    layout = family.layout(config)
    made = _Planned(dict(config), m)
    chosen = layout.selected(layers, roles)
    for layer in dict.fromkeys(layer for layer, _ in chosen):
        for role in (r for at, group in chosen if at == layer for r in group):
            w = layout.weight(layer, role)
            made.weight(layout.module(root, layer, w), w, seed, label_of(layer, role))
        if roles is None:
            for o in layout.layers[layer].others:
                made.other(f"{root}layers.{layer}.{o.name}", o, seed, f"layers.{layer}.{o.name}")
    if layers is None and roles is None:
        _outside(made, layout, root, seed)
    else:
        held = {role for _, group in chosen for role in group}
        order = dict.fromkeys(w.role for layer in layout.layers for w in layer.weights)
        made.config[PART] = {
            "layers": sorted({layer for layer, _ in chosen}),
            "roles": [r for r in order if r in held],
        }
    return made


def _outside(made: _Planned, layout: Layout, root: str, seed: int) -> None:
    """What belongs to no layer: embedding, last norm, output head, multi-token prediction."""
    for o in layout.others:
        made.other(root + o.name, o, seed, o.name)
    if layout.head and not layout.tied:
        made.weight(HEAD, layout.head, seed, HEAD)
    for o in layout.extra:
        made.other(o.name, o, seed, o.name)


def _write(path: Path, made: _Planned, files: Callable[[Path], None]) -> None:
    config = dict(made.config)
    quantization = quantization_config(made.mix, made.quantized, made.ignored)
    if quantization is not None:
        config["quantization_config"] = quantization
    with new_folder(path) as folder:
        files(folder)
        write_json(folder / CONFIG, config)
