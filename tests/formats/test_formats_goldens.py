"""Our formats against what public implementations computed (tests/golden/formats, tools/record_format_goldens.py).

Equality is exact. Where a library differs by design, the difference is stated here and must be exactly that.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.formats import FormatError, e2m1, e4m3, get

GOLDEN = Path(__file__).parent.parent / "golden" / "formats"
Arrays = dict[str, np.ndarray]


def load(name: str) -> Arrays:
    with np.load(GOLDEN / f"{name}.npz") as f:
        return {key: f[key] for key in f.files if key != "versions"}


def bits(a: np.ndarray) -> np.ndarray:
    return a.view(f"u{a.dtype.itemsize}")


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal as bits, so that −0 is not 0."""
    np.testing.assert_array_equal(bits(np.ascontiguousarray(found)), bits(np.ascontiguousarray(expected)))


def tensor_scales(name: str, amaxes: np.ndarray) -> np.ndarray:
    return np.array([get(name).quantize(np.full((1, 16), a))["global_scale"].item() for a in amaxes], np.float32)


def agrees_with_torch(given: Arrays, theirs: Arrays) -> None:
    x = given["floats"]
    same(e4m3.encode(x), theirs["e4m3"])
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e4m3.decode(codes), theirs["e4m3_values"].astype(np.float64))

    infinite = (theirs["bf16"] & 0x7FFF) == 0x7F80  # torch gives infinity, our quantize refuses
    assert infinite.any()
    same(get("bf16").quantize(x[~infinite][None])["weight"][0], theirs["bf16"][~infinite])
    for overflow in x[infinite]:
        with pytest.raises(FormatError, match="row 0, column 0"):
            get("bf16").quantize(overflow.reshape(1, 1))


def agrees_with_compressed_tensors(given: Arrays, theirs: Arrays) -> None:
    fmt = get("nvfp4_ct")
    for name in ("heavy", "ties", "scale_ties", "zero", "tiny"):
        stored = {field: theirs[f"{name}.{field}"] for field in ("weight", "scale", "global_scale")}
        stored["scale"] = stored["scale"].view(ml_dtypes.float8_e4m3fn)
        ours = fmt.quantize(given[name])
        for field, expected in stored.items():
            same(ours[field], expected)
        # They divide the scales in float32, multiply in float32 and round to bf16; we round once, to float64.
        step = stored["scale"].astype(np.float32) / stored["global_scale"]
        product = e2m1.decode(stored["weight"]).astype(np.float32) * np.repeat(step, 16, axis=1)
        same(product.astype(ml_dtypes.bfloat16), theirs[f"{name}.bf16"])
        bf16 = theirs[f"{name}.bf16"].view(ml_dtypes.bfloat16).astype(np.float64)
        normal = np.abs(bf16) >= np.finfo(np.float32).tiny
        np.testing.assert_allclose(fmt.dequantize(stored)[normal], bf16[normal], rtol=2.0**-8 + 2.0**-22)
    same(tensor_scales("nvfp4_ct", given["amaxes"]), theirs["global_scales"])
    every = np.arange(256, dtype=np.uint8)[None]
    same(e2m1.decode(every).astype(np.float32), theirs["unpacked"])

    for strategy, name in (("block", "fp8"), ("channel", "fp8_row"), ("tensor", "fp8_tensor")):
        ours = get(name).quantize(given["ragged"])
        same(ours["weight"], theirs[f"{strategy}.weight"])
        scale, expected = ours["scale"].reshape(-1), theirs[f"{strategy}.scale"].reshape(-1)
        zero = expected == np.finfo(np.float32).eps  # their scale where all weights are 0; ours is 1
        assert zero.sum() == (0 if strategy == "tensor" else 1)
        assert (scale[zero] == 1).all()
        same(scale[~zero], expected[~zero])


def agrees_with_modelopt(given: Arrays, theirs: Arrays) -> None:
    fmt = get("nvfp4")
    for name in ("heavy", "ties", "scale_ties"):
        stored = {field: theirs[f"{name}.{field}"] for field in ("weight", "scale", "global_scale")}
        stored["scale"] = stored["scale"].view(ml_dtypes.float8_e4m3fn)
        ours = fmt.quantize(given[name])
        for field, expected in stored.items():
            same(ours[field], expected)
        # They multiply the scales in float32, rounded, then the element, and read code 8 as +0: we round nothing.
        step = stored["scale"].astype(np.float32) * stored["global_scale"]
        product = e2m1.decode(stored["weight"]).astype(np.float32) * np.repeat(step, 16, axis=1)
        same(product + np.float32(0), theirs[f"{name}.f32"])
        np.testing.assert_allclose(fmt.dequantize(stored), theirs[f"{name}.f32"], rtol=2.0**-22)
    same(tensor_scales("nvfp4", given["amaxes"]), theirs["global_scales"])

    # A tensor of zeros: they divide 0 by 0. Ours is legal and zero.
    assert theirs["zero.global_scale"] == 0 and e4m3.is_nan(theirs["zero.scale"]).all()
    ours = fmt.quantize(given["zero"])
    assert ours["global_scale"] == 1 and (ours["scale"].astype(np.float32) == 1).all() and not ours["weight"].any()
    # amax below 3.2e-35: they keep a subnormal tensor scale, ours is 1 and the weights are 0.
    assert 0 < theirs["tiny.global_scale"] < np.finfo(np.float32).tiny
    ours = fmt.quantize(given["tiny"])
    assert ours["global_scale"] == 1 and not ours["weight"].any()


