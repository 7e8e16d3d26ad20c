"""Block formats: layouts spelled out weight by weight, error bounds, shuffles, and what is refused."""

from __future__ import annotations

import re
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.formats import FormatError, Geometry, Spec, block_nvfp4, e2m1, get, q4_k, q6_k
from atlas_lab.formats.ggml import Blocks

# Name: weights and bytes of a block, weights of a group, relative L2 on Gaussian weights.
TABLE = {
    "q8_0": (32, 34, 32, 0.00536),
    "q4_k": (256, 144, 32, 0.0715),
    "q6_k": (256, 210, 16, 0.0178),
    "q2_0_g64": (64, 18, 64, 0.72),
    "q2_0_g128": (128, 34, 128, 0.769),
    "block_nvfp4": (64, 36, 16, 0.0956),
}
FORMS = list(TABLE)


def form(name: str) -> Blocks:
    f = get(name)
    assert isinstance(f, Blocks)
    return f


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, (n, k)) * 10.0 ** rng.uniform(-3, 1, (n, 1))).astype(np.float32)


def halves(b: bytes, *at: int) -> list[float]:
    return [struct.unpack_from("<e", b, i)[0] for i in at]


def one_by_one(name: str, b: bytes) -> list[float]:
    """The weights of one block from the struct's definition."""
    if name == "q8_0":
        (d,) = halves(b, 0)
        return [d * q for q in struct.unpack_from("32b", b, 2)]
    if name.startswith("q2_0"):
        (d,) = halves(b, 0)
        return [d * ((b[2 + j // 4] >> 2 * (j % 4) & 3) - 1) for j in range(4 * (len(b) - 2))]
    if name == "q6_k":
        (d,) = halves(b, 208)
        scales = struct.unpack_from("16b", b, 192)
        out = []
        for j in range(256):
            half, quarter, at = j // 128, j % 128 // 32, j % 32
            low = b[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
            high = b[128 + 32 * half + at] >> 2 * quarter & 3
            out.append(d * scales[j // 16] * ((low | high << 4) - 32))
        return out
    if name == "q4_k":
        d, dmin = halves(b, 0, 2)
        s = b[4:16]
        out = []
        for j in range(256):
            g = j // 32
            if g < 4:
                sc, m = s[g] & 63, s[g + 4] & 63
            else:
                sc, m = s[g + 4] & 15 | s[g - 4] >> 6 << 4, s[g + 4] >> 4 | s[g] >> 6 << 4
            q = b[16 + 32 * (j // 64) + j % 32] >> 4 * (g % 2) & 15
            out.append(d * sc * q - dmin * m)
        return out
    scales = [float(x) for x in np.frombuffer(b[:4], ml_dtypes.float8_e4m3fn).astype(float)]
    return [scales[j // 16] * e2m1.VALUES[b[4 + 8 * (j // 16) + j % 8] >> 4 * (j % 16 // 8) & 15] for j in range(64)]


@pytest.mark.parametrize("name", FORMS)
def test_a_format_states_its_family_geometry_and_tensors(name: str) -> None:
    block, size, group, _ = TABLE[name]
    f = form(name)
    assert f.family == name.split("_g")[0]
    assert f.geometry == Geometry("packed", 1, block, group=group)
    assert str(f.geometry) == (f"group({group})" if group == block else f"group({group}) in blocks of {block}")
    k = 3 * block
    assert f.tensors(5, k).pop("blocks") == Spec("u8", (5, 3 * size))
    assert f.bytes(5, k) == 15 * size + 4 * (name == "block_nvfp4")


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_weight_of_a_block_lies_where_the_struct_says(name: str, seed: int) -> None:
    f, rng = form(name), np.random.default_rng(seed)
    blocks = f.quantize(weights(2, 2 * f.block, seed))["blocks"].reshape(4, -1)
    codes = {"q6_k": slice(0, 208), "q4_k": slice(4, None), "block_nvfp4": slice(4, None)}.get(name, slice(2, None))
    blocks[:, codes] = rng.integers(0, 256, blocks[:, codes].shape)
    expected = [one_by_one(name, b.tobytes()) for b in blocks]
    np.testing.assert_array_equal(f.dequantize({"blocks": blocks.reshape(2, -1)}), np.reshape(expected, (2, -1)))


@pytest.mark.parametrize("name", FORMS)
def test_quantize_makes_what_it_declares_and_what_check_accepts(name: str) -> None:
    f, w = form(name), weights(3, 512)
    before = w.copy()
    made = f.quantize(w)
    np.testing.assert_array_equal(w, before)
    assert {k: Spec({"uint8": "u8", "float32": "f32"}[str(a.dtype)], a.shape) for k, a in made.items()} == f.tensors(
        3, 512
    )
    f.check(made, "w")
    for column in (slice(None, None, 2), slice(512, None)):  # strided and offset views are read as their values
        wide = np.zeros((3, 1024), np.float32)
        wide[:, column] = w
        assert all(a.tobytes() == made[k].tobytes() for k, a in f.quantize(wide[:, column]).items())


@pytest.mark.parametrize("name", FORMS)
def test_error_on_gaussian_weights_is_that_of_the_format(name: str) -> None:
    w = np.random.default_rng(1).normal(0, 0.02, (256, 1024)).astype(np.float32)
    error = np.linalg.norm(get(name).dequantize(get(name).quantize(w)) - w) / np.linalg.norm(w)
    assert 0.98 * TABLE[name][3] < error < 1.02 * TABLE[name][3]


@pytest.mark.parametrize("name", ["q2_0_g64", "q2_0_g128"])
def test_ternary_weights_are_stored_exactly(name: str) -> None:
    group = TABLE[name][0]
    rng = np.random.default_rng(2)
    w = rng.integers(-1, 2, (8, 512)) * np.repeat(rng.integers(1, 2000, (8, 512 // group)) / 2.0**11, group, axis=1)
    made = get(name).quantize(w.astype(np.float32))
    np.testing.assert_array_equal(get(name).dequantize(made), w)
    made["blocks"][:, 2] |= 3  # code 3, which no quantizer writes, is twice the scale
    get(name).check(made, "w")
    d = np.ascontiguousarray(made["blocks"][:, :2]).view("<f2")[:, 0].astype(np.float64)
    np.testing.assert_array_equal(get(name).dequantize(made)[:, 0], 2 * d)


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_zero_and_near_zero_stay_there(name: str) -> None:
    f = form(name)
    for value in (0.0, -0.0, 1e-39, -1e-45, 1e-30):
        made = f.quantize(np.full((2, 256), value, np.float32))
        f.check(made, "w")
        assert np.abs(f.dequantize(made)).max() <= 1.2 * abs(value)


@given(st.binary(min_size=24, max_size=24))
def test_the_six_bit_scales_of_q4_k_are_packed_as_they_are_unpacked(b: bytes) -> None:
    packed = np.frombuffer(b, np.uint8).reshape(2, 12)
    sc, m = q4_k.unpack_scales(packed)
    assert max(sc.max(), m.max()) < 64
    np.testing.assert_array_equal(q4_k.pack_scales(sc, m), packed)


def test_the_codes_of_q6_k_are_packed_as_they_are_unpacked() -> None:
    q = np.random.default_rng(0).integers(0, 64, (3, 256)).astype(np.uint8)
    np.testing.assert_array_equal(q6_k.codes(np.pad(q6_k.pack(q), ((0, 0), (0, 18)))), q)


@settings(max_examples=30)
@given(n=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_nvfp4_is_shuffled_into_blocks_and_back(n: int, blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (n, blocks * 32), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (n, blocks * 4), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored = {"weight": weight, "scale": scale, "global_scale": np.float32(rng.uniform(0.001, 1)).reshape(())}
    shuffled = block_nvfp4.from_nvfp4(weight, scale)
    as_blocks = {"blocks": shuffled, "global_scale": stored["global_scale"].reshape(1)}
    get("block_nvfp4").check(as_blocks, "w")
    np.testing.assert_array_equal(get("block_nvfp4").dequantize(as_blocks), get("nvfp4").dequantize(stored))
    np.testing.assert_array_equal(
        np.sort(shuffled.reshape(-1, 36)[:, :4]), np.sort(scale.view(np.uint8).reshape(-1, 4))
    )
    back = block_nvfp4.to_nvfp4(shuffled)
    assert back[0].tobytes() == weight.tobytes() and back[1].tobytes() == scale.tobytes()


def test_block_nvfp4_is_quantized_as_nvfp4() -> None:
    w = weights(5, 256)
    made, plain = get("block_nvfp4").quantize(w), get("nvfp4").quantize(w)
    assert made["global_scale"] == plain["global_scale"]
    np.testing.assert_array_equal(get("block_nvfp4").dequantize(made), get("nvfp4").dequantize(plain))


def test_a_copy_of_the_checkpoints_bytes_would_be_wrong() -> None:
    plain = get("nvfp4").quantize(weights(1, 64))
    copied = np.concatenate([plain["scale"].view(np.uint8), plain["weight"]], axis=1)
    values = get("block_nvfp4").dequantize({"blocks": copied, "global_scale": plain["global_scale"]})
    assert (values != get("nvfp4").dequantize(plain)).any()


@pytest.mark.parametrize("name", FORMS)
def test_k_that_no_block_divides_is_refused(name: str) -> None:
    f = form(name)
    k = f.block + 16
    sentence = rf"^{name}: found K = {k} in a weight \[2, {k}\], expected a multiple of {f.block}$"
    with pytest.raises(FormatError, match=sentence):
        f.tensors(2, k)
    with pytest.raises(FormatError, match=sentence):
        f.quantize(np.ones((2, k), np.float32))


@pytest.mark.parametrize("name", [n for n in FORMS if n != "block_nvfp4"])
def test_weights_beyond_the_f16_scale_are_refused_and_the_largest_taken(name: str) -> None:
    f = form(name)
    w = np.ones((3000, 512), np.float32)
    w[2500, 300] = f.largest
    f.check(f.quantize(w[2499:2502]), "w")
    w[2500, 300] = -1e10
    sentence = (
        f"the weight to quantize as {name}: found -1e+10 at row 2500, column 300, expected a block whose f16 scale is"
    )
    with pytest.raises(FormatError, match=f"^{re.escape(sentence)} at most 65504$"):
        f.quantize(w)


@pytest.mark.parametrize("name", FORMS)
def test_tensors_of_another_structure_are_refused(name: str) -> None:
    f = form(name)
    good = f.quantize(weights(2, 256))["blocks"]
    size, block = f.block_bytes, f.block
    expected = f"[N, a multiple of the {size} bytes of a block of {block}]"
    for bad, sentence in (
        ({}, "L.blocks: missing, found no tensor at all"),
        ({"blocks": good.view(np.int8)}, "L.blocks: found dtype i8, expected u8"),
        ({"blocks": good[0]}, f"L.blocks: found shape [{good.shape[1]}], expected {expected}"),
        ({"blocks": good[:, :-1]}, f"L.blocks: found shape [2, {good.shape[1] - 1}], expected {expected}"),
        ({"blocks": good[:0]}, f"L.blocks: found shape [0, {good.shape[1]}], expected {expected}"),
    ):
        with pytest.raises(FormatError, match=f"^{re.escape(sentence)}$"):
            f.check(bad, "L")
        with pytest.raises(FormatError):
            f.dequantize(bad)


@pytest.mark.parametrize(
    ("name", "at", "field"),
    [("q8_0", 0, "d"), ("q4_k", 0, "d"), ("q4_k", 2, "dmin"), ("q6_k", 208, "d"), ("q2_0_g64", 0, "d")],
)
@pytest.mark.parametrize(("code", "shown"), [(0x7C00, "infinity"), (0xFC00, "-infinity"), (0x7E01, "NaN")])
def test_scales_that_are_not_finite_are_refused(name: str, at: int, field: str, code: int, shown: str) -> None:
    f = form(name)
    blocks = np.tile(f.quantize(weights(1, 2 * f.block))["blocks"], (5000, 1))
    f.check({"blocks": blocks}, "L")
    start = f.block_bytes + at
    blocks[4321, start : start + 2] = code & 255, code >> 8
    sentence = f"L.blocks: found {field} = {shown} at row 4321, block 1, expected a finite f16"
    with pytest.raises(FormatError, match=f"^{sentence}$"):
        f.check({"blocks": blocks}, "L")


def test_block_nvfp4_refuses_scales_without_a_value_and_bad_tensor_scales() -> None:
    f = form("block_nvfp4")
    good = f.quantize(weights(3, 128))
    f.check({"blocks": good["blocks"]}, "L")
    for code in (0x7F, 0x80, 0xFF):
        blocks = good["blocks"].copy()
        blocks[2, 36 + 3] = code
        with pytest.raises(FormatError, match=rf"^L\.blocks: found d\[3\] = code 0x{code:02X} .* at row 2, block 1,"):
            f.check({"blocks": blocks}, "L")
    for scale, sentence in (
        (np.float32(0), "L.global_scale: found 0, expected a finite scale above 0"),
        (np.float64(1), "L.global_scale: found dtype f64, expected f32"),
        (np.ones((2, 1), np.float32), "L.global_scale: found shape [2, 1], expected [] or [1] for a weight [3, 128]"),
    ):
        with pytest.raises(FormatError, match=f"^{re.escape(sentence)}$"):
            f.check({**good, "global_scale": np.asarray(scale)}, "L")


@pytest.mark.parametrize("name", FORMS)
def test_quantize_needs_little_memory_beside_its_input_and_output(name: str) -> None:
    w = weights(2048, 2048)
    tracemalloc.start()
    try:
        stored = get(name).quantize(w)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(a.nbytes for a in stored.values()) + 1.5 * w.nbytes
