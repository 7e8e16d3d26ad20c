"""Values that no kernel may be handed, found in files; each is one sentence that names checkpoint, layer and tensor."""

import re

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import handles, write

from atlas_lab.checkpoint import (
    CheckpointError,
    Store,
    check_values,
    new,
    open_checkpoint,
    recognise,
    show,
    synthetic_sites,
)
from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.core.tensor import Tensor

NAN = float("nan")
INF = float("inf")


def stored(folder, **arrays):
    """A store of module m with these tensors."""
    names = {np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(ml_dtypes.float8_e4m3fn): "e4m3"}
    plain = {np.dtype(np.uint8): "u8", np.dtype(np.float32): "f32"}
    tensors = {f"m.{f}": Tensor((names | plain)[a.dtype], a.shape, f"m.{f}") for f, a in arrays.items()}
    write_files(folder, [Group(tuple(tensors.values()), lambda: {f"m.{f}": a for f, a in arrays.items()})], {})
    store = Store.open(folder)
    return store, recognise(store.tensors, "m")


def e4m3(*codes, shape):
    return np.resize(np.array(codes, np.uint8), shape).view(ml_dtypes.float8_e4m3fn)


def nvfp4(scale=(0x38,), tensor_scale=1.0, ct=False):
    codes = {"weight_packed" if ct else "weight": np.zeros((2, 16), np.uint8)}
    name = "weight_global_scale" if ct else "weight_scale_2"
    return codes | {
        "weight_scale": e4m3(*scale, shape=(2, 2)),
        name: np.full((1,) if ct else (), tensor_scale, np.float32),
    }


def fp8(codes=(0x38,), scale=1.0):
    return {"weight": e4m3(*codes, shape=(2, 3)), "weight_scale": np.float32([[1.0], [scale]])}


FAULTS = [
    (nvfp4(tensor_scale=NAN), "m.weight_scale_2: found NaN, expected a finite scale above 0"),
    (nvfp4(tensor_scale=0), "m.weight_scale_2: found 0, expected a finite scale above 0"),
    (nvfp4(tensor_scale=INF), "m.weight_scale_2: found infinity, expected a finite scale above 0"),
    (nvfp4(tensor_scale=-1), "m.weight_scale_2: found -1, expected a finite scale above 0"),
    (nvfp4(tensor_scale=0, ct=True), "m.weight_global_scale: found 0 at row 0, expected a finite scale above 0"),
    (nvfp4(tensor_scale=INF, ct=True), "m.weight_global_scale: found infinity at row 0, expected a finite scale above "
     "0"),
    (nvfp4(scale=(0x38, 0x38, 0x7F)), "m.weight_scale: found code 0x7F (NaN) at row 1, column 0, expected a code from "
     "0x00 to 0x7E"),
    (nvfp4(scale=(0x38, 0xB8)), "m.weight_scale: found code 0xB8 (-1) at row 0, column 1, expected a code from 0x00 "
     "to 0x7E"),
    (fp8(codes=(0, 0xFF)), "m.weight: found code 0xFF (NaN) at row 0, column 1, expected no NaN code"),
    (fp8(scale=NAN), "m.weight_scale: found NaN at row 1, column 0, expected a finite scale above 0"),
    (
        {"weight": np.array([[0, INF]], ml_dtypes.bfloat16)},
        "m.weight: found infinity at row 0, column 1, expected finite values",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "sentence"), FAULTS)
def test_fault(tmp_path, arrays, sentence):
    store, weight = stored(tmp_path, **arrays)
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{tmp_path}: layers.0.ffn.gate: {sentence}") + "$"):
        check_values(store, weight, "layers.0.ffn.gate")


@pytest.mark.parametrize("arrays", [nvfp4(), nvfp4(scale=(0,)), nvfp4(ct=True), fp8()])
def test_legal(tmp_path, arrays):
    check_values(*stored(tmp_path, **arrays), "w")


def test_show_lists_every_faulty_weight(tmp_path):
    new(tmp_path / "c", "nvfp4", layers=1)
    names = [f"model.language_model.layers.0.mlp.{p}_proj.weight_scale_2" for p in ("gate", "down")]
    file = tmp_path / "c" / "model.safetensors"
    content = bytearray(file.read_bytes())
    store = Store.open(tmp_path / "c")
    for name in names:
        at = store.files[0].data_start + store.files[0].header.offsets[name][0]
        content[at : at + 4] = bytes(4)
    file.write_bytes(content)
    assert show(tmp_path / "c").faults is None
    roles = ("layers.0.ffn.gate", "layers.0.ffn.down")
    assert show(tmp_path / "c", verify=True).faults == tuple(
        f"{tmp_path / 'c'}: {role}: {name}: found 0, expected a finite scale above 0"
        for role, name in zip(roles, names, strict=True)
    )


def test_a_handle_that_is_not_in_the_store(tmp_path):
    store = Store.open(write(tmp_path / "m.safetensors", "{}"))
    with pytest.raises(CheckpointError, match=r"m\.weight: missing, expected one of 0 tensors$"):
        check_values(store, recognise(handles("m.weight bf16 2 2"), "m"), "w")


def test_synthetic_checkpoints_have_no_fault(tmp_path):
    from atlas_lab.checkpoint import sizes

    new(tmp_path / "c", "fp8", layers=1, intermediate=200)
    assert show(tmp_path / "c", verify=True).faults == ()
    s = sizes("tiny", layers=1, intermediate=200)
    assert list(open_checkpoint(tmp_path / "c").sites) == synthetic_sites(s, "fp8")