def agrees_with_transformers(given: Arrays, theirs: Arrays) -> None:
    n, k = theirs["weight"].shape
    w = np.ascontiguousarray(given["ragged"][:n, :k])
    ours = get("fp8").quantize(w)
    # They round 448 x (1 / amax) to float32, multiply by it, and store its rounded inverse; we divide by amax / 448.
    tiles = w.reshape(n // 128, 128, k // 128, 128)
    factor = np.float32(448) * (np.float32(1) / np.abs(tiles).max(axis=(1, 3)))
    same(np.float32(1) / factor, theirs["scale"])
    same(e4m3.encode((tiles * factor[:, None, :, None]).reshape(n, k)), theirs["weight"])
    amaxes = given["amaxes"][None]
    same(np.float32(1) / (np.float32(448) * (np.float32(1) / amaxes)), theirs["scales"])
    scales = get("fp8").quantize(np.repeat(np.repeat(amaxes, 128, axis=0), 128, axis=1))["scale"]
    np.testing.assert_array_max_ulp(scales, theirs["scales"], maxulp=3)
    assert 0.2 < np.mean(scales == theirs["scales"]) < 0.8
    # Codes differ only between neighbours, and only where the exact quotient is halfway between them.
    ratio = (w.astype(np.float64).reshape(tiles.shape) * 448 / np.abs(tiles).max(axis=(1, 3), keepdims=True)).reshape(
        n, k
    )
    codes = bits(ours["weight"]).astype(int)
    apart = codes != theirs["weight"]
    assert (np.abs(codes - theirs["weight"]) <= 1).all()
    halfway = (e4m3.decode(bits(ours["weight"])) + e4m3.decode(theirs["weight"])) / 2
    np.testing.assert_allclose(ratio[apart], halfway[apart], rtol=2.0**-21)


def agrees_with_gguf(given: Arrays, theirs: Arrays) -> None:
    blocks = theirs["blocks"].reshape(-1, 36)  # 4 scale bytes, then 4 sub-blocks of 8 bytes of 16 elements
    scale, quads = blocks[:, :4], blocks[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([quads & 15, quads >> 4], axis=-1)  # low nibbles are elements 0 to 7, high ones 8 to 15
    stored = {
        "weight": e2m1.pack(codes.reshape(-1, 64)),
        "scale": scale.view(ml_dtypes.float8_e4m3fn),
        "global_scale": np.float32(1).reshape(()),
    }
    ours = get("nvfp4").dequantize(stored).reshape(-1, 4, 16)
    expected = theirs["values"].astype(np.float64).reshape(-1, 4, 16)
    nan = scale == e4m3.NAN  # they read code 0x7F as 0, to us it is NaN and refused by `check`
    assert nan.any() and (expected[nan] == 0).all() and np.isnan(ours[nan]).all()
    np.testing.assert_array_equal(ours[~nan], expected[~nan])

    halves = theirs["ue4m3_values"].astype(np.float64)  # their element table is doubled, their scales are halved
    np.testing.assert_array_equal(e4m3.decode(np.arange(127, dtype=np.uint8)), 2 * halves[:127])
    assert halves[127] == 0

    x = given["floats"][(given["floats"] >= 0) & (given["floats"] <= 448)]
    exponent = np.where(x > 0, np.maximum(np.frexp(x)[1] - 1, -6), -6)
    steps = np.ldexp(x, 3 - exponent)  # exact; a code is this rounded, plus 8 for each exponent above the subnormals
    ours = np.rint(steps).astype(int) + 8 * (exponent + 6)
    np.testing.assert_array_equal(bits(e4m3.encode(np.abs(x))), ours)
    expected = np.floor(steps + np.float32(0.5)).astype(int) + 8 * (exponent + 6)  # half up, the sum in float32
    assert (expected != ours).any()
    expected[x < 2.0**-6] = np.minimum(expected[x < 2.0**-6], 7)  # their subnormals do not round up to 2^-6
    expected[x >= 248] = 0x7E  # what rounds to 256 or more saturates
    np.testing.assert_array_equal(theirs["ue4m3"], expected)


AGREEMENT = {
    "torch": agrees_with_torch,
    "compressed-tensors": agrees_with_compressed_tensors,
    "nvidia-modelopt": agrees_with_modelopt,
    "transformers": agrees_with_transformers,
    "gguf": agrees_with_gguf,
}


@pytest.mark.parametrize("library", AGREEMENT)
def test_our_formats_agree_with(library: str) -> None:
    AGREEMENT[library](load("inputs"), load(library))


@pytest.mark.parametrize("library", AGREEMENT)
def test_each_recording_names_the_version_it_was_made_with(library: str) -> None:
    with np.load(GOLDEN / f"{library}.npz") as f:
        assert str(f["versions"][0]).startswith(f"{library} ")


def test_recordings_are_small() -> None:
    assert sum(p.stat().st_size for p in GOLDEN.iterdir()) < 300_000


@pytest.mark.parametrize("field", ["heavy.weight", "heavy.scale", "ties.weight", "ties.scale"])
@pytest.mark.parametrize("library", ["compressed-tensors", "nvidia-modelopt"])
def test_one_flipped_bit_is_noticed(library: str, field: str) -> None:
    theirs = load(library)
    theirs[field].flat[3] ^= 1
    with pytest.raises(AssertionError):
        AGREEMENT[library](load("inputs"), theirs)
