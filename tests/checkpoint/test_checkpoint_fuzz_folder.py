"""Damaged indexes and config.json files: the tensors as they are, or one sentence; nothing outside is read."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_files import SHAPES, write_mixed

from atlas_lab.checkpoint import CheckpointError, Store, describe, open_checkpoint
from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.checkpoint.recognise import recognise
from atlas_lab.core.tensor import Tensor

ARRAYS = {f"layer.{i}": np.arange(6, dtype=np.float32) + i for i in range(6)}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of two tensors, a good file in a folder below and one outside."""
    folder = tmp_path_factory.mktemp("index") / "m"
    folder.mkdir()
    handles = [Tensor("f32", a.shape, n) for n, a in ARRAYS.items()]
    write_files(folder, [Group((t,), lambda: ARRAYS) for t in handles], {}, 2 * 24)
    for other in (folder / "below", folder.parent / "outside"):
        other.mkdir()
        write_files(other, [Group((handles[0],), lambda: ARRAYS)], {})
    return folder


def outcome(do: Callable[[], Any], folder: Path) -> Any:
    """What it returns, or None where it refuses in one sentence; anything else, and a late answer, is a bug."""
    started = time.perf_counter()
    try:
        found, sentence = do(), ""
    except CheckpointError as e:
        found, sentence = None, str(e)
    assert time.perf_counter() - started < 5
    assert sentence == "" or sentence.startswith(str(folder))
    assert sentence.isprintable()
    assert len(sentence) < 3000
    return found


shards = st.sampled_from([
    "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
    "./model-00001-of-00003.safetensors", "below/model.safetensors", "below/../model-00001-of-00003.safetensors",
    "../outside/model.safetensors", "below/../../outside/model.safetensors", "..\\outside\\model.safetensors",
    "/etc/passwd", "C:\\model.safetensors", "~/model.safetensors", "", ".", "..", "below", "a\0b", "a\nb", "\ud800",
    "x" * 5000, "x/" * 3000, INDEX, "missing.safetensors",
])  # fmt: skip
names = st.sampled_from([*ARRAYS, "layer.6", "", "layer", "a\nb", "\ud800", "é"])
leaves = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | shards | names
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(names, t, max_size=3), max_leaves=5)


def files_opened(store: Store) -> set[Path]:
    return {f.path.resolve() for f in store.files}


def check_index(folder: Path, index: object) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    store = outcome(lambda: Store.open(folder), folder)
    if store is None:
        return
    assert all(p.is_relative_to(folder.resolve()) for p in files_opened(store))
    assert set(store.tensors) == set(index["weight_map"])  # type: ignore[index]
    for name in store.tensors:
        np.testing.assert_array_equal(store.read(name), ARRAYS[name])


@settings(max_examples=250)
@given(changes=st.lists(st.tuples(names, shards | st.none()), min_size=1, max_size=4))
def test_a_damaged_weight_map(sharded, changes):
    index = original()
    for name, shard in changes:
        if shard is None:
            index["weight_map"].pop(name, None)
        else:
            index["weight_map"][name] = shard
    check_index(sharded, index)


def original() -> dict[str, Any]:
    shard_of = {f"layer.{i}": f"model-{i // 2 + 1:05d}-of-00003.safetensors" for i in range(6)}
    return {"metadata": {"total_size": 144}, "weight_map": shard_of}


def test_the_whole_index_is_right(sharded):
    check_index(sharded, original())
    assert set(Store.open(sharded).tensors) == set(ARRAYS)


@settings(max_examples=150)
@given(key=st.sampled_from(["weight_map", "metadata", "other"]), value=trees)
def test_an_index_with_other_values(sharded, key, value):
    check_index(sharded, original() | {key: value})


@settings(max_examples=100)
@given(text=st.text(max_size=30) | st.binary(max_size=30))
def test_an_index_of_any_text(sharded, text):
    (sharded / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    assert outcome(lambda: Store.open(sharded), sharded) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config") / "m"
    write_mixed(folder, dict.fromkeys(SHAPES, "bf16"), vocab_size=64, tie_word_embeddings=False, layer_types=None)
    shutil.copy(folder / "config.json", folder / "original.json")
    return folder


numbers = st.integers(-2, 600) | st.sampled_from([2**31, 2**63, 10**30, 0.5, 1e300, True, None, "256"])
values = numbers | st.lists(
    st.sampled_from(["full_attention", "linear_attention", "sliding_attention", "", 1, None]), max_size=3
) | st.sampled_from([{}, {"hidden_size": 256}, {"text_config": {}}, "qwen3_5", "qwen3_5_text", "llama", "qwen3",
                     "gemma", "silu", "gelu_pytorch_tanh", "é\n"])  # fmt: skip


@settings(max_examples=300)
@given(data=st.data())
def test_a_config_with_other_values(model, data):
    config = json.loads((model / "original.json").read_text())
    keys = [*config, "text_config", "num_experts", "attn_output_gate", "hidden_act", "mtp_num_hidden_layers"]
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()):
            config[key] = data.draw(values)
        else:
            config.pop(key, None)
    nested = data.draw(st.booleans())
    whole = {"model_type": config.get("model_type"), "text_config": copy.deepcopy(config)} if nested else config
    (model / "config.json").write_text(json.dumps(whole))
    found = outcome(lambda: open_checkpoint(model), model)
    if found is None:
        return
    store = Store.open(model)
    for p in found.projections:  # whatever the config says, a weight is what its tensors are
        assert (p.n, p.k) == SHAPES[p.weight["weight"].name.removesuffix(".weight")]
        assert p.weight == recognise(store.tensors, p.weight["weight"].name.removesuffix(".weight"))
    assert sorted(r.tensor.name for r in describe(found)) == sorted(store.tensors)
