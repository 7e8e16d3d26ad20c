"""Record tiny checkpoints that public packages write, and what they read from them, for
tests/checkpoint/test_checkpoint_recognise_goldens.py.

Recorded with torch 2.13.0, transformers 5.24.0, compressed-tensors 0.20.1, nvidia-modelopt 0.47.0 and safetensors 0.8.0
on a CPU; each expected.json names its own versions. To record again, from the repository root:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1 nvidia-modelopt==0.47.0 \
        safetensors==0.8.0 accelerate ml_dtypes 'numpy<2.5'
    /tmp/peers/bin/python tools/record_checkpoint_goldens.py

Each function in WRITERS writes one checkpoint of a random Qwen3.5 into a folder and returns the values of its linear
weights as that package reads them, by module; tests/peers/test_checkpoints_live.py calls them with other seeds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "checkpoints"
Values = dict[str, np.ndarray]  # float32 or bfloat16 `[N, K]` by module

# One layer of each kind. Every K is a multiple of 16; those that come in tiles have an intermediate size of TILED.
TEXT = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TILED = 144  # a tile of 128 and a part of one
VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 4, "temporal_patch_size": 1,
    "out_hidden_size": 32, "num_position_embeddings": 4,
}  # fmt: skip

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCK = {**FP8, "strategy": "block", "block_structure": [128, 128]}
BLOCK_INPUT = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
TOKEN = {**FP8, "strategy": "token", "dynamic": True}
NVFP4 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
GATES = r"re:.*linear_attn\.in_proj_[ab]$"


def tiny(seed: int, *, whole: bool, **sizes: Any) -> Any:
    """A random model in BF16: the whole one with its vision tower, or the text model alone."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    if whole:
        config = t.Qwen3_5Config(text_config=TEXT | sizes, vision_config=VISION)
        return t.Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    config = t.Qwen3_5TextConfig(**TEXT | sizes, architectures=["Qwen3_5ForCausalLM"])
    return t.Qwen3_5ForCausalLM(config).to(torch.bfloat16)


def bf16(folder: Path, seed: int) -> Values:
    """As transformers writes it, with the vision tower."""
    model = tiny(seed, whole=True)
    model.save_pretrained(folder)
    return loaded(folder)


def fp8(folder: Path, seed: int, scales: str = "bfloat16") -> Values:
    """transformers' fine-grained FP8, by its own quantizer (its `save_pretrained` needs a GPU). Weights that tiles do
    not divide stay BF16, unnamed in the config; scales are stored as `scales`, as Qwen's own releases do."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    tiny(seed, whole=False, **sizes, layer_types=["full_attention"]).save_pretrained(folder)
    kept = ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.o_proj"]
    config = FineGrainedFP8Config(modules_to_not_convert=kept)

    class Quantizer:
        quantization_config = config

    quantize = Fp8Quantize(Quantizer())
    stored: dict[str, Any] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        is_kept = not name.endswith("_proj.weight") or name.removesuffix(".weight") in kept
        stored |= {name: value} if is_kept else quantize.convert({name: value})
    stored = {n: v.to(getattr(torch, scales)) if n.endswith("_scale_inv") else v for n, v in stored.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    _edit(folder, quantization_config=config.to_dict())
    return loaded(folder)


def nvfp4_ct(folder: Path, seed: int) -> Values:
    """NVFP4 weights and activations of the whole model, the vision tower and gates left out by expressions."""
    groups = {"g": {"targets": ["Linear"], "weights": NVFP4, "input_activations": {**NVFP4, "dynamic": "local"}}}
    return _compressed(tiny(seed, whole=True), folder, groups, ["lm_head", "re:.*visual.*", GATES])


def block_ct(folder: Path, seed: int) -> Values:
    """FP8 under 128x128 tiles, partial ones among them."""
    groups = {"g": {"targets": ["Linear"], "weights": BLOCK, "input_activations": BLOCK_INPUT}}
    return _compressed(tiny(seed, whole=False, intermediate_size=TILED), folder, groups, ["lm_head", GATES])


def channel_ct(folder: Path, seed: int) -> Values:
    """FP8 under a scale a row, the gates and the output head too."""
    groups = {"g": {"targets": ["Linear"], "weights": {**FP8, "strategy": "channel"}, "input_activations": TOKEN}}
    return _compressed(tiny(seed, whole=False), folder, groups, [])


def mixed_ct(folder: Path, seed: int) -> Values:
    """NVFP4 weights alone, FP8 under one scale with a static input scale, FP8 under tiles: a group of targets each."""
    tensor = {**FP8, "strategy": "tensor"}
    groups = {
        "a": {"targets": [r"re:.*mlp\.(gate|up|down)_proj$"], "weights": NVFP4},
        "b": {"targets": [r"re:.*self_attn\..*_proj$"], "weights": tensor, "input_activations": tensor},
        "c": {"targets": [r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"], "weights": BLOCK},
    }
    return _compressed(tiny(seed, whole=False), folder, groups, [])


def mixed_modelopt(folder: Path, seed: int) -> Values:
    """NVFP4 weights alone for the FFN, FP8 under one scale for the rest: MIXED_PRECISION, by layer."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    nvfp4 = next(e for e in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if e["quantizer_name"] == "*weight_quantizer")["cfg"]
    config["quant_cfg"] += [
        {"quantizer_name": "*mlp*weight_quantizer", "cfg": nvfp4},
        {"quantizer_name": "*mlp*input_quantizer", "enable": False},
    ]
    return _modelopt(tiny(seed, whole=False), folder, config)


