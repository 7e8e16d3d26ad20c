"""NVFP4 activations against code that is not ours: ModelOpt's recorded weights, ml_dtypes' casts, gguf's blocks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.formats import block_nvfp4, nvfp4_groups

GOLDEN = Path(__file__).parent.parent / "golden" / "formats"
TIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.75, -2.5, -5, -6, -0.0, 0.1])


def activations(seed: int, k: int = 512) -> np.ndarray:
    """float32 of BF16 values over all magnitudes that scales reach and some beyond, zeros and ties among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((9, k)) * 2.0 ** np.repeat(rng.integers(-16, 14, (9, k // 16)), 16, axis=1)
    x[:, :16] = 0
    for i, step in enumerate((1, 2.0**-9, 448, 0.875)):
        x[i, 16:32] = TIES * step
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("name", ["heavy", "ties", "scale_ties"])
def test_what_modelopt_made_under_the_same_tensor_scale(name: str) -> None:
    with np.load(GOLDEN / "inputs.npz") as given, np.load(GOLDEN / "nvidia-modelopt.npz") as theirs:
        codes, scales = nvfp4_groups.quantize(given[name], theirs[f"{name}.global_scale"].reshape(()))
        np.testing.assert_array_equal(codes, theirs[f"{name}.weight"])
        np.testing.assert_array_equal(scales.view(np.uint8), theirs[f"{name}.scale"].view(np.uint8))


@pytest.mark.parametrize("tensor_scale", [1, 2.0**-7, 0.0371])
@pytest.mark.parametrize("seed", range(3))
def test_codes_and_scales_are_the_casts_of_ml_dtypes(seed: int, tensor_scale: float) -> None:
    x, tensor_scale = activations(seed), np.float32(tensor_scale)
    codes, scales = nvfp4_groups.quantize(x, tensor_scale)
    groups = x.reshape(len(x), -1, 16)
    wanted = np.abs(groups).max(axis=2) / (np.float32(6) * tensor_scale)
    wanted = np.where(wanted == 0, np.float32(1), np.clip(wanted, np.float32(2.0**-9), np.float32(448)))
    expected = wanted.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scales.view(np.uint8), expected.view(np.uint8))
    assert {1.0, 2.0**-9, 448.0} <= set(expected.astype(np.float64).ravel())
    scaled = groups / (expected.astype(np.float32) * tensor_scale)[..., None] + np.float32(0)
    of = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape) & 15
    np.testing.assert_array_equal(codes, of[:, ::2] | of[:, 1::2] << 4)
    values = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * expected.astype(np.float64)[..., None]
    found = nvfp4_groups.dequantize(codes, scales, tensor_scale)
    np.testing.assert_array_equal(found, values.reshape(x.shape) * np.float64(tensor_scale))


def test_blocks_of_them_are_what_gguf_reads() -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    codes, scales = nvfp4_groups.quantize(activations(5))
    blocks = block_nvfp4.from_nvfp4(codes, scales)
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(theirs.astype(np.float64), nvfp4_groups.dequantize(codes, scales))


def test_values_times_their_scales_are_exact_in_bf16() -> None:
    """All codes under all scales: what emulated products multiply."""
    codes = np.tile(np.arange(0, 256, 1, dtype=np.uint8)[:, None], (1, 8))
    for scale in range(1, 127):
        scales = np.full((256, 1), scale, np.uint8).view(ml_dtypes.float8_e4m3fn)
        values = nvfp4_groups.dequantize(codes, scales)
        np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float64), values)
