"""`checkpoint`: make small ones, convert, and look into any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atlas_lab import checkpoint
from atlas_lab.checkpoint import Described, Shown
from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.experiments.report import megabytes, row, table

group = typer.Typer(help="Make, convert and look into checkpoints.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="checkpoint")

_FORMAT = Annotated[str, typer.Option("--format", help="Of the projections' weights: bf16, fp8, nvfp4, nvfp4_ct ...")]


@verb(group, "new")
def new(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    format: _FORMAT = "bf16",
    size: Annotated[str, typer.Option(help="A preset: " + ", ".join(checkpoint.SIZES))] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the preset's.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size, instead of the preset's.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size, instead of the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights: equal in every format.")] = 0,
) -> int:
    """Write a synthetic checkpoint with real tensor names and on-disk dtypes."""
    given = {"layers": layers, "hidden": hidden, "intermediate": intermediate}
    checkpoint.new(path, format, size, seed, **{k: v for k, v in given.items() if v is not None})
    return _tell(common, checkpoint.show(path))


@verb(group, "convert")
def convert(
    common: Common,
    source: Annotated[Path, typer.Argument(help="A BF16 checkpoint.")],
    path: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    format: _FORMAT = "nvfp4",
) -> int:
    """Write a copy of a BF16 checkpoint with its projections quantized."""
    registry = common.registry()
    checkpoint.quantize_checkpoint(checkpoint.open_checkpoint(source, registry.models or None), format, path)
    return _tell(common, checkpoint.show(path, models=registry.models or None))


@verb(group, "show")
def show(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A folder or a .safetensors file.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read the weights and check their values.")] = False,
) -> int:
    """List a checkpoint's tensors and what reads them. With --verify, exit status 1 where a value is no weight's."""
    registry = common.registry()
    shown = checkpoint.show(path, verify, registry.models or None)
    t = table("tensor", "dtype", "shape", ">MB", "used by", "format")
    for d in shown.rows:
        shape = "x".join(map(str, d.tensor.shape)) or "scalar"
        row(t, d.tensor.name, d.tensor.dtype, shape, megabytes(d.tensor.bytes), d.used_by or d.note, _format(d))
    common.console.print(t)
    return _tell(common, shown)


def _format(d: Described) -> str:
    return f"{d.format}, {d.geometry}: {d.field}" if d.format else ""


def _tell(common: Common, shown: Shown) -> int:
    held = shown.checkpoint
    total = sum(d.tensor.bytes for d in shown.rows)
    formats = ", ".join(dict.fromkeys(d.format for d in shown.rows if d.format))
    said = f"{held.path}: {held.family}, {held.dims.layers} layers, {len(held.projections)} projections in {formats}"
    common.console.print(f"{said}; {len(shown.rows)} tensors, {megabytes(total)} MB", markup=False)
    for fault in shown.faults or ():
        common.console.print(f"[red]bad value[/red]: {fault}")
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
