"""Random and damaged headers: the right answer or CheckpointError, whatever the bytes, within their own memory."""

import json
import tracemalloc

import numpy as np
import safetensors
from checkpoint_files import entry, framed
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.checkpoint import CheckpointError
from atlas_lab.checkpoint.safetensors import open_file
from atlas_lab.formats.dtypes import BY_SAFETENSORS

GOOD = {
    "__metadata__": {"format": "pt"},
    "w": entry("BF16", [4, 8], 0, 64),
    "scale": entry("F32", [2], 64, 72),
    "codes": entry("U8", [2, 4], 72, 80),
    "one": entry("F8_E4M3", [], 80, 81),
}
DATA = bytes(range(81))

numbers = st.one_of(st.integers(-2, 90), st.sampled_from([2**31, 2**63, 2**64, 10**30, 1.0, 1e300, True, None, "4"]))
values = st.one_of(
    numbers,
    st.lists(numbers, max_size=4),
    st.sampled_from([*BY_SAFETENSORS, "F4", "", "é", {}, {"a": "b"}, {"dtype": "U8"}]),
)


def outcome(path, content: bytes):
    """Tensors by name as bytes, or None where the file is refused; anything else is a bug."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = open_file(path)
        out = {name: file.read(name).tobytes() for name in file.tensors}
        sentence = ""
    except CheckpointError as e:
        out, sentence = None, str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if out is None:
        assert sentence.startswith(f"{path}: ")
        assert "\n" not in sentence
        assert len(sentence) < 2000
    assert peak < 1_000_000 + 40 * len(content)
    return out


def agrees_with_the_package(content: bytes, ours) -> None:
    """What we read, the package reads alike; we refuse more (double keys, misaligned starts, unknown dtypes)."""
    if ours is not None:
        theirs = {name: bytes(t["data"]) for name, t in safetensors.deserialize(content)}
        assert ours == theirs


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path_factory, content):
    assert outcome(tmp_path_factory.getbasetemp() / "f.safetensors", content) in (None, {})


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=20))
def test_random_headers(tmp_path_factory, header, data):
    content = framed(header, data)
    agrees_with_the_package(content, outcome(tmp_path_factory.getbasetemp() / "f.safetensors", content))


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.data())
def test_a_damaged_header(tmp_path_factory, data):
    content = bytearray(framed(json.dumps(GOOD), DATA))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                content[at] = data.draw(st.integers(0, 255))
            case 1:
                del content[at:]
                content += bytes(1)
            case 2:
                content[at:at] = data.draw(st.binary(max_size=3))
    agrees_with_the_package(bytes(content), outcome(tmp_path_factory.getbasetemp() / "f.safetensors", bytes(content)))


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(GOOD)), st.sampled_from(["dtype", "shape", "data_offsets"]), values)),
    st.integers(70, 90),
)
def test_a_header_with_other_values(tmp_path_factory, changes, size):
    header = json.loads(json.dumps(GOOD))
    for name, key, value in changes:
        if isinstance(header[name], dict):
            header[name][key] = value
    content = framed(header, bytes(size))
    ours = outcome(tmp_path_factory.getbasetemp() / "f.safetensors", content)
    agrees_with_the_package(content, ours)
    if not changes:
        assert (ours is None) == (size != len(DATA))


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(BY_SAFETENSORS)), st.lists(st.integers(0, 5), max_size=4), st.text(max_size=5)),
        max_size=6,
        unique_by=lambda t: t[2],
    )
)
def test_any_whole_file_is_read(tmp_path_factory, tensors):
    header, data = {}, b""
    for spelling, shape, name in sorted(tensors, key=lambda t: -BY_SAFETENSORS[t[0]].bytes):
        size = int(np.prod(shape)) * BY_SAFETENSORS[spelling].bytes
        header[name] = entry(spelling, shape, len(data), len(data) + size)
        data += bytes(i % 2 for i in range(size))
    content = framed(header, data)
    ours = outcome(tmp_path_factory.getbasetemp() / "f.safetensors", content)
    assert ours is not None
    agrees_with_the_package(content, ours)
