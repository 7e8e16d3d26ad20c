"""The container of GGUF: what it is read as agrees with the gguf package's reader, Q2_0 is told apart by its bytes, and
whatever is damaged is one sentence, soon and within the file's own memory."""

import os
import re
import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_files import SIZES, finish, metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_lab.checkpoint import CheckpointError
from atlas_lab.checkpoint.gguf import open_gguf
from atlas_lab.checkpoint.gguf_file import open_file
from atlas_lab.checkpoint.gguf_types import Q2_0_KINDS, TYPES
from atlas_lab.formats import get


def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def file(keys=(), tensors=(), data=b"", *, alignment=32, version=3, magic=b"GGUF"):
    head = magic + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def saved(folder, content):
    path = folder / "m.gguf"
    path.write_bytes(content)
    return path


def refused(folder, content, sentence):
    path = saved(folder, content)
    with pytest.raises(CheckpointError) as e:
        open_file(path)
    assert str(e.value) == f"{path}: {sentence}"


def test_types_and_sizes_are_those_of_gguf():
    from gguf.constants import GGML_QUANT_SIZES

    for number, t in TYPES.items():
        if number < 142:
            assert GGMLQuantizationType(number).name == t.name
            if t.name != "Q8_1":  # 36 in ggml, whose two floats are f16 by now; 40 in the package
                assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (t.block, t.bytes)
    assert set(GGMLQuantizationType) - {*TYPES, 42} == set()
    for t in (*TYPES.values(), *Q2_0_KINDS):
        if t.format:
            blocks = get(t.format).tensors(1, t.block).get("blocks")
            assert (blocks.shape[1] if blocks else 2) == t.bytes


