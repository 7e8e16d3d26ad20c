"""Checkpoints that transformers, compressed-tensors and ModelOpt wrote, against what these packages read from them.

The files and the checksums of their values are in tests/golden/checkpoints (tools/record_checkpoint_goldens.py);
tests/peers/test_checkpoints_live.py does the same with fresh ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.checkpoint import Checkpoint, CheckpointError, check_values, describe, open_checkpoint
from atlas_lab.core.projection import Projection
from atlas_lab.formats import e2m1, get

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"
BF16 = np.dtype(ml_dtypes.bfloat16)

FORMATS = {
    "transformers-bf16": {"bf16"},
    "transformers-fp8": {"bf16", "fp8"},
    "transformers-fp8-f32": {"bf16", "fp8"},
    "compressed-tensors-nvfp4": {"bf16", "nvfp4_ct"},
    "compressed-tensors-fp8-block": {"bf16", "fp8"},
    "compressed-tensors-fp8-channel": {"fp8_row"},
    "compressed-tensors-mixed": {"bf16", "nvfp4_ct", "fp8_tensor", "fp8"},
    "nvidia-modelopt-mixed": {"bf16", "nvfp4", "fp8_tensor"},
    "nvidia-modelopt-nvfp4": {"bf16", "nvfp4"},
    "nvidia-modelopt-fp8-block": {"bf16", "fp8", "fp8_tensor"},  # one scale where one tile is the weight
    "nvidia-modelopt-fp8-channel": {"bf16", "fp8_row"},
}


def agrees(name: str, folder: Path, expected: dict[str, Any]) -> None:
    """Every linear weight is found, is stored as the writer of `name` stores it, and has the values in `expected`: of
    each module dtype, shape, SHA-256 of the values, and the first of them."""
    checkpoint = open_checkpoint(folder)
    assert {p.weight.format for p in checkpoint.projections} == FORMATS[name]
    found = {module_of(p): p for p in checkpoint.projections}
    linear = {m for m in expected if not m.endswith("embed_tokens") and ".visual." not in m}
    assert set(found) == linear
    for module, p in found.items():
        check_values(checkpoint.store, p.weight, p.label)
        theirs = as_theirs(p, arrays_of(checkpoint, p), np.dtype(expected[module]["dtype"]))
        assert [float(x) for x in theirs.reshape(-1)[:2]] == expected[module]["first"], module
        assert list(theirs.shape) == expected[module]["shape"]
        assert hashlib.sha256(theirs.tobytes()).hexdigest() == expected[module]["sha256"], module
        # What they round on the way, and to theirs: not far from our exact product.
        ours = get(p.weight.format).dequantize(arrays_of(checkpoint, p))
        rounding = 2.0**-22 + (2.0**-8 if theirs.dtype == BF16 else 0)
        np.testing.assert_allclose(theirs.astype(np.float64), ours, rtol=rounding, atol=0)
    rows = describe(checkpoint)
    assert sorted(r.tensor.name for r in rows) == sorted(checkpoint.store.tensors)
    assert "unknown" not in {r.note for r in rows}


def module_of(p: Projection) -> str:
    return p.weight.fields[0][1].name.removesuffix(".weight").removesuffix(".weight_packed")


def arrays_of(checkpoint: Checkpoint, p: Projection) -> dict[str, np.ndarray]:
    return {f: checkpoint.store.read(t.name) for f, t in p.weight.fields}


def as_theirs(p: Projection, held: dict[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The values rounded where the three packages round: to float32 each time, and at the end to `dtype`."""
    if p.weight.format == "bf16":
        return held["weight"]
    scale = held["scale"]
    if p.weight.family == "nvfp4":
        wide = scale.astype(np.float32)
        step = wide * held["global_scale"] if p.weight.format == "nvfp4" else wide / held["global_scale"]
        values = e2m1.decode(held["weight"]).astype(np.float32) * np.repeat(step, 16, axis=1)
        # ModelOpt reads code 8 as +0.
        return (values + np.float32(0) if p.weight.format == "nvfp4" else values).astype(dtype)
    n, k = p.n, p.k
    if p.weight.format == "fp8":
        scale = np.repeat(np.repeat(scale, 128, axis=0)[:n], 128, axis=1)[:, :k]
    elif p.weight.format == "fp8_row":
        scale = scale.reshape(n, 1)
    product = held["weight"].astype(np.float32) * scale.astype(np.float32)  # exact under a bf16 scale
    return product.astype(dtype)


def recorded(name: str) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((GOLDEN / name / "expected.json").read_text())
    return out


NAMES = sorted(p.name for p in GOLDEN.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of(name: str) -> None:
    agrees(name, GOLDEN / name, recorded(name)["values"])


@pytest.mark.parametrize("name", NAMES)
def test_each_recording_names_the_version_it_was_made_with(name: str) -> None:
    library = next(v for v in ("transformers", "compressed-tensors", "nvidia-modelopt") if name.startswith(v))
    assert recorded(name)["versions"][0].startswith(f"{library} ")


def test_recordings_are_small() -> None:
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 400_000


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "m")
    store = open_checkpoint(GOLDEN / name).store
    tensor = store.tensors[
        next(n for n in store.tensors if n.endswith(("down_proj.weight", "down_proj.weight_packed")))
    ]
    path = tmp_path / "m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin, end = store.files[0].header.offsets[tensor.name]
    data[store.files[0].data_start + (begin + end) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        agrees(name, tmp_path / "m", recorded(name)["values"])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "transformers-bf16"])
def test_a_weight_of_another_kind_than_the_config_says_is_noticed(name: str, tmp_path: Path) -> None:
    """The FFN's input projection, as if it had not been quantized: a BF16 tensor under the same config."""
    from atlas_lab.checkpoint.files import Group, write_files
    from atlas_lab.core.tensor import Tensor

    checkpoint = open_checkpoint(GOLDEN / name)
    p = next(p for p in checkpoint.projections if p.role == "ffn.gate")
    module = module_of(p)
    kept = [t for n, t in checkpoint.store.tensors.items() if not n.startswith(f"{module}.")]
    plain = Tensor("bf16", (p.n, p.k), f"{module}.weight")
    values = {t.name: checkpoint.store.read(t.name) for t in kept} | {plain.name: np.zeros((p.n, p.k), BF16)}
    write_files(tmp_path, [Group((*kept, plain), lambda: values)], {"format": "pt"})
    for config in (GOLDEN / name).glob("*config.json"):
        shutil.copy(config, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{module}\.weight: found BF16 \(bf16\[{p.n}, {p.k}\]\), expected "):
        open_checkpoint(tmp_path)
