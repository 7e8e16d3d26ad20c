"""Every refusal is one sentence that names the tensor, what was found and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.formats import FORMATS, FormatError, get

Stored = dict[str, np.ndarray]
N, K = 256, 512


def stored(name: str) -> Stored:
    w = np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)
    return get(name).quantize(w)


def put(field: str, at: tuple[int, ...], value: object) -> Callable[[Stored], None]:
    def change(t: Stored) -> None:
        a = t[field].copy()
        raw = a.view(np.uint8) if isinstance(value, int) and a.dtype.itemsize == 1 else a
        raw[at] = value
        t[field] = a

    return change


def swap(field: str, new: Callable[[np.ndarray], np.ndarray]) -> Callable[[Stored], None]:
    def change(t: Stored) -> None:
        t[field] = new(t[field])

    return change


def drop(field: str) -> Callable[[Stored], None]:
    def change(t: Stored) -> None:
        del t[field]

    return change


STRUCTURE = [
    ("bf16", drop("weight"), "L.weight: missing, found no tensor at all"),
    ("bf16", swap("weight", lambda a: a.astype(np.float32)), "L.weight: found dtype f32, expected bf16"),
    ("bf16", swap("weight", lambda a: a[0]), "L.weight: found shape [512], expected two dimensions of 1 or more"),
    ("bf16", swap("weight", lambda a: a[:0]), "L.weight: found shape [0, 512], expected two dimensions of 1 or more"),
    ("fp8", drop("scale"), "L.scale: missing, found weight"),
    ("fp8", swap("weight", lambda a: a.view(np.uint8)), "L.weight: found dtype u8, expected e4m3"),
    ("fp8", swap("scale", lambda a: a.astype(np.float16)), "L.scale: found dtype f16, expected f32 or bf16"),
    ("fp8", swap("scale", lambda a: a[:, :2]), "L.scale: found shape [2, 2], expected [2, 4] for a weight [256, 512]"),
    (
        "fp8",
        swap("scale", lambda a: np.ones((N, 1), np.float32)),
        "L.scale: found shape [256, 1], expected [2, 4] for a weight [256, 512]",
    ),
    (
        "fp8_row",
        swap("scale", lambda a: np.ones((2, 4), np.float32)),
        "L.scale: found shape [2, 4], expected [256, 1] or [256] for a weight [256, 512]",
    ),
    (
        "fp8_tensor",
        swap("scale", lambda a: np.ones((N, 1), np.float32)),
        "L.scale: found shape [256, 1], expected [] or [1] for a weight [256, 512]",
    ),
    ("nvfp4", drop("global_scale"), "L.global_scale: missing, found weight, scale"),
    ("nvfp4", swap("weight", lambda a: a.view(np.int32)), "L.weight: found dtype i32, expected u8"),
    (
        "nvfp4",
        swap("weight", lambda a: a[:, :4]),
        "L.weight: found K = 8 in a weight [256, 8], expected a multiple of 16",
    ),
    ("nvfp4", swap("scale", lambda a: a.view(np.uint8)), "L.scale: found dtype u8, expected e4m3"),
    (
        "nvfp4",
        swap("scale", lambda a: a[:, :16]),
        "L.scale: found shape [256, 16], expected [256, 32] for a weight [256, 512]",
    ),
    ("nvfp4", swap("global_scale", lambda a: a.astype(np.float64)), "L.global_scale: found dtype f64, expected f32"),
    (
        "nvfp4_ct",
        swap("global_scale", lambda a: np.ones(2, np.float32)),
        "L.global_scale: found shape [2], expected [] or [1] for a weight [256, 512]",
    ),
]

VALUES = [
    ("bf16", put("weight", (3, 7), np.nan), "L.weight: found NaN at row 3, column 7, expected finite values"),
    ("bf16", put("weight", (0, 0), -np.inf), "L.weight: found -infinity at row 0, column 0, expected finite values"),
    (
        "fp8",
        put("weight", (255, 511), 0xFF),
        "L.weight: found code 0xFF (NaN) at row 255, column 511, expected no NaN code",
    ),
    (
        "fp8_row",
        put("weight", (9, 1), 0x7F),
        "L.weight: found code 0x7F (NaN) at row 9, column 1, expected no NaN code",
    ),
    ("fp8", put("scale", (1, 3), np.nan), "L.scale: found NaN at row 1, column 3, expected a finite scale above 0"),
    ("fp8", put("scale", (0, 2), 0.0), "L.scale: found 0 at row 0, column 2, expected a finite scale above 0"),
    ("fp8_row", put("scale", (8, 0), -0.5), "L.scale: found -0.5 at row 8, column 0, expected a finite scale above 0"),
    ("fp8_tensor", put("scale", (), np.inf), "L.scale: found infinity, expected a finite scale above 0"),
    (
        "nvfp4",
        put("scale", (4, 5), 0x7F),
        "L.scale: found code 0x7F (NaN) at row 4, column 5, expected a code from 0x00 to 0x7E",
    ),
    (
        "nvfp4",
        put("scale", (4, 5), 0xFF),
        "L.scale: found code 0xFF (NaN) at row 4, column 5, expected a code from 0x00 to 0x7E",
    ),
    (
        "nvfp4",
        put("scale", (0, 1), 0xB8),
        "L.scale: found code 0xB8 (-1) at row 0, column 1, expected a code from 0x00 to 0x7E",
    ),
    (
        "nvfp4_ct",
        put("scale", (0, 1), 0x80),
        "L.scale: found code 0x80 (-0) at row 0, column 1, expected a code from 0x00 to 0x7E",
    ),
    ("nvfp4", put("global_scale", (), np.nan), "L.global_scale: found NaN, expected a finite scale above 0"),
    ("nvfp4", put("global_scale", (), 0.0), "L.global_scale: found 0, expected a finite scale above 0"),
    ("nvfp4", put("global_scale", (), -1.0), "L.global_scale: found -1, expected a finite scale above 0"),
    (
        "nvfp4_ct",
        put("global_scale", 0, np.inf),
        "L.global_scale: found infinity at row 0, expected a finite scale above 0",
    ),
]


@pytest.mark.parametrize(("name", "break_it", "sentence"), STRUCTURE + VALUES)
def test_check_refuses(name: str, break_it: Callable[[Stored], None], sentence: str) -> None:
    t = stored(name)
    get(name).check(t, "L")
    break_it(t)
    with pytest.raises(FormatError, match=f"^{re.escape(sentence)}$"):
        get(name).check(t, "L")


@pytest.mark.parametrize(("name", "break_it", "sentence"), STRUCTURE)
def test_dequantize_refuses_what_it_would_misread(name: str, break_it: Callable[[Stored], None], sentence: str) -> None:
    t = stored(name)
    break_it(t)
    with pytest.raises(FormatError, match=f"^{re.escape(sentence.replace('L.', f'{name}.', 1))}$"):
        get(name).dequantize(t)


@pytest.mark.parametrize("name", ["fp8", "fp8_row"])
def test_a_bad_bf16_scale_is_refused_too(name: str) -> None:
    t = stored(name)
    t["scale"] = t["scale"].astype(ml_dtypes.bfloat16)
    t["scale"][1, 0] = -2
    with pytest.raises(FormatError, match=r"^L\.scale: found -2 at row 1, column 0, expected a finite scale above 0$"):
        get(name).check(t, "L")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_ct"])
def test_a_block_scale_of_zero_is_legal_and_decodes_to_zero(name: str) -> None:
    t = stored(name)
    t["scale"][2, 1] = 0
    get(name).check(t, "L")
    assert not get(name).dequantize(t)[2, 16:32].any()


@pytest.mark.parametrize("value", ["NaN", "infinity", "-infinity"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_refuses_values_that_are_not_finite(name: str, value: str) -> None:
    w = np.ones((N, K), np.float32)
    w[200, 17] = float(value.replace("infinity", "inf"))
    sentence = f"the weight to quantize as {name}: found {value} at row 200, column 17, expected finite values"
    with pytest.raises(FormatError, match=f"^{sentence}$"):
        get(name).quantize(w)


def test_bf16_refuses_a_value_that_would_round_to_infinity() -> None:
    w = np.ones((2, 2), np.float32)
    w[1, 0] = np.nextafter(np.float32(2.0**128 - 2.0**119), np.float32(0))
    assert np.isfinite(get("bf16").quantize(w)["weight"].astype(np.float32)).all()
    w[1, 0] = 2.0**128 - 2.0**119
    with pytest.raises(FormatError, match=r"found 3\.39618e\+38 at row 1, column 0, expected at most 3\.3895e\+38$"):
        get("bf16").quantize(w)


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_refuses_another_dtype_or_rank(name: str) -> None:
    label = f"the weight to quantize as {name}"
    with pytest.raises(FormatError, match=f"^{label}: found dtype f64, expected f32$"):
        get(name).quantize(np.ones((16, 16)))
    with pytest.raises(FormatError, match=rf"^{label}: found shape \[16\], expected \[N, K\]$"):
        get(name).quantize(np.ones(16, np.float32))
    empty = rf"^{name}: found a weight of shape \[0, 16\], expected N and K of 1 or more$"
    with pytest.raises(FormatError, match=empty):
        get(name).quantize(np.ones((0, 16), np.float32))
    with pytest.raises(FormatError, match=empty):
        get(name).tensors(0, 16)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_ct"])
def test_nvfp4_refuses_k_that_its_groups_do_not_divide(name: str) -> None:
    sentence = rf"^{name}: found K = 24 in a weight \[2, 24\], expected a multiple of 16$"
    with pytest.raises(FormatError, match=sentence):
        get(name).tensors(2, 24)
    with pytest.raises(FormatError, match=sentence):
        get(name).quantize(np.ones((2, 24), np.float32))


def test_the_first_bad_value_is_named_however_far_down() -> None:
    w = np.ones((5000, 300), np.float32)
    w[4321, 123] = w[4999, 0] = np.nan
    with pytest.raises(FormatError, match="row 4321, column 123"):
        get("bf16").quantize(w)