def test_every_kind_of_metadata_and_type_is_read_as_by_gguf(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen35")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31)}
    for kind, value in (numbers | {"uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300}).items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "é\n")
    writer.add_array("k.ints", [1, 2, 3])
    writer.add_array("k.floats", [0.5, 1.5])
    writer.add_array("k.strings", ["a", "", "ü" * 100])
    writer.add_array("k.many", list(range(20_000)))
    rng = np.random.default_rng(0)
    for number, t in TYPES.items():
        if number < 142 and t.name != "Q8_1":
            data = rng.integers(0, 256, (3, 512 // t.block * t.bytes), dtype=np.uint8)
            writer.add_tensor(f"t.{t.name}", data, raw_dtype=GGMLQuantizationType(number))
    writer.add_tensor("t.3d", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    path = finish(writer, tmp_path / "m.gguf", {})
    ours, theirs = open_file(path), GGUFReader(path)
    assert [*ours.entries] == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        e = ours.entries[t.name]
        assert (e.type.name, list(e.shape), e.bytes) == (t.tensor_type.name, t.shape.tolist()[::-1], t.n_bytes)
        assert ours.read(t.name).tobytes() == t.data.tobytes()
    for name, value in ours.metadata.items():
        if not name.startswith("k.") or name in ("k.strings", "k.many"):
            continue
        found = theirs.fields[name].contents()
        assert value == (tuple(found) if isinstance(found, list) else found), name
    assert (str(ours.metadata["k.strings"]), str(ours.metadata["k.many"])) == ("3 values", "20000 values")
    assert ours.read("t.3d").tolist() == np.arange(24).reshape(2, 3, 4).tolist()


def ternary(sizes, group, **changes):
    """Tensors of type 42 of these shapes in groups of `group`, each padded to 32."""
    tensors, data = [], b""
    for i, (n, k) in enumerate(sizes):
        tensors.append(tensor(f"t{i}", (n, k), 42, len(data)))
        blocks = bytes(range(1, n * k // group * (2 + group // 4) % 200 + 1))
        blocks = (blocks * (n * k))[: n * k // group * (2 + group // 4)]
        data += blocks + bytes(-len(blocks) % 32)
    return file(tensors=tensors, data=data, **changes)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(
    "sizes", [[(8, 512)], [(1, 256), (8, 512)], [(8, 512), (1, 256)], [(1, 128), (64, 256), (1, 128)]]
)
def test_groups_of_64_and_128_are_told_apart_by_bytes(tmp_path, group, sizes):
    f = open_file(saved(tmp_path, ternary(sizes, group)))
    assert {e.type.format for e in f.entries.values()} == {f"q2_0_g{group}"}
    for i, (n, k) in enumerate(sizes):
        assert f.read(f"t{i}").shape == (n, k // group * (2 + group // 4))


def test_rows_that_128_does_not_divide_are_groups_of_64(tmp_path):
    f = open_file(saved(tmp_path, ternary([(1, 64), (1, 192)], 64)))
    assert {e.type.format for e in f.entries.values()} == {"q2_0_g64"}


def test_q2_0_that_cannot_be_told_or_disagrees(tmp_path):
    refused(
        tmp_path,
        ternary([(1, 128), (2, 128)], 64),
        "tensor 't0': found Q2_0 [1, 128], which padding makes as large in groups of 64 as of 128, expected a tensor "
        "that tells",
    )
    tensors = [tensor("a", (8, 512), 42, 0), tensor("b", (8, 512), 42, 1152)]
    refused(
        tmp_path,
        file(tensors=tensors, data=bytes(1152 + 1088)),
        "tensor 'b': found 1088 bytes of Q2_0 [8, 512], expected 1152 (groups of 64), padded",
    )
    refused(
        tmp_path,
        file(tensors=tensors[:1], data=bytes(1120)),
        "tensor 'a': found 1120 bytes of Q2_0 [8, 512], expected 1152 (groups of 64) or 1088 (groups of 128), padded",
    )
    refused(
        tmp_path,
        file(tensors=[tensor("a", (8, 100), 42, 0)], data=bytes(1152)),
        "tensor 'a': found 1152 bytes of Q2_0 [8, 100], expected 216 (groups of 64) or 204 (groups of 128), padded",
    )


def test_the_forks_type_is_groups_of_128(tmp_path):
    content = file(tensors=[tensor("a", (8, 512), 142, 0)], data=bytes(1088))
    assert open_file(saved(tmp_path, content)).entries["a"].type.format == "q2_0_g128"


F32 = [tensor("a", (4,), 0, 0), tensor("b", (8,), 0, 32)]
ONE = F32[:1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "found a file of 0 bytes, expected 24 or more (its header)"),
        (file(magic=b"GGML"), "found a file that begins with b'GGML', expected b'GGUF'"),
        (file(version=1), "found GGUF version 1, expected 2 or 3"),
        (file(version=3 << 24), "found GGUF version 50331648 (a big-endian file), expected 2 or 3"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(40),
            "found 1152921504606846976 metadata keys, expected at most the 3 that the 40 bytes after their number have "
            "room for",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(40),
            "found 1152921504606846976 tensors, expected at most the 1 that the 40 bytes after their number have room "
            "for",
        ),
        (
            file([key("k", 8, struct.pack("<Q", 2**63))]),
            "found 9223372036854775808 bytes of a value of k, expected at most the 19 that the 19 bytes after their "
            "number have room for",
        ),
        (file([key("k", 0, b"a"), key("k", 0, b"b")]), "found metadata key 'k' twice, expected it once"),
        (file([key(b"\xff", 0, b"a")]), "found a metadata key b'\\xff', expected UTF-8"),
        (
            file([key("a\nb", 0, b"a")]),
            "found a metadata key 'a\\nb', expected at most 256 printable characters",
        ),
        (
            file(tensors=[tensor("x" * 257, (4,), 0, 0)]),
            f"found a tensor name '{'x' * 57}...{'x' * 58}', expected at most 256 printable characters",
        ),
        (file([key("k", 13, b"a")]), "k: found value type 13, expected one of 0 to 12"),
        (
            file([key("k", 9, struct.pack("<IQ", 9, 1))]),
            "k: found an array of value type 9, expected numbers or text",
        ),
        (
            file([key("k", 9, struct.pack("<IQ", 12, 2**61))]),
            "found 2305843009213693952 numbers of k, expected at most the 1 that the 15 bytes after their number have "
            "room for",
        ),
        (
            file([key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 2**64 - 1))]),
            "found the file's end at 96 bytes, in: k",
        ),
        (
            file([key("general.alignment", 4, struct.pack("<I", 48))]),
            "general.alignment: found 48, expected a power of two",
        ),
        (
            file([key("general.alignment", 4, struct.pack("<I", 0))]),
            "general.alignment: found 0, expected a power of two",
        ),
        (file([key("general.alignment", 8, text("32"))]), "general.alignment: found '32', expected a power of two"),
        (file(tensors=[tensor("a", (1,) * 5, 0, 0)]), "tensor 'a': found 5 dimensions, expected 1 to 4"),
        (file(tensors=[tensor("a", (), 0, 0)] * 2), "tensor 'a': found 0 dimensions, expected 1 to 4"),
        (
            file(tensors=[tensor("a", (4, 0), 0, 0)]),
            "tensor 'a': found shape [4, 0], expected extents of 1 or more, at most 2^59 in all",
        ),
        (
            file(tensors=[tensor("a", (2**40, 2**30), 0, 0)]),
            "tensor 'a': found shape [1099511627776, 1073741824], expected extents of 1 or more, at most 2^59 in all",
        ),
        (file(tensors=[tensor("a", (4,), 99, 0)]), "tensor 'a': found type 99, expected a type of ggml"),
        (
            file(tensors=[tensor("a", (4,), 0, 16)]),
            "tensor 'a': found offset 16, expected a multiple of the alignment 32",
        ),
        (file(tensors=[tensor("a", (4,), 0, 32)]), "tensor 'a': found offset 32, expected 0, where the data begins"),
        (
            file(tensors=[F32[0], tensor("b", (8,), 0, 0)], data=bytes(64)),
            "tensor 'b': found offset 0, expected 32, where tensor 'a' ends",
        ),
        (file(tensors=[F32[0], tensor("a", (8,), 0, 32)], data=bytes(64)), "tensor 'a': found twice, expected once"),
        (
            file(tensors=[tensor("a", (4, 48), 8, 0)], data=bytes(204)),
            "tensor 'a': found rows of 48 weights, expected whole blocks of 32 (Q8_0)",
        ),
        (
            file(tensors=F32, data=bytes(60)),
            "tensor 'b': found 28 bytes up to the end of the file, expected 32 (F32 [8]): the file is cut short",
        ),
        (file(tensors=F32, data=bytes(96)), "found 96 bytes of data, expected 64 (no tensor covers the rest)"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "file",
)
def test_damaged_files(tmp_path, content, sentence):
    refused(tmp_path, content, sentence)


def test_the_last_tensor_may_lack_its_padding_and_any_alignment_is_read(tmp_path):
    for alignment in (1, 8, 32, 4096):
        keys = [key("general.alignment", 4, struct.pack("<I", alignment))]
        second = max(16, alignment)
        tensors = [tensor("a", (4,), 0, 0), tensor("b", (8,), 0, second)]
        values = np.arange(8, dtype=np.float32)
        data = values[:4].tobytes().ljust(second, b"\0") + values.tobytes()
        for padded in (data, data + bytes(-len(data) % alignment)):
            f = open_file(saved(tmp_path, file(keys, tensors, padded, alignment=alignment)))
            assert f.read("a").tolist() == [0, 1, 2, 3] and f.read("b").tolist() == list(range(8))


def test_every_cut_is_one_sentence(tmp_path):
    keys = [
        key("general.architecture", 8, text("qwen35")),
        key("k", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")),
    ]
    content = file(keys, F32, np.arange(16, dtype=np.float32).tobytes())
    open_file(saved(tmp_path, content))
    for size in range(len(content)):
        path = saved(tmp_path, content[:size])
        with pytest.raises(CheckpointError) as e:
            open_file(path)
        assert str(e.value).startswith(f"{path}: ") and "\n" not in str(e.value)


def test_files_that_change_or_are_none(tmp_path):
    path = saved(tmp_path, file(tensors=ONE, data=bytes(32)))
    f = open_file(path)
    os.truncate(path, 40)
    with pytest.raises(CheckpointError, match=r"m\.gguf: found 40 bytes, expected the \d+ it had when it was opened$"):
        f.read("a")
    path.unlink()
    for what in (path, tmp_path):
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(what))}: (cannot be read|found a file of)"):
            open_file(what)


def outcome(path, content):
    """Tensors by name as bytes, or None where the file is refused; anything else is a bug."""
    path.write_bytes(content)
    sentences, out = [], None
    tracemalloc.start()
    try:
        try:
            f = open_file(path)
            out = {name: f.read(name).tobytes() for name in f.entries}
        except CheckpointError as e:
            sentences.append(str(e))
        try:
            store = open_gguf(path)
            for name in store.tensors:
                store.read(name)
        except CheckpointError as e:
            sentences.append(str(e))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    for sentence in sentences:
        assert sentence.startswith(f"{path}: ") and "\n" not in sentence and len(sentence) < 2000
    assert peak < 1_000_000 + 40 * len(content)
    return out


def agrees_with_the_package(path, ours):
    """What we read, the package reads alike; it knows no Q2_0, and we refuse more."""
    if ours is not None:
        assert {t.name: t.data.tobytes() for t in GGUFReader(path).tensors} == ours


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = GGUFWriter(path, "qwen35")
    metadata(writer, SIZES, prediction=1)
    writer.add_array("floats", [0.5, -1.0])
    writer.add_tensor("blk.0.ssm_a", np.full(6, -1, np.float32))
    writer.add_tensor("blk.0.attn_gate.weight", np.zeros((768, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ssm_dt.bias", np.zeros(6, np.float32))
    return finish(writer, path, {}).read_bytes()


@settings(max_examples=200)
@given(st.binary(max_size=120))
def test_random_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "f.gguf"
    assert outcome(path, content) is None
    outcome(path, b"GGUF\3\0\0\0" + content)


BIG = st.sampled_from([2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])


@settings(max_examples=500)
@given(data=st.data())
def test_a_damaged_header(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "f.gguf"
    end = good.index(b"blk.0.ssm_dt.bias") + 60  # of the header
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 8))
        match data.draw(st.integers(0, 4)):
            case 0:
                content[at] = data.draw(st.integers(0, 255))
            case 1:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case 2:
                content[at : at + 8] = struct.pack("<Q", data.draw(BIG))
            case 3:
                content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case 4:
                del content[at : at + data.draw(st.integers(1, 9))]
    agrees_with_the_package(path, outcome(path, bytes(content)))


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 8, 12, 14, 24, 30, 40]), st.integers(1, 3), st.integers(1, 2)), max_size=5
    ),
    st.sampled_from([8, 32, 64]),
)
def test_any_whole_file_is_read(tmp_path_factory, specs, alignment):
    keys = [key("general.alignment", 4, struct.pack("<I", alignment))]
    tensors, data = [], b""
    for i, (kind, n, m) in enumerate(specs):
        t = TYPES[kind]
        tensors.append(tensor(f"t{i}", (n, m * t.block), kind, len(data)))
        data += bytes((i + j) % 251 for j in range(n * m * t.bytes))
        data += bytes(-len(data) % alignment)
    path = tmp_path_factory.getbasetemp() / "f.gguf"
    ours = outcome(path, file(keys, tensors, data, alignment=alignment))
    assert ours is not None
    agrees_with_the_package(path, ours)
