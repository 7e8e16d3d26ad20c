"""Parts of stored tensors: what their names mean, and that reading one reads its bytes and no other."""

import json
import re

import numpy as np
import pytest
from checkpoint_files import entry, write
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.checkpoint import CheckpointError, Store
from atlas_lab.checkpoint.sliced import Slice, base_name, part_of
from atlas_lab.core.tensor import Tensor


@pytest.mark.parametrize(
    ("name", "base", "axes"),
    [
        ("a.weight[0:4]", "a.weight", (((0, 4),),)),
        ("a.weight[0:4+8:12]", "a.weight", (((0, 4), (8, 12)),)),
        ("a.weight[:,0:4]", "a.weight", (None, ((0, 4),))),
        ("a[1:2][:,3:4]", "a[1:2]", (None, ((3, 4),))),
    ],
)
def test_names(name, base, axes):
    part = Slice.parse(name)
    assert (part.base, part.axes) == (base, axes)
    assert str(part) == name
    assert base_name(name) == base


@pytest.mark.parametrize(
    "name", ["a.weight", "a[]", "a[0]", "a[1:2", "[0:1]", "a[0:1]x", "a[-1:2]", "a[0:" + "9" * 40 + "]"]
)
def test_names_that_say_no_part(name):
    assert Slice.parse(name) is None
    assert base_name(name) == name


def test_all_of_a_tensor_is_the_tensor():
    t = Tensor("bf16", (8, 4), "w")
    assert part_of(t, [None, ((0, 4),)]) == t
    assert part_of(t, []) == t
    assert part_of(t, [((2, 4),)]) == Tensor("bf16", (2, 4), "w[2:4]")
    with pytest.raises(ValueError, match=r"^w: bf16\[8, 4\]: has no part \[2:9\]$"):
        part_of(t, [((2, 9),)])


def spans(extent):
    """Ascending spans that do not overlap."""
    points = st.lists(st.integers(0, extent), min_size=2, max_size=6, unique=True).map(sorted)
    return st.none() | points.map(lambda p: tuple(zip(p[::2], p[1::2], strict=False)))


def taken(a, axes):
    for i, axis in enumerate(axes):
        if axis is not None:
            a = np.concatenate([a.take(range(b, e), i) for b, e in axis], i)
    return a


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A tensor of 7 x 6 x 4 between two others, its values, and where its data begins."""
    values = np.arange(7 * 6 * 4, dtype="<i2").reshape(7, 6, 4)
    data = b"\xff" * 10 + values.tobytes() + b"\xff" * 6
    header = {
        "before": entry("I16", [5], 0, 10),
        "w": entry("I16", [7, 6, 4], 10, 10 + values.nbytes),
        "after": entry("I16", [3], 10 + values.nbytes, len(data)),
    }
    path = write(tmp_path_factory.mktemp("parts") / "m.safetensors", header, data)
    return Store.open(path), values, 8 + len(json.dumps(header)) + 10


def test_reading_a_part_reads_its_bytes_alone(stored, reads):
    store, values, start = stored

    @given(st.tuples(spans(7), spans(6), spans(4)))
    def check(axes):
        t = part_of(store.tensors["w"], axes)
        if t.name == "w":
            return
        reads.clear()
        made = store.read(t.name)
        wanted = taken(values, axes)
        assert made.dtype == values.dtype
        assert made.shape == t.shape == wanted.shape
        assert np.array_equal(made, wanted)
        assert sum(asked for _, _, asked in reads) == wanted.nbytes
        touched = [i for at, count, _ in reads for i in range(at - start, at - start + count)]
        places = taken(np.arange(values.nbytes).reshape(7, 6, 4, 2), axes).reshape(-1)
        assert touched == places.tolist()

    check()


def test_a_range_of_rows_is_one_read_and_one_of_columns_is_one_a_row(stored, reads):
    store, _, start = stored
    store.read("w[2:5]")
    assert reads == [(start + 2 * 48, 3 * 48, 3 * 48)]
    reads.clear()
    store.read("w[:,2:5]")
    assert reads == [(start + r * 48 + 16, 24, 24) for r in range(7)]


def test_parts_of_parts(stored):
    store, values, _ = stored

    @given(st.data())
    def check(data):
        first = data.draw(st.tuples(spans(7), spans(6)))
        t = part_of(store.tensors["w"], first)
        if 0 in t.shape:
            return
        second = data.draw(st.tuples(spans(t.shape[0]), spans(t.shape[1])))
        made = part_of(t, second)
        assert np.array_equal(store.read(made.name), taken(taken(values, first), second))

    check()


def test_parts_that_cannot_be_read(stored, tmp_path):
    store, _, _ = stored
    for name in ("w[0:8]", "w[4:2]", "w[:,:,:,0:1]"):
        sentence = f"{store.path}: {name}: found a part outside the [7, 6, 4] of its tensor"
        with pytest.raises(CheckpointError, match="^" + re.escape(sentence) + "$"):
            store.read(name)
    with pytest.raises(CheckpointError, match=re.escape("x[0:1]: missing, expected one of 3 tensors")):
        store.read("x[0:1]")


def test_a_file_that_has_changed_since(tmp_path):
    path = write(tmp_path / "m.safetensors", {"w": entry("U8", [8], 0, 8)}, bytes(8))
    store = Store.open(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"found {len(whole) - 1} bytes, expected the {len(whole)} it had"):
        store.read("w[0:4]")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"m\.safetensors: cannot be read \(No such file"):
        store.read("w[0:4]")


def test_a_stored_name_that_looks_like_a_part(tmp_path):
    header = {"w": entry("U8", [2], 0, 2), "w[0:1]": entry("U8", [2], 2, 4)}
    store = Store.open(write(tmp_path / "m.safetensors", header, bytes([1, 2, 3, 4])))
    assert store.read("w[0:1]").tolist() == [3, 4]