def nvfp4_modelopt(folder: Path, seed: int) -> Values:
    """NVFP4 weights and activations."""
    import modelopt.torch.quantization as mtq

    return _modelopt(tiny(seed, whole=False), folder, mtq.NVFP4_DEFAULT_CFG)


def block_modelopt(folder: Path, seed: int) -> Values:
    """FP8_PB_WO: grids of four dimensions, and `[]` where one tile is the weight."""
    import modelopt.torch.quantization as mtq

    return _modelopt(tiny(seed, whole=False, intermediate_size=TILED), folder, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG)


def channel_modelopt(folder: Path, seed: int) -> Values:
    """FP8_PER_CHANNEL_PER_TOKEN: scales `[N]`."""
    import modelopt.torch.quantization as mtq

    return _modelopt(tiny(seed, whole=False), folder, mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG)


def _compressed(model: Any, folder: Path, groups: dict[str, Any], ignore: list[str]) -> Values:
    """Quantize by compressed-tensors' scales of the largest values, compress and save as its own life cycle does."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is None:
            continue
        w = module.weight.data.float()
        divisor = generate_gparam(w.min(), w.max()) if args.strategy == "tensor_group" else None
        if divisor is not None:
            module.weight_global_scale.data.copy_(divisor)
        scale, _ = calculate_qparams(*_bounds(w, args), args, global_scale=divisor)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        for name in ("input_scale", "input_global_scale"):
            if hasattr(module, name):
                getattr(module, name).data.fill_(0.75)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return loaded(folder)


def _bounds(w: Any, args: Any) -> tuple[Any, Any]:
    """Smallest and largest weight under each scale."""
    import torch

    if args.strategy == "tensor_group":
        return torch.aminmax(w.unflatten(-1, (-1, args.group_size)), dim=-1)
    if args.strategy == "channel":
        return torch.aminmax(w, dim=1, keepdim=True)
    if args.strategy == "tensor":
        return torch.aminmax(w)
    rows, cols = args.block_structure
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % cols, 0, -w.shape[0] % rows))
    tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    return tiles.amin((1, 3)), tiles.amax((1, 3))


def _modelopt(model: Any, folder: Path, config: dict[str, Any]) -> Values:
    """Quantize and export, then dequantize what was stored by ModelOpt's own tensor classes."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    mtq.quantize(model, config, lambda m: m(torch.arange(8)[None]))
    export_hf_checkpoint(model, export_dir=str(folder))
    stored = load_file(folder / "model.safetensors")
    out = {}
    for name, codes in stored.items():
        module = name.removesuffix(".weight")
        if module == name or codes.ndim != 2:
            continue
        scale, second = stored.get(f"{module}.weight_scale"), stored.get(f"{module}.weight_scale_2")
        if second is not None:
            n, k = codes.shape[0], 2 * codes.shape[1]
            q = NVFP4QTensor(torch.Size((n, k)), torch.float32, codes)
            out[module] = q.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16}).numpy()
        elif scale is not None:
            tiles = {-1: 128, -2: 128} if scale.ndim == 4 else None
            grid = scale.reshape(scale.shape[0], scale.shape[2]) if tiles else scale
            by_row = grid[:, None] if grid.ndim == 1 else grid
            q8 = FP8QTensor(codes.shape, torch.float32, codes)
            out[module] = q8.dequantize(torch.float32, scale=by_row, block_sizes=tiles).numpy()
        else:
            out[module] = codes.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return out


