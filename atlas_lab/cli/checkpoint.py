"""`checkpoint`: make small ones, convert, and look into any."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from atlas_lab import checkpoint
from atlas_lab.checkpoint import Checkpoint, Described, Shown, presets
from atlas_lab.checkpoint.json_object import shown as plain
from atlas_lab.checkpoint.layout import Attention
from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.cli.progress import progress
from atlas_lab.experiments.grouping import span
from atlas_lab.experiments.report import megabytes, row, table

group = typer.Typer(help="Make, convert and look into checkpoints.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="checkpoint")

_FORMAT = Annotated[
    str,
    typer.Option(
        "--format", help="Of the projections' weights: bf16, fp8, nvfp4, nvfp4_ct ... nvfp4+fp8: FFNs in the first."
    ),
]
_PRODUCER = Annotated[
    str, typer.Option(help="Whose way of storing the format: qwen, deepseek, modelopt, compressed-tensors.")
]


@verb(group, "new")
def new(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    format: _FORMAT = "bf16",
    model: Annotated[str, typer.Option("--model", "--size", help="One of " + ", ".join(presets.NAMES))] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the model's.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size, instead of the model's.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size, instead of the model's.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary; 0: no embedding and no output head.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights: equal in every format.")] = 0,
    producer: _PRODUCER = "",
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="True names, shapes and dtypes over holes: no values, no room.")
    ] = False,
) -> int:
    """Write a synthetic checkpoint with real tensor names and on-disk dtypes."""
    given = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "vocab": vocab}
    overrides = {k: v for k, v in given.items() if v is not None}
    with progress(common.alone) as notify:
        checkpoint.new(
            path, format, model, seed, producer=producer, headers_only=headers_only, progress=notify, **overrides
        )
    return _tell(common, checkpoint.show(path))


@verb(group, "convert")
def convert(
    common: Common,
    source: Annotated[Path, typer.Argument(help="A BF16 checkpoint.")],
    path: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    format: _FORMAT = "nvfp4",
    producer: _PRODUCER = "",
) -> int:
    """Write a copy of a BF16 checkpoint with its projections quantized."""
    models = common.registry().models or None
    held = checkpoint.open_checkpoint(source, models)
    with progress(common.alone) as notify:
        checkpoint.quantize_checkpoint(held, format, path, producer=producer, progress=notify)
    return _tell(common, checkpoint.show(path, models=models))


@verb(group, "show")
def show(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A folder, a .safetensors or a .gguf file.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read the weights and check their values.")] = False,
) -> int:
    """List a checkpoint's tensors and what reads them, equal layers together.

    With --verify, exit status 1 where a value is no weight's.
    """
    registry = common.registry()
    shown = checkpoint.show(path, verify, registry.models or None)
    t = table("tensor, in its layer", "layers", "dtype", "shape", ">MB", "used by", "format")
    for (name, dtype, shape, used, form), alike in _alike(shown.rows).items():
        layers = span([n for n, _ in alike if n is not None])
        size = megabytes(sum(d.tensor.bytes for _, d in alike))
        row(t, name, layers, dtype, "x".join(map(str, shape)) or "scalar", size, used, form)
    common.console.print(t)
    return _tell(common, shown)


def _alike(rows: Sequence[Described]) -> dict[tuple[Any, ...], list[tuple[int | None, Described]]]:
    """Tensors that differ by their layer alone, with its number, under what they have in common."""
    out: dict[tuple[Any, ...], list[tuple[int | None, Described]]] = {}
    for d in rows:
        found = re.search(r"\b(?:layers|blk)\.(\d+)\.", d.tensor.name)
        name = d.tensor.name[found.end() :] if found else d.tensor.name
        used = re.sub(r"^layers\.\d+\.", "", d.used_by) if d.used_by else d.note
        key = (name, d.tensor.dtype, d.tensor.shape, used, _format(d))
        out.setdefault(key, []).append((int(found[1]) if found else None, d))
    return out


def _format(d: Described) -> str:
    return f"{d.format}: {d.field}" if d.format else ""


def _layers(held: Checkpoint) -> list[str]:
    """Layers by kind, and their heads."""
    out = []
    for layer, count in Counter(held.layout.layers if held.layout else ()).items():
        m = layer.mixer
        if isinstance(m, Attention):
            gated = ", q gated" if m.gated else ""
            heads = f"{m.heads} query and {m.kv_heads} KV heads of {m.head_dim}{gated}"
        else:
            heads = f"{m.key_heads} key heads of {m.key_head_dim}, {m.value_heads} value heads of {m.value_head_dim}"
        out.append(f"{count} layers of {layer.kind}: {heads}; FFN of {layer.intermediate}")
    if held.layout and held.layout.tied:
        out.append("output head: the embedding")
    return out


def _apart(shown: Shown) -> list[str]:
    """What no projection reads and is no part of the running model, with its bytes, and what is missing."""
    unused = {t.name for t in shown.checkpoint.unused}
    beside = shown.checkpoint.store.beside
    sums: dict[str, list[int]] = {}
    for d in shown.rows:
        if d.tensor.name in unused:
            sums.setdefault(d.note, []).append(d.tensor.bytes)
    out = [f"{note}: {len(sizes)} tensors, {megabytes(sum(sizes))} MB" for note, sizes in sums.items()]
    out += [f"missing: {name}" for name in shown.checkpoint.missing]
    return out + [f"not read: {plain(name)}, a file that is no part of this checkpoint" for name in beside]


def _tell(common: Common, shown: Shown) -> int:
    held = shown.checkpoint
    total = sum(d.tensor.bytes for d in shown.rows)
    formats = ", ".join(dict.fromkeys(d.format for d in shown.rows if d.format))
    said = f"{held.path}: {held.family}, {held.dims.layers} layers, {len(held.projections)} projections in {formats}"
    common.console.print(f"{said}; {len(shown.rows)} tensors, {megabytes(total)} MB", markup=False)
    for line in (*_layers(held), *_apart(shown)):
        common.console.print(line, markup=False)
    for fault in shown.faults or ():
        common.console.print(f"[red]bad value[/red]: {escape(fault)}")
    if shown.faults == ():
        common.console.print("all values checked: none that a kernel may not read")
    answer = {
        "schema": "atlas-lab.checkpoint/1",
        "path": str(held.path),
        "family": held.family,
        "tensors": [
            {
                "name": d.tensor.name,
                "dtype": d.tensor.dtype,
                "shape": list(d.tensor.shape),
                "used_by": d.used_by,
                "field": d.field,
                "format": d.format,
                "geometry": d.geometry,
                "note": d.note,
            }
            for d in shown.rows
        ],
        "faults": None if shown.faults is None else list(shown.faults),
    }
    common.give(json.dumps(answer, indent=1) + "\n")
    return SAYS_NO if shown.faults else DONE
