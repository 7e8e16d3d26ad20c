"""How producers store a quantized weight: the one table of suffixes, stored dtypes and shapes.

Recognising, writing and naming without a file all read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.core.projection import HEAD, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import FORMATS, FormatError, checks, get, scan
from atlas_lab.formats.dtypes import dtype
from atlas_lab.formats.ggml import Blocks

Read = Callable[[slice], np.ndarray]

# Suffixes of a module's name by family and field. Where there are two, either may occur, never both.
SUFFIXES: dict[str, dict[str, tuple[str, ...]]] = {
    "bf16": {"weight": ("weight",)},
    "fp8": {"weight": ("weight",), "scale": ("weight_scale_inv", "weight_scale")},
    "nvfp4": {"weight": ("weight",), "scale": ("weight_scale",), "global_scale": ("weight_scale_2",)},
    "nvfp4_ct": {"weight": ("weight_packed",), "scale": ("weight_scale",), "global_scale": ("weight_global_scale",)},
}

# Weights in GGML's blocks, by the suffix that says which; only GGUF files have them, and they name no module.
BLOCKS: dict[str, str] = {f"weight_{f.name}": f.name for f in FORMATS.values() if isinstance(f, Blocks)}
SUFFIXES |= {form: {"blocks": (suffix,)} for suffix, form in BLOCKS.items()}
SUFFIXES["block_nvfp4"]["global_scale"] = SUFFIXES["nvfp4"]["global_scale"]
OPTIONAL = frozenset({("block_nvfp4", "global_scale")})  # fields that a weight may lack

# Scales of activations: stored beside a weight, no part of it.
ACTIVATION_SUFFIXES = ("input_scale", "input_global_scale", "activation_scale")

# Roles that stay at 16 bits: the gates in every release, as wide as there are value heads, and accuracy hangs on them;
# the output head in most.
KEPT = ("gdn.b", "gdn.a", HEAD)


@dataclass(frozen=True)
class Convention:
    """One producer's way of storing one format.

    `scale` is the suffix of the block, row or tensor scale; `scale_dtype` and `scale_shape` replace the format's own
    (`[N]` for a row scale, `[1]` for a tensor scale) where they are given.
    """

    producer: str
    format: str
    scale: str = ""
    scale_dtype: str = ""
    flat_scale: bool = False

    def suffix(self, field: str) -> str:
        """What field `field` of a module's weight is called after the module's name and a dot."""
        family = self.format if self.format in SUFFIXES else get(self.format).family
        return self.scale if field == "scale" and self.scale else SUFFIXES[family][field][0]

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """The stored tensors of `module`'s weight `[n, k]` by field; raises CheckpointError where the format cannot
        hold it."""
        try:
            specs = get(self.format).tensors(n, k)
        except FormatError as e:
            raise CheckpointError(f"{module}: {e}") from None
        out = {}
        for field, (element, shape) in specs.items():
            if field == "scale":
                element, shape = self.scale_dtype or element, self._scale_shape(shape)
            out[field] = Tensor(element, shape, f"{module}.{self.suffix(field)}")
        return out

    def source(self, module: str, n: int, k: int) -> WeightSource:
        """The weight as the core speaks of it."""
        form = get(self.format)
        return WeightSource(form.name, form.family, form.geometry, tuple(self.tensors(module, n, k).items()))

    def encode(self, module: str, n: int, k: int, read: Read) -> dict[str, np.ndarray]:
        """A weight as stored tensors by name, made from some rows at a time; raises CheckpointError.

        `read` returns rows of the weight `[n, k]`, bf16 or float32. They are read twice where a scale is over all of
        them. A scale that is stored as bf16 is rounded after the codes were chosen.
        """
        form = get(self.format)
        handles = self.tensors(module, n, k)
        tiles = form.geometry.rows if form.geometry.kind == "block" else 1
        whole = ("global_scale",) if "global_scale" in handles else ("scale",) * (form.geometry.kind == "tensor")

        def wide(rows: slice) -> np.ndarray:
            w = read(rows).astype(np.float32)
            self._finite(module, w, rows)
            return w

        amax = max(scan.amax(wide(rows)) for rows in scan.row_chunks(n, k)) if whole else None
        out = {f: np.empty(t.shape, dtype(t.dtype).numpy) for f, t in handles.items()}
        for rows in scan.row_chunks(n, k, tiles):
            try:
                made = form.quantize_rows(wide(rows), amax)
            except FormatError as e:
                raise CheckpointError(f"{module}: {e}") from None
            for f, a in made.items():
                step = tiles if f == "scale" else 1
                part = out[f][...] if f in whole else out[f][rows.start // step : -(-rows.stop // step)]
                part[...] = a.astype(part.dtype, copy=False).reshape(part.shape)
        return {t.name: out[f] for f, t in handles.items()}

    def _finite(self, module: str, w: np.ndarray, rows: slice) -> None:
        if np.isfinite(scan.amax(w)):
            return
        at = scan.first(w, lambda x: ~np.isfinite(x))
        assert at is not None
        where = checks.place((at[0] + rows.start, at[1]))
        label = checks.source_label(self.format)
        raise CheckpointError(f"{module}: {label}: found {checks.show(w[at])}{where}, expected finite values")

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[:1] or (1,)) if self.flat_scale else shape


# The first of a format is the one that is written unless a producer is named.
CONVENTIONS: tuple[Convention, ...] = (
    Convention("huggingface", "bf16"),
    Convention("qwen", "fp8", "weight_scale_inv", "bf16"),
    Convention("deepseek", "fp8", "weight_scale_inv"),
    Convention("compressed-tensors", "fp8", "weight_scale", "bf16"),
    Convention("modelopt", "fp8_tensor", "weight_scale"),
    Convention("compressed-tensors", "fp8_tensor", "weight_scale", flat_scale=True),
    Convention("compressed-tensors", "fp8_row", "weight_scale"),
    Convention("modelopt", "fp8_row", "weight_scale", flat_scale=True),
    Convention("modelopt", "nvfp4"),
    Convention("compressed-tensors", "nvfp4_ct"),
)

GGML: tuple[Convention, ...] = tuple(Convention("ggml", form) for form in BLOCKS.values())

BF16 = CONVENTIONS[0]


def convention(format_name: str, producer: str = "") -> Convention:
    """How `producer` (by default the format's usual one) stores a format; raises CheckpointError."""
    known_formats = dict.fromkeys(c.format for c in (*CONVENTIONS, *GGML))
    if format_name not in known_formats:
        raise CheckpointError(f"format: found {format_name!r}, expected one of {', '.join(known_formats)}")
    mine = [c for c in (*CONVENTIONS, *GGML) if c.format == format_name]
    for c in mine:
        if producer in ("", c.producer):
            return c
    known = ", ".join(c.producer for c in mine)
    raise CheckpointError(f"producer of {format_name}: found {producer!r}, expected one of {known}")
