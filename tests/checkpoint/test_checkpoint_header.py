"""Headers of safetensors files: what is read from them, and one sentence for every fault."""

import mmap
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoint_files import entry, framed, write

from atlas_lab.checkpoint import CheckpointError, Store
from atlas_lab.checkpoint.safetensors import open_file, parse_header
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats.dtypes import BY_SAFETENSORS

U8 = {"a": entry("U8", [3], 0, 3)}
A = entry("U8", [4], 0, 4)
B = entry("U8", [4], 4, 8)
KNOWN = ", ".join(BY_SAFETENSORS)

FAULTS = [
    pytest.param(b"\x03\0\0", "found a file of 3 bytes, expected 8 or more (the header's length)", id="no-length"),
    pytest.param(
        struct.pack("<Q", 2**63) + b"{}",
        "found a header length of 9223372036854775808 bytes, expected at most the 2 that follow it",
        id="header-longer-than-file",
    ),
    pytest.param(
        framed(b"\xff{}"),
        "found no valid JSON ('utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte), expected an object",
        id="not-utf8",
    ),
    pytest.param(
        framed("{'a': 1}"),
        "found no valid JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)), expected an object",
        id="not-json",
    ),
    pytest.param(framed('{"a": NaN}'), "found no valid JSON (NaN is not a JSON number), expected an object", id="nan"),
    pytest.param(framed("[" * 100_000), "found JSON nested too deeply, expected an object", id="deep"),
    pytest.param(framed("[1, 2]"), "found [1, 2], expected a JSON object", id="not-object"),
    pytest.param(framed('{"a": {}, "a": {}}'), "found key 'a' twice in one object, expected it once", id="duplicate"),
    pytest.param(
        framed('{"a": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}'),
        "found key 'dtype' twice in one object, expected it once",
        id="duplicate-key-of-a-tensor",
    ),
    pytest.param(
        framed({"__metadata__": {"format": 1}}),
        "__metadata__: found {'format': 1}, expected strings by name",
        id="metadata",
    ),
    pytest.param(
        framed({"__metadata__": ["pt"]}), "__metadata__: found ['pt'], expected strings by name", id="metadata-list"
    ),
    pytest.param(
        framed({"a": 3}),
        "tensor 'a': found 3, expected an object with dtype, shape and data_offsets",
        id="entry-not-object",
    ),
    pytest.param(
        framed({"a": {"dtype": "U8", "shape": [0]}}),
        "tensor 'a': data_offsets: missing, found ['dtype', 'shape']",
        id="no-offsets",
    ),
    pytest.param(
        framed({"a": entry("F4", [2], 0, 1)}, b"\0"),
        f"tensor 'a': dtype: found 'F4', expected one of {KNOWN}",
        id="unknown-dtype",
    ),
    pytest.param(
        framed({"a": entry(["U8"], [2], 0, 1)}, b"\0"),
        f"tensor 'a': dtype: found ['U8'], expected one of {KNOWN}",
        id="dtype-not-text",
    ),
    pytest.param(
        framed({"a": entry("U8", [-3], 0, 3)}, b"\0\0\0"),
        "tensor 'a': shape: found [-3], expected a list of at most 64 integers of 0 or more",
        id="negative-extent",
    ),
    pytest.param(
        framed({"a": entry("U8", [True], 0, 1)}, b"\0"),
        "tensor 'a': shape: found [True], expected a list of at most 64 integers of 0 or more",
        id="boolean-extent",
    ),
    pytest.param(
        framed({"a": entry("F64", [0, 2**60], 0, 0)}),
        "tensor 'a': shape: found [0, 1152921504606846976], expected at most 2^62 bytes",
        id="huge-extent-beside-a-zero",
    ),
    pytest.param(
        framed({"a": entry("U8", [4], -4, 0)}, b"\0\0\0\0"),
        "tensor 'a': data_offsets: found [-4, 0], expected two integers from 0 to 2^62",
        id="negative-offset",
    ),
    pytest.param(
        framed({"a": entry("U8", [4], 0.0, 4.0)}, b"\0\0\0\0"),
        "tensor 'a': data_offsets: found [0.0, 4.0], expected two integers from 0 to 2^62",
        id="fractional-offset",
    ),
    pytest.param(
        framed({"a": entry("U8", [0], 4, 0)}, b"\0\0\0\0"),
        "tensor 'a': data_offsets: found [4, 0], expected the first at most the second",
        id="offsets-reversed",
    ),
    pytest.param(
        framed({"a": entry("BF16", [2, 3], 0, 10)}, bytes(10)),
        "tensor 'a': data_offsets: found 10 bytes, expected 12 for BF16 [2, 3]",
        id="bytes-disagree-with-shape",
    ),
    pytest.param(
        framed({**U8, "b": entry("F32", [1], 3, 7)}, bytes(7)),
        "tensor 'b': data_offsets: found a start at 3, expected a multiple of the 4 bytes of F32",
        id="misaligned",
    ),
    pytest.param(
        framed({"a": A, "b": entry("U8", [4], 2, 6)}, bytes(6)),
        "tensor 'b': data_offsets: found a start at 2, inside tensor 'a', expected 4",
        id="overlap",
    ),
    pytest.param(
        framed({"a": A, "b": A}, bytes(4)),
        "tensor 'b': data_offsets: found a start at 0, inside tensor 'a', expected 4",
        id="shared",
    ),
    pytest.param(
        framed({"a": A, "b": entry("U8", [4], 5, 9)}, bytes(9)),
        "tensor 'b': data_offsets: found a start at 5, expected 4, where tensor 'a' ends",
        id="gap",
    ),
    pytest.param(
        framed({"b": B}, bytes(8)),
        "tensor 'b': data_offsets: found a start at 4, expected 0, where the data begins",
        id="gap-at-the-beginning",
    ),
    pytest.param(
        framed({"a": A, "b": B}, bytes(7)),
        "found 7 bytes of data, expected 8 (the file is cut short)",
        id="cut-short",
    ),
    pytest.param(
        framed({"a": entry("U8", [2**61], 0, 2**61)}, bytes(8)),
        "found 8 bytes of data, expected 2305843009213693952 (the file is cut short)",
        id="offsets-far-beyond-the-file",
    ),
    pytest.param(
        framed({"a": A}, bytes(8)), "found 8 bytes of data, expected 4 (no tensor covers the rest)", id="trailing"
    ),
    pytest.param(
        framed('{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'),
        "tensor '\\ud800': found a name that is not Unicode text, expected text",
        id="half-a-surrogate-pair",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), FAULTS)
