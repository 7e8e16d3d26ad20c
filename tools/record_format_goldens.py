"""Record what the public implementations of our weight formats compute, for tests/formats/test_goldens.py.

Recorded with torch 2.13.0, compressed-tensors 0.20.1, nvidia-modelopt 0.47.0, transformers 5.24.0, gguf 0.19.0 and
ml_dtypes 0.6.0 on a CPU; each file names its own versions. To record again, from the repository root:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0 compressed-tensors==0.20.1 nvidia-modelopt==0.47.0 \
        transformers==5.24.0 gguf==0.19.0 ml_dtypes 'numpy<2.5'
    /tmp/peers/bin/python tools/record_format_goldens.py

Weights are recorded too (inputs.npz): no random stream has to stay the same. The functions named after a library
take such weights and return its arrays; tests/peers/test_formats_live.py calls them on fresh ones. float8 and
bfloat16 arrays are stored as the integers of their bits.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "formats"
Arrays = dict[str, np.ndarray]


def inputs(seed: int) -> Arrays:
    """Weights with heavy tails and the cases in which recipes differ, and float32 values to convert."""
    rng = np.random.default_rng(seed)
    heavy = rng.standard_t(3, (32, 256)) * 10.0 ** rng.uniform(-2, 1, (32, 1))
    heavy[0, :16] = 0  # a zero block
    heavy[1, :16] *= 1e-7  # a block whose scale is below 2^-9
    heavy[2, 0] = -0.0
    heavy[2, 1] = -1e-9  # rounds to zero from below
    ragged = rng.standard_t(4, (130, 140)) * 0.02
    ragged[128:, 128:] = 0  # a zero tile
    ragged[5] = 0  # a zero row
    return {
        "heavy": heavy.astype(np.float32),
        "ties": nvfp4_ties(),
        "scale_ties": nvfp4_scale_ties(rng),
        "zero": np.zeros((2, 32), np.float32),
        "tiny": np.full((1, 16), 1e-37, np.float32),
        "ragged": ragged.astype(ml_dtypes.bfloat16).astype(np.float32),
        "floats": float_cases(rng),
        "amaxes": np.abs(rng.standard_normal(256) * 2.0 ** rng.integers(-20, 20, 256)).astype(np.float32),
    }


def nvfp4_ties() -> np.ndarray:
    """[3, 32]: under amax 2688/1024 the tensor scale is 2^-10, block scales and elements fall on ties."""
    w = np.zeros((3, 32), np.float32)
    w[0, 0] = 2688
    w[0, 16:] = 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0
    w[1, ::16] = 6 * 1.0625, 6 * 1.1875  # block scales halfway between E4M3 codes: 1.0, 1.125, 1.25
    w[2, ::16] = 6 * 2.0**-10, 6 * 1.5 * 2.0**-9  # the same among subnormals
    return w / np.float32(1024)


def nvfp4_scale_ties(rng: np.random.Generator) -> np.ndarray:
    """[3, 2016]: block scales within a rounding error of each tie, under a tensor scale that is no power of two."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    amax = np.float32(rng.uniform(1, 2))
    tie = ((codes[1:] + codes[:-1]) / 2 * 6 * (amax / 2688)).astype(np.float32)
    w = np.zeros((3, 16 * tie.size), np.float32)
    w[:, ::16] = np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(1e9))
    w[:, -1] = amax
    return w


def float_cases(rng: np.random.Generator) -> np.ndarray:
    """Float32 without NaN: E4M3 and bf16 values, their midpoints, both neighbours of each, and every magnitude."""
    e4m3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = np.concatenate([e4m3, (e4m3[1:] + e4m3[:-1]) / 2, [464, 480, 2**-10]]).astype(np.float32)
    near = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))])
    high = rng.integers(0, 0x7F80, 300).astype(np.uint32) << 16
    bf16_ties = np.concatenate([high | 0x8000, high | 0x7FFF, high | 0x8001]).view(np.float32)
    bits = rng.integers(0, 0x7F800000, 800).astype(np.uint32).view(np.float32)
    spread = (rng.standard_normal(800) * 2.0 ** rng.uniform(-12, 10, 800)).astype(np.float32)
    edge = np.array([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000], np.uint32).view(np.float32)
    positive = np.abs(np.concatenate([near, bf16_ties, bits, spread, edge]))
    return np.unique(np.concatenate([positive, -positive]).view(np.uint32)).view(np.float32)


def torch_casts(given: Arrays) -> Arrays:
    """Casts of `floats` to float8_e4m3fn and bfloat16, and the value of each E4M3 code."""
    import torch

    x = torch.from_numpy(given["floats"])
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return {
        "e4m3": _bits(x.to(torch.float8_e4m3fn)),
        "bf16": _bits(x.to(torch.bfloat16)),
        "e4m3_values": codes.view(torch.float8_e4m3fn).to(torch.float32).numpy(),
    }


