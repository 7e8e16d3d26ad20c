"""The table of formats: names, families, geometry, stored tensors and sizes."""

from __future__ import annotations

import pytest

from atlas_lab.formats import (
    BLOCK_128,
    FORMATS,
    GROUP_16,
    GROUP_16_RECIPROCAL,
    NO_SCALE,
    PER_ROW,
    PER_TENSOR,
    Geometry,
    Spec,
    get,
)

E4M3_300_200 = Spec("e4m3", (300, 200))
U8_300_96 = Spec("u8", (300, 96))

TABLE = {
    "bf16": ("bf16", NO_SCALE, (300, 200), {"weight": Spec("bf16", (300, 200))}),
    "fp8": ("fp8", BLOCK_128, (300, 200), {"weight": E4M3_300_200, "scale": Spec("f32", (3, 2))}),
    "fp8_tensor": ("fp8", PER_TENSOR, (300, 200), {"weight": E4M3_300_200, "scale": Spec("f32", ())}),
    "fp8_row": ("fp8", PER_ROW, (300, 200), {"weight": E4M3_300_200, "scale": Spec("f32", (300, 1))}),
    "nvfp4": (
        "nvfp4",
        GROUP_16,
        (300, 192),
        {"weight": U8_300_96, "scale": Spec("e4m3", (300, 12)), "global_scale": Spec("f32", ())},
    ),
    "nvfp4_ct": (
        "nvfp4",
        GROUP_16_RECIPROCAL,
        (300, 192),
        {"weight": U8_300_96, "scale": Spec("e4m3", (300, 12)), "global_scale": Spec("f32", (1,))},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_format_states_its_family_geometry_and_tensors(name: str) -> None:
    family, geometry, shape, tensors = TABLE[name]
    fmt = get(name)
    assert (fmt.name, fmt.family, fmt.geometry) == (name, family, geometry)
    assert fmt.tensors(*shape) == tensors


def test_the_table_holds_no_other_format() -> None:
    blocks = {"q8_0", "q4_k", "q6_k", "q2_0_g64", "q2_0_g128", "block_nvfp4"}  # test_formats_ggml.py
    assert set(FORMATS) == set(TABLE) | blocks
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize(
    ("name", "size"),
    [("bf16", 178_257_920), ("fp8", 89_128_960 + 136 * 40 * 4), ("nvfp4", 44_564_480 + 5_570_560 + 4)],
)
def test_bytes_of_a_large_projection(name: str, size: int) -> None:
    assert get(name).bytes(17408, 5120) == size


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(KeyError) as e:
        get("nvfp4_tc")
    assert e.value.args[0] == (
        f"unknown format 'nvfp4_tc', expected one of {', '.join(FORMATS)}; did you mean nvfp4_ct or nvfp4?"
    )
    with pytest.raises(KeyError) as e:
        get("zzz")
    assert e.value.args[0].endswith(", ".join(FORMATS))


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        (Geometry("row"), "row"),
        (BLOCK_128, "block(128,128)"),
        (GROUP_16, "group(16), direct tensor scale"),
        (GROUP_16_RECIPROCAL, "group(16), reciprocal tensor scale"),
    ],
)
def test_a_geometry_reads_as_in_a_plan(geometry: Geometry, text: str) -> None:
    assert str(geometry) == text
