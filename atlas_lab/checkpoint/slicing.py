"""Tensor parallelism as slicing of packed forms: what one rank holds of a weight, as handles of parts of the stored
tensors.

Rows of q, k, v, gate, up, qkv and z are shared out by heads, columns of o, down and out, A_log, dt_bias and the
convolution by heads; norms are every rank's. Codes and scales are cut together, on the boundaries of tiles and groups;
what has no such boundary is refused, never re-quantized. No value is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.layout import COLUMNS, ROWS, Cut, Parameter, Segment
from atlas_lab.checkpoint.sliced import Span, Spans, part_of
from atlas_lab.core.context import ModelDims
from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.tensor import Tensor

# Roles whose inputs are another projection's outputs, which ranks share out: they are cut by columns.
BY_COLUMNS = ("attn.o", "gdn.out", "ffn.down")

Cuts = Mapping[tuple[int | None, str], Cut]  # by layer (None: the model's own) and role


def slice_source(projection: Projection, rank: int, size: int, cut: Cut | None = None) -> Projection:
    """What rank `rank` of `size` holds of a projection: N or K, and parts of the stored tensors of its weight.

    Without a `cut` the rows, or the columns of `attn.o`, `gdn.out` and `ffn.down`, are shared out one by one; a
    projection of several kinds of rows (`gdn.qkv`) and whole heads need one. Raises CheckpointError, naming the
    tensor, for what cannot be cut in equal shares or not on a boundary of its tiles, groups or blocks.
    """
    if not 0 <= rank < size:
        raise CheckpointError(f"tensor parallel: found rank {rank} of {size}, expected 0 <= rank < size")
    if size == 1:
        return projection
    p = projection
    if cut is None:
        if p.role == "gdn.qkv":
            raise CheckpointError(f"{p.label}: found no widths of q, k and v, expected them to cut by heads")
        cut = Cut.columns(Segment(p.k)) if p.role in BY_COLUMNS else Cut.rows(Segment(p.n))
    name = p.weight.fields[0][1].name
    spans = shares(cut, rank, size, f"{p.label}: {name}")
    weight = cut_weight(p.weight, p.n, p.k, cut.axis, spans, p.label)
    extent = sum(e - b for b, e in spans)
    return replace(p, weight=weight, n=extent) if cut.axis == ROWS else replace(p, weight=weight, k=extent)


def shares(cut: Cut, rank: int, size: int, label: str) -> tuple[Span, ...]:
    """The spans of a cut axis that are one rank's: an equal share of every segment; raises CheckpointError."""
    out = []
    at = 0
    for s in cut.segments:
        count = s.extent // s.unit
        if s.extent % s.unit or count % size:
            noun = s.noun or ("rows" if cut.axis == ROWS else "columns")
            raise CheckpointError(
                f"{label}: found {count} {noun}, expected a multiple of {size} to share among {size} ranks"
            )
        mine = count // size * s.unit
        out.append((at + rank * mine, at + (rank + 1) * mine))
        at += s.extent
    return tuple(out)


def cut_weight(weight: WeightSource, n: int, k: int, axis: int, spans: tuple[Span, ...], label: str) -> WeightSource:
    """Rows or columns of a weight `[n, k]`, each stored tensor cut as its scales allow; raises CheckpointError."""
    extent = (n, k)[axis]
    _on_boundaries(weight, axis, spans, extent, label)
    fields = tuple((f, part_of(t, _axes(weight, f, t, axis, spans, extent))) for f, t in weight.fields)
    return replace(weight, fields=fields)


def _on_boundaries(weight: WeightSource, axis: int, spans: tuple[Span, ...], extent: int, label: str) -> None:
    g = weight.geometry
    step = {"block": (g.rows, g.cols), "group": (1, g.cols), "packed": (1, g.cols)}.get(g.kind, (1, 1))[axis]
    what = {"block": "tiles of its scales", "group": "groups under one scale", "packed": "stored blocks"}.get(g.kind)
    noun = ("row", "column")[axis]
    for i, (begin, end) in enumerate(spans):
        # A tile that the weight's own edge cuts short may end a part, where no other span follows it.
        inner = end if end < extent or i + 1 < len(spans) else 0
        bad = next((at for at in (begin, inner) if at % step), None)
        if bad is not None:
            raise CheckpointError(
                f"{label}: {weight.fields[0][1].name}: found a cut at {noun} {bad}, expected one at a multiple of "
                f"{step}, a boundary of the {what}"
            )


def _axes(
    weight: WeightSource, field: str, t: Tensor, axis: int, spans: tuple[Span, ...], extent: int
) -> tuple[Spans, ...]:
    """The part of one stored tensor that covers these rows or columns of its weight, axis by axis."""
    kind = weight.geometry.kind
    if field == "global_scale" or (field == "scale" and kind == "tensor"):
        return ()
    if field == "scale" and kind == "row":  # [N, 1] or [N]
        return (spans,) if axis == ROWS else ()
    if field == "scale" and kind == "block":  # a grid of tiles, [N/128, K/128] or [N/128, 1, K/128, 1]
        step = (weight.geometry.rows, weight.geometry.cols)[axis]
        tiles = tuple((b // step, -(-e // step)) for b, e in spans)
        place = axis if len(t.shape) == 2 else 2 * axis
        return (None,) * place + (tiles,)
    if axis == ROWS:
        return (spans,)
    width = t.shape[COLUMNS]  # stored elements for `extent` columns: codes or scales of groups, or blocks of bytes
    return (None, tuple((b * width // extent, e * width // extent) for b, e in spans))


def slice_sites(sites: tuple[Site, ...], cuts: Cuts, rank: int, size: int) -> tuple[Site, ...]:
    """A rank's share of every projection; raises CheckpointError."""
    return tuple(
        Site(tuple(slice_source(p, rank, size, cuts.get((p.layer, p.role))) for p in s.projections)) for s in sites
    )


def slice_parameter(p: Parameter, cut: Cut | None, rank: int, size: int) -> Parameter:
    """What a rank holds of a tensor that is no projection's: all of it without a `cut`; raises CheckpointError."""
    if cut is None or size == 1:
        return p
    return replace(p, tensor=part_of(p.tensor, (shares(cut, rank, size, f"{p.label}: {p.tensor.name}"),)))


def slice_dims(dims: ModelDims, size: int) -> ModelDims:
    """The dimensions of one rank, whose KV heads and FFN width are a share of the model's."""
    return replace(
        dims,
        intermediate=dims.intermediate // size,
        kv_heads=dims.kv_heads // size,
        kv_width=dims.kv_width // size,
        state_bytes=dims.state_bytes // size,
    )
