"""Rows, tensors and their views, verdicts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab import no, yes
from atlas_lab.core.rows import PHASES, Rows, pieces, rows, rows_from
from atlas_lab.core.tensor import Tensor, round_up, row_major
from atlas_lab.core.tensor_map import TensorMap

RANGES = st.tuples(st.integers(1, 30), st.integers(0, 12)).map(lambda t: Rows(t[0], t[0] + t[1]))


@given(st.lists(RANGES, max_size=4).map(tuple), st.lists(RANGES, max_size=4).map(tuple))
def test_pieces_cover_the_union_once_and_no_cut_divides_one(served: tuple[Rows, ...], cuts: tuple[Rows, ...]) -> None:
    got = pieces(served, cuts)
    covered = [m for r in got for m in range(r.first, r.last + 1)]
    assert covered == sorted({m for r in served for m in range(r.first, r.last + 1)})
    for r in got:
        for cut in cuts:
            assert (r.first in cut) == (r.last in cut)
            assert cut.intersect(r) in (None, r)


@given(RANGES, RANGES)
def test_intersection(a: Rows, b: Rows) -> None:
    both = [m for m in range(1, 50) if m in a and m in b]
    got = a.intersect(b)
    assert got == b.intersect(a)
    assert both == ([] if got is None else list(range(got.first, got.last + 1)))


def test_rows_say_what_they_are() -> None:
    assert [str(r) for r in (rows(1), rows(2, 16), rows_from(17))] == ["1", "2 to 16", "17+"]
    assert [1 in r for r in PHASES.values()] == [True, False, False]
    assert all(sum(m in r for r in PHASES.values()) == 1 for m in (1, 2, 16, 17, 18, 100000))
    for first, last in ((0, 1), (-1, None), (3, 2)):
        with pytest.raises(ValueError, match="expected 1 <= first <= last"):
            rows(first, last)


@given(st.integers(0, 1 << 40), st.sampled_from([1, 16, 256]))
def test_round_up(n: int, to: int) -> None:
    assert n <= round_up(n, to) < n + to
    assert round_up(n, to) % to == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_row_major_is_numpy_s(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == tuple(s // 8 for s in np.zeros(shape).strides) or 1 in shape
    t = Tensor("f32", shape, "t")
    assert t.is_contiguous
    assert (t.elements, t.bytes) == (np.prod(shape), 4 * np.prod(shape))


@given(st.data())
def test_a_view_is_inside_its_tensor_or_an_error(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    strides = data.draw(st.sampled_from([None, (2 * shape[1], 1), (1, shape[0])]))
    t = Tensor("u16", shape, "t", offset=256, strides=strides)
    offset = data.draw(st.integers(-1, 20))
    inner = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    steps = data.draw(st.sampled_from([None, (shape[1], 1), (1, 1), (7, 2)]))
    span = 1 + sum((e - 1) * s for e, s in zip(shape, strides or row_major(shape), strict=True))
    last = offset + sum((e - 1) * s for e, s in zip(inner, steps or row_major(inner), strict=True))
    if offset >= 0 and last < span:
        v = t.view(offset, inner, steps)
        assert (v.shape, v.strides, v.offset, v.name) == (inner, steps, 256 + 2 * offset, "t")
    else:
        with pytest.raises(ValueError, match=r"view of 't': element .* is outside its "):
            t.view(offset, inner, steps)


def test_bad_tensors_and_maps() -> None:
    with pytest.raises(KeyError, match="unknown dtype 'bf61'"):
        Tensor("bf61", (1,))
    with pytest.raises(ValueError, match=r"found shape \(2, -1\), expected extents of 0 or more"):
        Tensor("bf16", (2, -1), "w")
    t = Tensor("bf16", (2, 3), "w")
    assert str(t) == "w: bf16[2, 3]"
    with pytest.raises(FrozenInstanceError):
        t.name = "x"  # type: ignore[misc]


MATRIX = Tensor("bf16", (100, 64), "w")
# View, box, swizzle, promotion, and what the sentence says was found and expected.
BAD_MAPS = [
    (MATRIX, (8, 64), 16, 128, "swizzle 16, expected 0, 32, 64 or 128"),
    (MATRIX, (8, 64), 0, 32, "promotion 32, expected 0, 64, 128 or 256"),
    (MATRIX, (8,), 0, 128, "a box of 1 dimensions, expected the view's 2"),
    (Tensor("bf16", (), "w"), (), 0, 128, "a view of 0 dimensions, expected 1 to 5"),
    (Tensor("bf16", (1,) * 5 + (8,), "w"), (1,) * 5 + (8,), 0, 128, "a view of 6 dimensions, expected 1 to 5"),
    (MATRIX, (0, 64), 0, 128, "box (0, 64), expected 1 to 256 elements a dimension"),
    (MATRIX, (257, 64), 0, 128, "box (257, 64), expected 1 to 256 elements a dimension"),
    (Tensor("bf16", (0, 64), "w"), (8, 64), 0, 128, "shape (0, 64), expected extents of 1 to 2**32"),
    (MATRIX, (8, 4), 0, 128, "box rows of 8 bytes, expected a multiple of 16"),
    (MATRIX, (8, 32), 128, 128, "box rows of 64 bytes, expected the swizzle's 128"),
    (MATRIX, (8, 128), 128, 128, "box rows of 256 bytes, expected the swizzle's 128"),
    (MATRIX.view(4, (8, 32), (64, 1)), (8, 32), 0, 128, "a view at byte 8, expected a multiple of 16"),
    (
        Tensor("bf16", (8, 8), "w", 0, (64, 2)),
        (8, 8),
        0,
        128,
        "elements 4 bytes apart in the last dimension, expected 2",
    ),
    (Tensor("bf16", (8, 60), "w"), (8, 8), 0, 128, "a stride of 120 bytes, expected a multiple of 16 below 2**40"),
    (Tensor("e8m0", (8, 64), "w"), (8, 64), 0, 128, "elements of e8m0, expected one of u8, i8, "),
]


@pytest.mark.parametrize(("view", "box", "swizzle", "promotion", "words"), BAD_MAPS)
def test_a_map_that_the_copy_engine_cannot_read(
    view: Tensor, box: Any, swizzle: int, promotion: int, words: str
) -> None:
    with pytest.raises(ValueError) as e:
        TensorMap(view, box, swizzle, promotion)
    assert str(e.value).startswith(f"tensor map of 'w': found {words}")


def test_a_map_knows_its_bytes() -> None:
    m = TensorMap(MATRIX.view(64, (33, 60), (64, 1)), (16, 64), 128)
    assert (m.bytes, m.strides, m.dtype, m.view.offset) == (2048, (128, 2), "bf16", 128)
    assert TensorMap(Tensor("u8", (5, 4, 48), "t"), (1, 2, 32), 32).strides == (192, 48, 1)


def test_verdicts_in_words() -> None:
    assert yes()
    assert str(yes()) == "yes"
    refusal = no("k-multiple", "K must be a multiple of 4", found=6, allowed="4, 8, 12")
    assert not refusal
    assert str(refusal) == "K must be a multiple of 4 (found 6, expected 4, 8, 12)"
    assert str(no("x", "never")) == "never"
    assert str(no("x", "zero", found=0)) == "zero (found 0)"