def compressed_tensors(given: Arrays) -> Arrays:
    """NVFP4 of each weight whose K allows it, with the decompressed bf16 values; FP8 of `ragged`, three scalings."""
    import torch
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    out: Arrays = {}
    common: dict[str, Any] = {"type": "float", "symmetric": True}
    fp4 = QuantizationArgs(
        num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, **common
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=fp4)
    for name, w in nvfp4_weights(given).items():
        x = torch.from_numpy(w)
        blocks = x.unflatten(-1, (-1, 16))
        divisor = generate_gparam(x.min(), x.max())
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), fp4, global_scale=divisor)
        stored = NVFP4PackedCompressor.compress(
            {"weight": x, "weight_scale": scale, "weight_global_scale": divisor}, scheme
        )
        out[f"{name}.weight"] = stored["weight_packed"].numpy()
        out[f"{name}.scale"] = _bits(stored["weight_scale"])
        out[f"{name}.global_scale"] = stored["weight_global_scale"].numpy()
        out[f"{name}.bf16"] = _bits(NVFP4PackedCompressor.decompress(stored, scheme)["weight"])
    out["global_scales"] = np.concatenate([generate_gparam(-a, a).numpy() for a in torch.from_numpy(given["amaxes"])])
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)[None]
    out["unpacked"] = unpack_fp4_from_uint8(every, 1, 512, torch.float32).numpy()

    w = given["ragged"]
    for strategy in ("block", "channel", "tensor"):
        block = {"block_structure": [128, 128]} if strategy == "block" else {}
        args = QuantizationArgs(num_bits=8, strategy=strategy, **block, **common)
        codes, scale = _fp8(w, args)
        out[f"{strategy}.weight"], out[f"{strategy}.scale"] = codes, scale
    return out


def _fp8(w: np.ndarray, args: Any) -> tuple[np.ndarray, np.ndarray]:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    x = torch.from_numpy(w)
    if args.strategy == "block":
        pad = torch.nn.functional.pad(x, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128))
        tiles = pad.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    elif args.strategy == "channel":
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    else:
        low, high = x.min(), x.max()
    scale, _ = calculate_qparams(low, high, args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    stored = compressor.compress({"weight": x, "weight_scale": scale}, scheme)
    return _bits(stored["weight"]), stored["weight_scale"].numpy()


def modelopt(given: Arrays) -> Arrays:
    """NVFP4 of each weight whose K allows it, with the dequantized float32 values."""
    import torch
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    out: Arrays = {}
    for name, w in nvfp4_weights(given).items():
        q, scale, scale_2 = NVFP4QTensor.quantize(torch.from_numpy(w.copy()), 16)
        out[f"{name}.weight"] = q._quantized_data.numpy()
        out[f"{name}.scale"] = _bits(scale)
        out[f"{name}.global_scale"] = scale_2.numpy()
        values = q.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        out[f"{name}.f32"] = values.numpy()
    amaxes = torch.from_numpy(given["amaxes"])
    out["global_scales"] = np.stack([NVFP4QTensor.get_weights_scaling_factor_2(a[None]).numpy() for a in amaxes])
    return out


def transformers(given: Arrays) -> Arrays:
    """FP8 128x128 of the whole tiles of `ragged` (this library quantizes no partial tile); scales of many tiles."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Config(dict[str, Any]):
        scale_fmt = "float"

    quantizer = SimpleNamespace(quantization_config=Config(weight_block_size=[128, 128]))
    quantize = Fp8Quantize(quantizer)._quantize_one
    stored = quantize("x.weight", torch.from_numpy(whole_tiles(given["ragged"])))
    many = quantize("x.weight", torch.from_numpy(tiles_of(given["amaxes"])))
    return {
        "weight": _bits(stored["x.weight"]),
        "scale": stored["x.weight_scale_inv"].numpy(),
        "scales": many["x.weight_scale_inv"].numpy(),
    }


def gguf(given: Arrays) -> Arrays:
    """GGML NVFP4 blocks with their values, the value of each scale code, and scale codes of `floats` from 0 to 448."""
    from gguf import GGMLQuantizationType
    from gguf.quants import NVFP4, dequantize

    rng = np.random.default_rng(given["floats"].size)
    blocks = rng.integers(0, 256, (8, 2 * 36), dtype=np.uint8)
    for start in (0, 36):  # four scale bytes open each block of 64 weights; none has a sign
        blocks[:, start : start + 4] &= 0x7F
    blocks[0, :4] = 0x00, 0x7E, 0x7F, 0x01
    floats = given["floats"]
    scales = floats[(floats >= 0) & (floats <= 448)]
    return {
        "blocks": blocks,
        "values": dequantize(blocks, GGMLQuantizationType.NVFP4),
        "ue4m3_values": NVFP4.ue4m3_to_fp32(np.arange(128, dtype=np.uint8)).astype(np.float32),
        "ue4m3": NVFP4.fp32_to_ue4m3(scales),
    }


def nvfp4_weights(given: Arrays) -> Arrays:
    return {name: given[name] for name in ("heavy", "ties", "scale_ties", "zero", "tiny")}


def whole_tiles(w: np.ndarray) -> np.ndarray:
    n, k = (d // 128 * 128 for d in w.shape)
    return np.ascontiguousarray(w[:n, :k])


def tiles_of(amaxes: np.ndarray) -> np.ndarray:
    """One row of 128x128 tiles, each of equal values."""
    return np.repeat(np.repeat(amaxes[None], 128, axis=0), 128, axis=1)


def _bits(t: Any) -> np.ndarray:
    import torch

    bits: np.ndarray = t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.uint16).numpy()
    return bits


RECORDERS = {
    "torch": torch_casts,
    "compressed-tensors": compressed_tensors,
    "nvidia-modelopt": modelopt,
    "transformers": transformers,
    "gguf": gguf,
}


def save(name: str, arrays: Arrays, *packages: str) -> None:
    versions = np.array([f"{p} {version(p)}" for p in dict.fromkeys(packages)])
    np.savez_compressed(GOLDEN / f"{name}.npz", allow_pickle=False, versions=versions, **arrays)


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    given = inputs(seed=2688)
    save("inputs", given, "numpy", "ml_dtypes")
    for library, record in RECORDERS.items():
        save(library, record(given), library, "torch", "numpy")
    for path in sorted(GOLDEN.glob("*.npz")):
        print(f"{path.name:24s} {path.stat().st_size:7d} bytes")


if __name__ == "__main__":
    main()
