"""Which convention each role of a checkpoint that is written has, and the config that says so.

`nvfp4` is one format for all; `nvfp4+fp8` has FFNs in the first and attention and gated delta net in the second, both
by one producer. ModelOpt's is that of nvidia/Qwen3.6-27B-NVFP4: NVFP4 FFNs and output head, the rest FP8 under one
scale a tensor, which is what ModelOpt calls FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.naming import BF16, KEPT, Convention, convention
from atlas_lab.core.projection import HEAD


@dataclass(frozen=True)
class Mix:
    """Conventions of FFNs, of the rest of a layer's projections, and of the output head."""

    ffn: Convention
    rest: Convention
    head: Convention = BF16

    def of(self, role: str) -> Convention:
        """How a role's weight is stored: as narrow as ever where every release keeps it at 16 bits."""
        if role == HEAD:
            return self.head
        if role in KEPT:
            return BF16
        return self.ffn if role.startswith("ffn.") else self.rest


def mix(spelled: str, producer: str = "") -> Mix:
    """The mix that `--format` spells; raises CheckpointError for an unknown format, or one the producer has not."""
    first, plus, second = spelled.partition("+")
    ffn = convention(first, producer)
    if not plus:
        return Mix(ffn, ffn)
    if "+" in second:
        raise CheckpointError(f"format: found {spelled!r}, expected one format, or two as in nvfp4+fp8")
    if second == BF16.format:
        return Mix(ffn, BF16, head=ffn if ffn.producer == "modelopt" else BF16)
    if ffn.producer == "modelopt":
        return Mix(ffn, convention({"fp8": "fp8_tensor"}.get(second, second), "modelopt"), head=ffn)
    return Mix(ffn, convention(second, "" if first == BF16.format else ffn.producer))


def quantization_config(m: Mix, quantized: Mapping[str, Convention], ignored: Sequence[str]) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None for BF16, and for blocks, which no loader of one reads.

    `quantized` are the linear modules by their convention, `ignored` those that stay BF16.
    """
    held = list(dict.fromkeys(c for c in (m.ffn, m.rest) if c.format != "bf16"))
    if not held or held[0].producer == "ggml":
        return None
    producer = held[0].producer
    if producer in ("qwen", "deepseek"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(ignored),
        }
    if producer == "modelopt":
        return _modelopt(held, quantized, ignored)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(held) == 1 else [n for n, mine in quantized.items() if mine == c],
            "weights": _SCHEMES[c.format][0],
            "input_activations": _SCHEMES[c.format][1],
            **({"format": _packing(c)} if len(held) > 1 else {}),
        }
        for i, c in enumerate(held)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _packing(held[0]) if len(held) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
    }


_ALGORITHMS: dict[str, dict[str, Any]] = {
    "fp8_tensor": {"quant_algo": "FP8"},
    "fp8_row": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "nvfp4": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}


def _modelopt(
    held: Sequence[Convention], quantized: Mapping[str, Convention], ignored: Sequence[str]
) -> dict[str, Any]:
    made = {"quant_method": "modelopt", "quant_algo": _ALGORITHMS[held[0].format]["quant_algo"]}
    if len(held) > 1:
        layers = {name: _ALGORITHMS[c.format] for name, c in quantized.items()}
        made = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {**made, "ignore": list(ignored)}


def _packing(c: Convention) -> str:
    return "nvfp4-pack-quantized" if c.format == "nvfp4_ct" else "float-quantized"


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
