"""Folders: one file, shards with an index, config.json, and every way in which they can disagree."""

import json
import os
import re

import numpy as np
import pytest
from checkpoint_files import entry, write

from atlas_lab.checkpoint import CheckpointError, Store
from atlas_lab.checkpoint.store import INDEX

ONE = {"a": entry("U8", [2], 0, 2)}
TWO = {"b": entry("F32", [2], 0, 8), "c": entry("U8", [1], 8, 9)}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "m-1.safetensors", {"__metadata__": {"format": "pt", "n": "1"}, **ONE}, b"\1\2")
    write(tmp_path / "m-2.safetensors", {"__metadata__": {"n": "2", "m": "3"}, **TWO}, bytes(9))
    index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"})
    return tmp_path


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 11}, "weight_map": weight_map}))


def refused(folder, sentence):
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{folder}{sentence}") + "$"):
        Store.open(folder)


def test_shards(folder):
    (folder / "config.json").write_text('{"model_type": "x"}')
    store = Store.open(folder)
    assert set(store.tensors) == {"a", "b", "c"}
    assert store.read("a").tolist() == [1, 2]
    assert store.read("b").dtype == np.float32
    assert store.bytes == 11
    assert store.metadata == {"format": "pt", "n": "1", "m": "3"}
    assert store.config == {"model_type": "x"}
    assert store.tensors["b"].name == "b"


def test_one_file_in_a_folder_and_by_itself(tmp_path):
    write(tmp_path / "model.safetensors", ONE, b"\1\2")
    assert Store.open(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"a": 1}')
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        store = Store.open(path)
        assert store.read("a").tolist() == [1, 2]
        assert store.config == {"a": 1}


def test_shards_in_a_folder_below(folder):
    (folder / "x").mkdir()
    (folder / "m-1.safetensors").rename(folder / "x" / "m-1.safetensors")
    index(folder, {"a": "x/m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"})
    assert Store.open(folder).read("a").tolist() == [1, 2]


def test_neither_file_nor_index(tmp_path):
    refused(tmp_path, f": found neither model.safetensors nor {INDEX}, expected one of them")


def test_both_file_and_index(folder):
    write(folder / "model.safetensors", ONE, b"\1\2")
    refused(folder, f": found both model.safetensors and {INDEX}, expected one of them")


def test_an_index_of_the_single_file(tmp_path):
    write(tmp_path / "model.safetensors", ONE, b"\1\2")
    index(tmp_path, dict.fromkeys(ONE, "model.safetensors"))
    assert set(Store.open(tmp_path).tensors) == set(ONE)
    index(tmp_path, {**dict.fromkeys(ONE, "model.safetensors"), "other": "model.safetensors"})
    refused(tmp_path, f"/model.safetensors: other: missing, expected it here by {INDEX}")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_pipes_and_devices_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"/{name}: found a pipe or a device, expected a file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    refused(tmp_path, f"/{name}: found a pipe or a device, expected a file")


def test_a_missing_shard(folder):
    (folder / "m-2.safetensors").unlink()
    refused(folder, f"/{INDEX}: weight_map: b: found no shard 'm-2.safetensors', expected it here")


def test_a_tensor_missing_from_its_shard(folder):
    write(folder / "m-2.safetensors", ONE, b"\1\2")
    refused(folder, f"/m-2.safetensors: b: missing, expected it here by {INDEX}")


def test_a_tensor_that_the_index_lacks(folder):
    index(folder, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    refused(folder, f"/m-2.safetensors: c: found here, expected no tensor that lacks an entry by {INDEX}")


def test_a_tensor_in_two_shards(folder):
    write(folder / "m-2.safetensors", {**TWO, "a": entry("U8", [1], 9, 10)}, bytes(10))
    refused(folder, f"/m-2.safetensors: a: found here, expected only in m-1.safetensors by {INDEX}")


@pytest.mark.parametrize("shard", ["../m.safetensors", "/m.safetensors", "x/../../m", "", ".", "c:\\m", "..\\m", "a\0"])
def test_a_shard_outside_the_folder(folder, shard):
    index(folder, {"a": shard})
    refused(folder, f"/{INDEX}: weight_map: found shard {shard!r}, expected a file in this folder")


def test_a_faulty_shard_names_its_file(folder):
    (folder / "m-1.safetensors").write_bytes(b"")
    refused(folder, "/m-1.safetensors: found a file of 0 bytes, expected 8 or more (the header's length)")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "{",
            "found no valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)), "
            "expected an object",
        ),
        ("3", "found 3, expected a JSON object"),
        ("{}", "weight_map: found null, expected file names by tensor"),
        ('{"weight_map": ["a"]}', "weight_map: found ['a'], expected file names by tensor"),
        ('{"weight_map": {"a": 1}}', "weight_map: found {'a': 1}, expected file names by tensor"),
        ('{"weight_map": {"a": "m", "a": "n"}}', "found key 'a' twice in one object, expected it once"),
    ],
)
def test_a_faulty_index(folder, content, sentence):
    (folder / INDEX).write_text(content)
    refused(folder, f"/{INDEX}: {sentence}")


def test_a_faulty_config(folder):
    (folder / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}')
    refused(folder, "/config.json: found key 'hidden_size' twice in one object, expected it once")