def test_fault_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{path}: {sentence}") + "$"):
        Store.open(path)


def test_a_header_above_100_mb_is_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as f:
        f.write(struct.pack("<Q", 100_000_001))
        f.truncate(200_000_000)
    with pytest.raises(CheckpointError, match=r"found a header length of 100000001 bytes, expected at most 100000000$"):
        open_file(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be read \(No such file or directory\)$"):
        Store.open(tmp_path / "none.safetensors")


def test_another_kind_of_file(tmp_path):
    (tmp_path / "m.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"m\.bin: found a file, expected a folder, a \.safetensors or a \.gguf file$"
    ):
        Store.open(tmp_path / "m.bin")


def test_long_names_and_values_are_cut():
    with pytest.raises(CheckpointError) as e:
        parse_header(framed({"n" * 9999: "v" * 9999})[8:], 0, "f")
    assert len(str(e.value)) < 400


def test_order_in_the_header_is_free(tmp_path):
    path = write(tmp_path / "m.safetensors", {"b": B, "a": A}, bytes(range(8)))
    assert open_file(path).read("b").tolist() == [4, 5, 6, 7]


def test_tensors_of_no_elements(tmp_path):
    header = {"e": entry("BF16", [0, 5], 0, 0), "a": A, "z": entry("U8", [0], 4, 4), "s": entry("U8", [], 4, 5)}
    file = open_file(write(tmp_path / "m.safetensors", header, bytes(range(5))))
    assert file.tensors["e"] == Tensor("bf16", (0, 5), "e")
    assert (file.read("e").shape, file.read("e").dtype) == ((0, 5), ml_dtypes.bfloat16)
    assert file.read("s").shape == ()
    assert file.read("s") == 4


def test_no_tensors_at_all(tmp_path):
    assert dict(open_file(write(tmp_path / "m.safetensors", "{}")).tensors) == {}


@pytest.mark.parametrize("spaces", range(8))
def test_values_are_aligned_whatever_the_header_s_length(tmp_path, spaces):
    header = '{"f":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}' + " " * spaces
    values = np.array([1.5, -2.0])
    read = open_file(write(tmp_path / "m.safetensors", header, values.tobytes())).read("f")
    assert read.flags.aligned
    assert read.tolist() == [1.5, -2.0]


def test_values_equal_the_package_s(tmp_path):
    rng = np.random.default_rng(1)
    header, data = {"__metadata__": {"format": "pt", "é": "ü"}}, b""
    for spelling, d in sorted(BY_SAFETENSORS.items(), key=lambda item: -item[1].bytes):
        size = 6 * d.bytes
        header[f"t.{spelling}"] = entry(spelling, [2, 3], len(data), len(data) + size)
        data += rng.integers(0, 2, size, np.uint8).tobytes()
    path = write(tmp_path / "m.safetensors", header, data)
    store = Store.open(path)
    assert store.metadata == {"format": "pt", "é": "ü"}
    assert store.bytes == len(data)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert set(theirs) == set(store.tensors)
    for name, t in theirs.items():
        ours = store.read(name)
        assert (name, ours.shape) == (f"t.{t['dtype']}", tuple(t["shape"]))
        assert ours.tobytes() == bytes(t["data"])
        assert not ours.flags.writeable


def test_a_file_that_shrank_after_it_was_opened(tmp_path):
    path = write(tmp_path / "m.safetensors", {"a": entry("U8", [9000], 0, 9000)}, bytes(9000))
    file = open_file(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r": found 100 bytes, expected the 9074 it had when it was opened$"):
        file.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r": cannot be read \(No such file or directory\)$"):
        file.read("a")


def test_an_unknown_tensor_names_the_nearest(tmp_path):
    store = Store.open(write(tmp_path / "m.safetensors", {"layer.weight": A}, bytes(4)))
    with pytest.raises(CheckpointError, match=r"layer\.weigth: missing, expected one of 1 tensors; did you mean "):
        store.read("layer.weigth")


def test_reading_maps_no_more_than_once(tmp_path, monkeypatch):
    file = open_file(write(tmp_path / "m.safetensors", {"a": A, "b": B}, bytes(8)))
    maps = []
    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *a, **k: maps.append(real(*a, **k)) or maps[-1])
    assert not maps
    file.read("a")
    file.read("b")
    assert len(maps) == 1
