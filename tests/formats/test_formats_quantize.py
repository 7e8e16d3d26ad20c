"""Quantize and dequantize: exact arithmetic, error bounds, ragged tiles, invariances, memory."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.formats import FORMATS, Format, e2m1, e4m3, get, scan
from atlas_lab.formats.dtypes import dtype

NAMES = [name for name, f in FORMATS.items() if "weight" in f.tensors(256, 256)]  # not those stored in blocks
FP8 = ["fp8", "fp8_tensor", "fp8_row"]
NVFP4 = ["nvfp4", "nvfp4_ct"]
SHAPES = [(1, 16), (3, 48), (128, 128), (130, 272), (257, 128), (127, 144)]


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Heavy tails, rows of very different size, so that every scale is different."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, (n, k)) * 10.0 ** rng.uniform(-3, 1, (n, 1))).astype(np.float32)


def scale_of_each_weight(fmt: Format, t: dict[str, np.ndarray], n: int, k: int) -> np.ndarray:
    """[n, k] float64, looked up one by one from the definition of the geometry."""
    scale = t["scale"].astype(np.float64)
    out = np.empty((n, k))
    for i, j in np.ndindex(n, k):
        if fmt.geometry.kind == "tensor":
            out[i, j] = scale.item()
        elif fmt.geometry.kind == "row":
            out[i, j] = scale.reshape(n)[i]
        elif fmt.geometry.kind == "block":
            out[i, j] = scale[i // 128, j // 128]
        else:
            out[i, j] = scale[i, j // 16]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_quantize_makes_the_tensors_it_declares_and_that_check_accepts(name: str, shape: tuple[int, int]) -> None:
    fmt, w = get(name), weights(*shape)
    before = w.copy()
    stored = fmt.quantize(w)
    np.testing.assert_array_equal(w, before)
    found = {f: (a.dtype, a.shape) for f, a in stored.items()}
    assert found == {f: (dtype(s.dtype).numpy, s.shape) for f, s in fmt.tensors(*shape).items()}
    assert fmt.bytes(*shape) == sum(a.nbytes for a in stored.values())
    fmt.check(stored, "w")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FP8)
def test_fp8_dequantize_is_code_times_scale(name: str, shape: tuple[int, int]) -> None:
    fmt = get(name)
    stored = fmt.quantize(weights(*shape))
    expected = stored["weight"].astype(np.float64) * scale_of_each_weight(fmt, stored, *shape)
    np.testing.assert_array_equal(fmt.dequantize(stored), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_dequantize_is_code_times_scale_and_the_tensor_scale(name: str, shape: tuple[int, int]) -> None:
    fmt = get(name)
    stored = fmt.quantize(weights(*shape))
    codes = np.stack([stored["weight"] & 15, stored["weight"] >> 4], axis=-1).reshape(shape)
    scaled = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale_of_each_weight(fmt, stored, *shape)
    tensor_scale = np.float64(stored["global_scale"].item())
    expected = scaled / tensor_scale if name == "nvfp4_ct" else scaled * tensor_scale
    np.testing.assert_array_equal(fmt.dequantize(stored), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FP8)
def test_fp8_codes_are_the_nearest_to_w_over_the_stored_scale(name: str, shape: tuple[int, int]) -> None:
    fmt, w = get(name), weights(*shape)
    stored = fmt.quantize(w)
    scale = scale_of_each_weight(fmt, stored, *shape)
    quotient = w / scale.astype(np.float32)
    np.testing.assert_array_equal(stored["weight"].view(np.uint8), e4m3.encode(quotient).view(np.uint8))
    covered = {"tensor": w.size, "row": shape[1]}.get(fmt.geometry.kind, 128 * 128)
    top = np.abs(stored["weight"].astype(np.float64)) == 448
    assert top.sum() >= w.size / covered  # the largest weight under each scale takes the largest code
    step = np.maximum(np.abs(stored["weight"].astype(np.float64)) / 16, 2.0**-10) * scale
    assert (np.abs(fmt.dequantize(stored) - w) <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_codes_are_the_nearest_under_their_scales(name: str, shape: tuple[int, int]) -> None:
    fmt, w = get(name), weights(*shape)
    stored = fmt.quantize(w)
    tensor_scale = np.float64(stored["global_scale"].item())
    step = scale_of_each_weight(fmt, stored, *shape) * (1 / tensor_scale if name == "nvfp4_ct" else tensor_scale)
    found = np.abs(fmt.dequantize(stored) - w)
    best = np.abs(e2m1.VALUES * step[..., None] - w[..., None].astype(np.float64)).min(axis=-1)
    assert (found <= best + 1e-6 * step).all()


@pytest.mark.parametrize(
    ("name", "rel_l2"), [("bf16", 0.00166), ("fp8", 0.0266), ("fp8_row", 0.0266), ("nvfp4", 0.0956)]
)
def test_error_on_gaussian_weights_is_that_of_the_format(name: str, rel_l2: float) -> None:
    w = np.random.default_rng(1).normal(0, 0.02, (256, 1024)).astype(np.float32)
    error = np.linalg.norm(get(name).dequantize(get(name).quantize(w)) - w) / np.linalg.norm(w)
    assert 0.98 * rel_l2 < error <= 1.01 * rel_l2


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(exponent=st.integers(-40, 40), seed=st.integers(0, 99))
def test_a_power_of_two_moves_into_the_top_scale(name: str, exponent: int, seed: int) -> None:
    """w·2^e has the codes and block scales of w; FP8 scales or the tensor scale take the 2^e, exactly."""
    fmt, w = get(name), weights(5, 32, seed)
    once, scaled = fmt.quantize(w), fmt.quantize(np.ldexp(w, exponent))
    np.testing.assert_array_equal(fmt.dequantize(scaled), np.ldexp(fmt.dequantize(once), exponent))
    if name != "bf16":
        np.testing.assert_array_equal(scaled["weight"].view(np.uint8), once["weight"].view(np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, w = get(name), weights(300, 160)
    whole = fmt.quantize(w)
    values = fmt.dequantize(whole)
    monkeypatch.setattr(scan, "CHUNK", 1)
    assert len(list(scan.row_chunks(300, 160))) == 300
    pieces = fmt.quantize(w)
    for field, a in whole.items():
        assert a.tobytes() == pieces[field].tobytes()
    np.testing.assert_array_equal(fmt.dequantize(pieces), values)


@pytest.mark.parametrize("name", NAMES)
def test_strided_input_is_read_as_its_values(name: str) -> None:
    fmt, w = get(name), weights(300, 160)
    expected = fmt.quantize(np.ascontiguousarray(w[::2, :144]))
    for field, a in fmt.quantize(w[::2, :144]).items():
        assert a.tobytes() == expected[field].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_zeros_is_stored_legally_and_stays_zero(name: str) -> None:
    fmt = get(name)
    stored = fmt.quantize(np.zeros((130, 48), np.float32))
    fmt.check(stored, "w")
    assert not fmt.dequantize(stored).any()
    for scale in (f for f in stored if f == "global_scale" or (f == "scale" and fmt.family == "fp8")):
        assert (stored[scale] == 1).all()


@pytest.mark.parametrize(("name", "block_scale"), [("nvfp4", 1.0), ("nvfp4_ct", 0.125)])
def test_a_zero_block_has_the_scale_of_its_convention(name: str, block_scale: float) -> None:
    w = weights(2, 32)
    w[0, 16:] = 0
    assert float(get(name).quantize(w)["scale"][0, 1]) == block_scale


@pytest.mark.parametrize(("name", "code"), [("nvfp4", 0x01), ("nvfp4_ct", 0x20)])
def test_a_block_far_below_the_rest_has_the_smallest_scale_or_that_of_a_zero_block(name: str, code: int) -> None:
    w = np.full((1, 32), 1e-6, np.float32)
    w[0, 0] = 1
    assert get(name).quantize(w)["scale"].view(np.uint8)[0, 1] == code


@pytest.mark.parametrize("name", NVFP4)
@settings(deadline=None)
@given(exponent=st.floats(-45, -30), seed=st.integers(0, 9))
def test_weights_near_the_smallest_floats_give_legal_tensors(name: str, exponent: float, seed: int) -> None:
    w = (np.random.default_rng(seed).standard_normal((2, 32)) * 10.0**exponent).astype(np.float32)
    stored = get(name).quantize(w)
    get(name).check(stored, "w")
    assert np.abs(get(name).dequantize(stored)).max() <= 1.5 * np.abs(w.astype(np.float64)).max()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bf16"])
def test_the_largest_float_is_stored(name: str) -> None:
    w = np.full((1, 16), np.finfo(np.float32).max, np.float32)
    stored = get(name).quantize(w)
    get(name).check(stored, "w")
    np.testing.assert_allclose(get(name).dequantize(stored), w.astype(np.float64), rtol=1e-6)


def test_the_two_conventions_hold_the_same_weights() -> None:
    w = weights(64, 256)
    direct, reciprocal = (get(name).quantize(w) for name in NVFP4)
    np.testing.assert_allclose(direct["global_scale"].item() * reciprocal["global_scale"].item(), 1, rtol=2e-7)
    converted = {**direct, "global_scale": np.array([1 / direct["global_scale"].item()], np.float32)}
    np.testing.assert_allclose(get("nvfp4_ct").dequantize(converted), get("nvfp4").dequantize(direct), rtol=1e-7)


@pytest.mark.parametrize("name", FP8)
def test_bf16_scales_widen_exactly(name: str) -> None:
    fmt = get(name)
    stored = fmt.quantize(weights(130, 144))
    narrow = {**stored, "scale": stored["scale"].astype(ml_dtypes.bfloat16)}
    fmt.check(narrow, "w")
    wide = {**stored, "scale": narrow["scale"].astype(np.float32)}
    np.testing.assert_array_equal(fmt.dequantize(narrow), fmt.dequantize(wide))
    assert (fmt.dequantize(narrow) != fmt.dequantize(stored)).any()


@pytest.mark.parametrize(
    ("name", "field", "shape"),
    [
        ("fp8_row", "scale", (130,)),
        ("fp8_tensor", "scale", (1,)),
        ("nvfp4", "global_scale", (1,)),
        ("nvfp4_ct", "global_scale", ()),
    ],
)
def test_the_other_stored_shape_of_the_same_scales_is_read_alike(name: str, field: str, shape: tuple[int, ...]) -> None:
    fmt = get(name)
    stored = fmt.quantize(weights(130, 144))
    other = {**stored, field: stored[field].reshape(shape)}
    fmt.check(other, "w")
    np.testing.assert_array_equal(fmt.dequantize(other), fmt.dequantize(stored))


@settings(deadline=None)
@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=40))
def test_bf16_rounds_as_the_upper_half_of_a_float32(patterns: list[int]) -> None:
    u = np.array(patterns, np.uint32) & 0xFFFFFFFF
    u = u[(u & 0x7FFFFFFF) < 0x7F7F8000]  # finite and not rounded to infinity
    if u.size:
        rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
        stored = get("bf16").quantize(u.view(np.float32)[None])
        np.testing.assert_array_equal(stored["weight"].view(np.uint16)[0], rounded)
        np.testing.assert_array_equal(stored["weight"], u.view(np.float32)[None].astype(ml_dtypes.bfloat16))
        values = get("bf16").dequantize(stored)
        np.testing.assert_array_equal(values[0], (rounded.astype(np.uint32) << 16).view(np.float32).astype(np.float64))


@pytest.mark.parametrize("name", NAMES)
def test_quantize_needs_little_memory_beside_its_input_and_output(name: str) -> None:
    w = weights(4096, 2048)
    tracemalloc.start()
    try:
        stored = get(name).quantize(w)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(a.nbytes for a in stored.values()) + w.nbytes
