"""How producers store a quantized weight: the one table of suffixes, stored dtypes and shapes.

Recognising, writing and naming without a file all read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import FORMATS, FormatError, get
from atlas_lab.formats.dtypes import dtype

# Suffixes of a module's name by family and field. Where there are two, either may occur, never both.
SUFFIXES: dict[str, dict[str, tuple[str, ...]]] = {
    "bf16": {"weight": ("weight",)},
    "fp8": {"weight": ("weight",), "scale": ("weight_scale_inv", "weight_scale")},
    "nvfp4": {"weight": ("weight",), "scale": ("weight_scale",), "global_scale": ("weight_scale_2",)},
    "nvfp4_ct": {"weight": ("weight_packed",), "scale": ("weight_scale",), "global_scale": ("weight_global_scale",)},
}

# Scales of activations: stored beside a weight, no part of it.
ACTIVATION_SUFFIXES = ("input_scale", "input_global_scale")

# Roles that every release keeps at 16 bits: as wide as there are value heads, and accuracy hangs on them.
KEPT = ("gdn.b", "gdn.a")


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

    def encode(self, module: str, w: np.ndarray) -> dict[str, np.ndarray]:
        """A weight, float32 or bf16 `[N, K]`, as stored tensors by name; raises CheckpointError.

        A scale that is stored as bf16 is rounded after the codes were chosen.
        """
        n, k = w.shape
        handles = self.tensors(module, n, k)
        if self.format == "bf16" and w.dtype == dtype("bf16").numpy:
            return {handles["weight"].name: w}
        try:
            made = get(self.format).quantize(w.astype(np.float32, copy=False))
        except FormatError as e:
            raise CheckpointError(f"{module}: {e}") from None
        return {t.name: made[f].astype(dtype(t.dtype).numpy, copy=False).reshape(t.shape) for f, t in handles.items()}

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

BF16 = CONVENTIONS[0]


def convention(format_name: str, producer: str = "") -> Convention:
    """How `producer` (by default the format's usual one) stores a format; raises CheckpointError."""
    if format_name not in FORMATS:
        raise CheckpointError(f"format: found {format_name!r}, expected one of {', '.join(FORMATS)}")
    mine = [c for c in CONVENTIONS if c.format == format_name]
    for c in mine:
        if producer in ("", c.producer):
            return c
    known = ", ".join(c.producer for c in mine)
    raise CheckpointError(f"producer of {format_name}: found {producer!r}, expected one of {known}")


def quantization_config(c: Convention, ignored: list[str]) -> dict[str, object] | None:
    """The `quantization_config` of config.json for a checkpoint in this convention; None for BF16.

    `ignored` are the linear modules that stay BF16.
    """
    if c.format == "bf16":
        return None
    if c.producer in ("qwen", "deepseek"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ignored,
        }
    if c.producer == "modelopt":
        algorithm = {"fp8_tensor": "FP8", "fp8_row": "FP8_PER_CHANNEL_PER_TOKEN", "nvfp4": "W4A16_NVFP4"}[c.format]
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignored}
    weights, inputs = _SCHEMES[c.format]
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if c.format == "nvfp4_ct" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ignored,
    }


# compressed-tensors: weights and input activations of a config group.
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_SCHEMES: Mapping[str, tuple[dict[str, object], dict[str, object] | None]] = {
    "fp8": (
        {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8_row": ({**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}),
    "fp8_tensor": ({**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "token", "dynamic": True}),
    "nvfp4_ct": (
        {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "float8_e4m3fn",
        },
        None,
    ),
}
