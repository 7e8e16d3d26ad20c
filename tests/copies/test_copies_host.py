"""What copies hold, on the host: their layouts element by element, what they stand for, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from copy_cases import HOST_KINDS, KINDS, Files, Kind, projection

from atlas_lab.arms import copies
from atlas_lab.arms.copies.repacked import pack, unpack
from atlas_lab.arms.copies.shapes import CopyError
from atlas_lab.core.declare import Derived
from atlas_lab.core.numbers import snr_db
from atlas_lab.core.projection import Projection
from atlas_lab.formats import e2m1, get
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.bits import BF16
from atlas_lab.runtime.build import build
from atlas_lab.runtime.errors import LoadError


def built(d: Derived, files: Files) -> dict[str, np.ndarray]:
    names = {t.name + str(t.offset): f for f, t in d.tensors.items()}
    return {names[t.name + str(t.offset)]: a for t, a in build(d, "test", files.read)}


def values(p: Projection, files: Files) -> np.ndarray:
    return get(p.weight.format).dequantize(files.of(p))


@pytest.mark.parametrize("kind", [*KINDS, *HOST_KINDS], ids=lambda k: k.name)
def test_a_copy_stands_for_its_weight(kind: Kind) -> None:
    for n, k in kind.shapes:
        p = projection("ffn.up", n, k, kind.fmt, **kind.dtypes)
        files = Files(p, seed=k)
        d = kind.make(p)
        found, expected = d.dequantize(built(d, files)), values(p, files)
        assert found.dtype == np.float64
        if d.key in ("int8_32", "q4_k"):
            assert snr_db(found, expected) > {"int8_32": 35, "q4_k": 15}[d.key]
        else:
            np.testing.assert_array_equal(found, expected)


def test_transposed_codes_keep_two_columns_in_a_byte() -> None:
    p = projection("ffn.up", 6, 32, "nvfp4")
    files = Files(p)
    t, stored = built(copies.transposed_nvfp4(p), files), files.of(p)
    for j in range(16):
        for n in range(6):
            assert t["weight"][j, n] == stored["weight"][n, j]
    assert t["scale"].tobytes() == np.ascontiguousarray(stored["scale"].T).tobytes()


def test_a_lane_s_words_are_its_operand_of_the_product() -> None:
    """The registers a lane gets from word j are operand A of a product whose K axis is permuted as documented."""
    p = projection("ffn.up", 32, 256, "nvfp4")
    files = Files(p)
    t, codes = built(copies.repacked_nvfp4(p), files), e2m1.decode(files.of(p)["weight"])
    for tile, unit, block, lane in ((0, 0, 0, 0), (1, 1, 1, 31), (0, 1, 0, 6), (1, 0, 1, 17)):
        raw = t["weight"][tile, unit]
        words = raw[512 * block + 16 * lane :][:16].view(np.uint32)
        row, group = 16 * tile + lane // 4, 128 * unit + 64 * block + 16 * (lane % 4)
        registers = [r for j in range(2) for r in L.e2m1x16_small(int(words[2 * j]), int(words[2 * j + 1]))]
        for j in range(4):
            c = group + 4 * j
            expected = [codes[r, k : k + 2] for k in (c, c + 2) for r in (row, row + 8)]
            for register, pair in zip(registers[4 * j : 4 * j + 4], expected, strict=True):
                found = [np.float64(BF16[register & 0xFFFF]), np.float64(BF16[register >> 16])]
                assert [v * 2.0**126 for v in found] == list(pair)
        own = raw[1024 + 4 * lane + 2 * block :][:2].astype(int)
        values = [(1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 10) for b in own]
        assert values == [float(files.of(p)["scale"][r, group // 16]) for r in (row, row + 8)]


def test_repacking_keeps_every_scale_and_makes_codes_under_a_scale_of_zero_zero() -> None:
    p = projection("ffn.up", 16, 128, "nvfp4")
    files = Files(p)
    stored = files.of(p)
    for first in (0, 64):
        scale = np.arange(first, first + 128, dtype=np.uint8).reshape(16, 8)
        scale[scale > 0x7E] = 0
        t = {**stored, "scale": scale.view(stored["scale"].dtype)}
        back = unpack(pack(t), 16)
        assert (get("nvfp4").dequantize(back) == get("nvfp4").dequantize(t)).all()
        known = np.repeat(scale, 8, axis=1) != 0
        assert (back["weight"][known] == t["weight"][known]).all()
        assert not back["weight"][~known].any()


def test_int8_by_hand() -> None:
    w = np.zeros((1, 96), np.float32)
    w[0, :4] = 127, -127, 0.5, 1.5  # scale 1: ties go to even
    w[0, 64:67] = np.float32(2.0**-149), np.float32(-(2.0**-148)), 0  # the scale underflows to 0: so do the codes
    t = copies.int8_32(projection("ffn.up", 1, 96, "bf16")).build(w)
    assert t["q"][0, :4].tolist() == [127, -127, 0, 2]
    assert t["scale"][0].tolist() == [1, 0, 0]
    assert not t["q"][0, 32:].any()
    assert copies.int8_32(projection("ffn.up", 1, 32, "bf16")).device is None
    with pytest.raises(ValueError, match="row 0, column 3"):
        copies.int8_32(projection("ffn.up", 1, 32, "bf16")).build(
            np.where(np.arange(32) == 3, np.inf, 0)[None].astype("f4")
        )


def test_q4_k_goes_through_bf16_unless_told_otherwise() -> None:
    p = projection("ffn.up", 2, 256, "nvfp4")
    w = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    through, plain = copies.q4_k(p), copies.q4_k(p, "f32")
    assert through.build(w)["blocks"].tobytes() == get("q4_k").quantize(rounded)["blocks"].tobytes()
    assert plain.build(w)["blocks"].tobytes() == get("q4_k").quantize(w)["blocks"].tobytes()
    assert through.identity != plain.identity


def test_both_conventions_have_keys_of_their_own() -> None:
    direct, divided = (projection("ffn.up", 16, 128, f) for f in ("nvfp4", "nvfp4_ct"))
    for make in (copies.transposed_nvfp4, copies.repacked_nvfp4, copies.block_nvfp4):
        assert make(divided).key == make(direct).key + "_reciprocal"
        assert make(direct) == make(direct)


REFUSED = [
    (copies.can_transpose_nvfp4, ("bf16", 16, 64), "found bf16, none"),
    (copies.can_repack, ("nvfp4", 16, 192), "K must be a multiple of 128 (found 192"),
    (copies.can_repack_q2_0, ("q2_0_g64", 16, 192), "K must be a multiple of 128 (found 192"),
    (copies.can_repack_q2_0, ("nvfp4", 16, 128), "made of Q2_0 (found nvfp4, expected q2_0_g64 or q2_0_g128"),
    (copies.can_repack_q4_k, ("nvfp4", 16, 256), "made of Q4_K (found nvfp4, expected q4_k"),
    (copies.can_block_nvfp4, ("nvfp4", 16, 96), "K must be a multiple of 64 (found 96"),
    (copies.can_int8, ("bf16", 4, 40), "K must be a multiple of 32 (found 40"),
    (copies.can_q4_k, ("bf16", 4, 128), "K must be a multiple of 256 (found 128"),
    (copies.can_transpose_fp8, ("nvfp4", 4, 32), "found nvfp4, expected fp8"),
]


@pytest.mark.parametrize(("can", "of", "sentence"), REFUSED)
def test_what_cannot_be_made_is_refused_in_words(can, of, sentence: str) -> None:
    fmt, n, k = of
    assert sentence in str(can(projection("ffn.up", n, k, fmt)))


@pytest.mark.parametrize("make", [copies.transposed_fp8, copies.int8_32])
def test_a_config_of_another_width_is_refused(make) -> None:
    p = replace(projection("ffn.up", 256, 128, "fp8"), n=128)
    with pytest.raises(CopyError, match=r"layers\.0\.ffn\.up: no .* copy can be made: its tensors are not those"):
        make(p)


def fuse(fmt: str, *shapes: tuple[int, int], **dtypes: str) -> tuple[Projection, ...]:
    return tuple(projection(f"attn.{r}", n, k, fmt, **dtypes) for r, (n, k) in zip("qkv", shapes, strict=False))


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (fuse("fp8", (128, 128), (192, 128)), "one scale would cover rows of two weights (found attn.k [192, 128]"),
        (fuse("fp8", (128, 64), (128, 64)), "found attn.q [128, 64], expected multiples of 128"),
        (fuse("nvfp4", (16, 64), (16, 32)), "its weights differ in kind"),
        ((*fuse("nvfp4", (16, 64)), *fuse("nvfp4_ct", (16, 64))), "its weights differ in kind"),
        ((*fuse("fp8", (128, 128)), *fuse("fp8", (128, 128), scale="bf16")), "its weights differ in kind"),
        (fuse("bf16", (16, 64)), "a fused weight is made of several (found 1"),
    ],
)
def test_what_cannot_be_fused(members: tuple[Projection, ...], sentence: str) -> None:
    assert sentence in str(copies.can_fuse(members))
    with pytest.raises(CopyError, match="they cannot be fused"):
        copies.fused(members)


def test_a_config_whose_width_disagrees_with_the_tensors_declines_fusion() -> None:
    gate, up = fuse("fp8", (256, 128), (256, 128))
    assert copies.can_fuse((gate, up))
    verdict = copies.can_fuse((gate, replace(up, n=128)))
    assert (verdict.code, verdict.found) == ("shape", "weight [256, 128]")
    assert "attn.k: its tensors are not those of [128, 128]" in str(verdict)


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_ct", "fp8_tensor"])
def test_different_tensor_scales_are_kept_one_a_segment(fmt: str) -> None:
    members = fuse(fmt, (32, 64), (16, 64), (16, 64))
    files = Files(*members)
    d = copies.fused(members)
    made = built(d, files)
    field = "scale" if fmt == "fp8_tensor" else "global_scale"
    assert made[field].tolist() == [float(files.of(p)[field].reshape(())) for p in members]
    assert len(set(made[field].tolist())) == 3
    whole = np.concatenate([values(p, files) for p in members])
    np.testing.assert_array_equal(d.dequantize(made), whole)
    found = copies.segments(members, d, field)
    assert [(n, t.offset, t.shape) for n, t in found] == [(32, 0, ()), (16, 4, ()), (16, 8, ())]
    for p in members:
        part = copies.part(members, p)
        np.testing.assert_array_equal(part.dequantize(built(part, files)), values(p, files))
        assert part.identity == d.identity


def test_a_part_is_a_view_and_nothing_else() -> None:
    gate, up = fuse("nvfp4", (16, 64), (16, 64))
    d = copies.fused((gate, up))
    part = copies.part((gate, up), up)
    assert part.label == "weight of fused"
    assert {f: (t.name, t.shape, t.offset) for f, t in part.tensors.items()} == {
        "weight": (d.tensors["weight"].name, (16, 32), 16 * 32),
        "scale": (d.tensors["scale"].name, (16, 4), 16 * 4),
        "global_scale": (d.tensors["global_scale"].name, (), 4),
    }
    wrong = up.weight["weight"]
    with pytest.raises(ValueError, match=r"part 'x' of fused: weight is .*, expected a contiguous view of"):
        d.part("x", d.dequantize, weight=wrong)
    with pytest.raises(ValueError, match="expected a contiguous view"):
        d.part("x", d.dequantize, weight=d.tensors["weight"].view(0, (16, 16), (32, 1)))


def test_a_build_whose_source_changed_is_named() -> None:
    p = projection("ffn.up", 16, 128, "nvfp4")
    files = Files(p)
    name = p.weight["weight"].name
    files.arrays[name] = files.arrays[name][:8]
    with pytest.raises(LoadError, match=r"tensor '.*weight' was read as uint8\[8, 64\], expected uint8\[16, 64\]"):
        build(copies.repacked_nvfp4(p), "test", files.read)
