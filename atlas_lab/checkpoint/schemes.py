"""What quantization configs call the ways of storing a weight, as the formats that are read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atlas_lab.checkpoint.json_object import CheckpointError, brief, is_integer, shown

# Formats in words: what the tensors of a weight say.
TITLES = {
    "bf16": "BF16",
    "fp8": "FP8 under 128x128 tiles",
    "fp8_row": "FP8 under a scale a row",
    "fp8_tensor": "FP8 under one scale",
    "nvfp4": "ModelOpt NVFP4",
    "nvfp4_ct": "compressed-tensors NVFP4",
}


@dataclass(frozen=True)
class Scheme:
    """A way of storing weights: the formats that are it (none for one that is not read here), and what it is called."""

    formats: frozenset[str]
    title: str

    @classmethod
    def of(cls, *formats: str) -> Scheme:
        return cls(frozenset(formats), " or ".join(TITLES[f] for f in formats))

    @classmethod
    def unread(cls, title: str) -> Scheme:
        return cls(frozenset(), shown(title))


UNQUANTIZED = Scheme.of("bf16")


@dataclass(frozen=True)
class Claim:
    """A scheme that a config gives a weight, and the entry that says so."""

    scheme: Scheme
    entry: str


# quant_algo of ModelOpt (modelopt/torch/export/quant_utils.py) by the weights that it stores; the input's scheme is
# no part of it. Any other algorithm is one whose weights are not read here.
MODELOPT = {
    "FP8": Scheme.of("fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme.of("fp8_row"),
    "FP8_PB_WO": Scheme.of("fp8"),
    "FP8_PB_REAL": Scheme.of("fp8"),
    "NVFP4": Scheme.of("nvfp4"),
    "W4A16_NVFP4": Scheme.of("nvfp4"),
    "W4A8_NVFP4_FP8": Scheme.of("nvfp4"),
}

# Names that compressed-tensors has for whole schemes (quantization/quant_scheme.py).
PRESETS = {
    "UNQUANTIZED": UNQUANTIZED,
    "NVFP4": Scheme.of("nvfp4_ct"),
    "NVFP4A16": Scheme.of("nvfp4_ct"),
    "FP8": Scheme.of("fp8_tensor"),
    "FP8_DYNAMIC": Scheme.of("fp8_row"),
    "FP8_BLOCK": Scheme.of("fp8"),
}


def modelopt(algorithm: str, group: object, label: str) -> Scheme:
    """The scheme of a quant_algo; `group` is the group_size beside it. Raises CheckpointError for a group_size that is
    no integer."""
    scheme = MODELOPT.get(algorithm.upper(), Scheme.unread(algorithm))
    if group is not None and not is_integer(group):
        raise CheckpointError(f"{label}: group_size: found {brief(group)}, expected an integer")
    if scheme.formats == {"nvfp4"} and group not in (None, 16):
        return Scheme.unread(f"{algorithm} in groups of {group}")
    return scheme


def compressed_tensors(weights: Mapping[str, Any], label: str, nvfp4: str = "nvfp4_ct") -> Scheme:
    """The scheme of a config group's `weights` (compressed_tensors.quantization.QuantizationArgs), with its defaults.

    `nvfp4` is the format of 4-bit floats, which the config of either producer describes alike. Raises CheckpointError,
    naming the key, for values of another type.
    """
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    group = weights.get("group_size")
    strategy = weights.get("strategy")
    block = weights.get("block_structure")
    if not is_integer(bits) or not 1 <= bits <= 64:
        raise CheckpointError(f"{label}.num_bits: found {brief(bits)}, expected an integer from 1 to 64")
    if not isinstance(kind, str):
        raise CheckpointError(f"{label}.type: found {brief(kind)}, expected int or float")
    if strategy is not None and not isinstance(strategy, str):
        raise CheckpointError(f"{label}.strategy: found {brief(strategy)}, expected text")
    if group is not None and not is_integer(group):
        raise CheckpointError(f"{label}.group_size: found {brief(group)}, expected an integer")
    if block is not None and not (isinstance(block, list | str) and len(block) <= 20):
        raise CheckpointError(f"{label}.block_structure: found {brief(block)}, expected two integers")
    kind = kind.lower()
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = strategy.lower()
    if kind == "float" and bits == 4 and strategy in ("tensor_group", "group") and group == 16:
        return Scheme.of(nvfp4)
    if kind == "float" and bits == 8:
        if strategy == "block" and block in ([128, 128], "128x128"):
            return Scheme.of("fp8")
        if strategy in ("channel", "tensor"):
            return Scheme.of("fp8_row" if strategy == "channel" else "fp8_tensor")
    return Scheme.unread(_title(kind, bits, strategy, group, block))


def _title(kind: str, bits: int, strategy: str, group: int | None, block: object) -> str:
    if (kind, bits, strategy, group) == ("float", 4, "group", 32):
        return "MXFP4"
    size = (
        f" of {group}" if strategy in ("group", "tensor_group") else f" {brief(block)}" if strategy == "block" else ""
    )
    return f"{kind}{bits}, {brief(strategy)[1:-1]}{size}"