def loaded(folder: Path) -> Values:
    """The linear weights as transformers loads them, dequantized where they are not BF16, by compressed-tensors those
    that it wrote: transformers' own way fails on several formats in one checkpoint."""
    import torch
    import transformers as t

    config = json.loads((folder / "config.json").read_text())
    architecture = getattr(t, config["architectures"][0])
    method = config.get("quantization_config", {}).get("quant_method")
    dequantize = {"quantization_config": t.FineGrainedFP8Config(dequantize=True)} if method == "fp8" else {}
    model = architecture.from_pretrained(folder, dtype=torch.bfloat16, **dequantize)
    if method == "compressed-tensors":
        model.hf_quantizer.compressor.decompress_model(model)
    out = {}
    for name, value in model.state_dict().items():
        if name.endswith(".weight") and value.ndim == 2 and ".visual." not in name:
            assert value.dtype == torch.bfloat16, name
            bits = value.contiguous().view(torch.uint16).numpy()
            out[name.removesuffix(".weight")] = bits.view(ml_dtypes.bfloat16)
    return out


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")


WRITERS: dict[str, tuple[str, Callable[[Path, int], Values]]] = {
    "transformers-bf16": ("transformers", bf16),
    "transformers-fp8": ("transformers", fp8),
    "compressed-tensors-nvfp4": ("compressed-tensors", nvfp4_ct),
    "compressed-tensors-fp8-block": ("compressed-tensors", block_ct),
    "compressed-tensors-fp8-channel": ("compressed-tensors", channel_ct),
    "compressed-tensors-mixed": ("compressed-tensors", mixed_ct),
    "nvidia-modelopt-mixed": ("nvidia-modelopt", mixed_modelopt),
    "nvidia-modelopt-fp8-block": ("nvidia-modelopt", block_modelopt),
}

# Written by tests/peers alone.
LIVE = {
    "transformers-fp8-f32": ("transformers", lambda folder, seed: fp8(folder, seed, "float32")),
    "nvidia-modelopt-nvfp4": ("nvidia-modelopt", nvfp4_modelopt),
    "nvidia-modelopt-fp8-channel": ("nvidia-modelopt", channel_modelopt),
}


def expected(values: Values) -> dict[str, Any]:
    """What a test compares: dtype, shape and SHA-256 of each weight's values, and the first of them."""
    return {module: summary(w) for module, w in sorted(values.items())}


def summary(w: np.ndarray) -> dict[str, Any]:
    return {
        "dtype": w.dtype.name,
        "shape": list(w.shape),
        "sha256": hashlib.sha256(np.ascontiguousarray(w).tobytes()).hexdigest(),
        "first": [float(x) for x in w.reshape(-1)[:2]],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    for name, (library, write) in WRITERS.items():
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        values = write(folder, 20)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "model.safetensors").chmod(0o644)
        packages = [f"{p} {version(p)}" for p in dict.fromkeys((library, "transformers", "torch", "safetensors"))]
        lines = ",\n".join(f"{json.dumps(module)}: {json.dumps(w)}" for module, w in expected(values).items())
        text = f'{{"versions": {json.dumps(packages)}, "values": {{\n{lines}\n}}}}\n'
        (folder / "expected.json").write_text(text)
        print(f"{name:32s} {sum(p.stat().st_size for p in folder.iterdir()):7d} bytes")


if __name__ == "__main__":
    main()
