"""Opening reads headers alone, and reading one tensor touches no other: shown on files with holes of terabytes."""

import json
import os
import resource
import time
import tracemalloc

import pytest
from checkpoint_files import entry

from atlas_lab.checkpoint import Store, open_checkpoint, sizes, synthetic_sites
from atlas_lab.checkpoint.files import file_header
from atlas_lab.checkpoint.safetensors import open_file

TIB = 1 << 40


def sparse(path, header: bytes, size: int, values: dict[int, bytes]):
    """A file of which only the header and `values` (by offset) take room; skips where the file system cannot."""
    with path.open("wb") as f:
        f.write(header)
        for at, data in values.items():
            f.seek(at)
            f.write(data)
        try:
            f.truncate(size)
        except OSError:
            pytest.skip("no sparse files of this size here")
    if os.stat(path).st_blocks * 512 > 1 << 22:
        pytest.skip("no sparse files here")
    return path


def test_reading_one_tensor_touches_no_other(tmp_path):
    entries = {
        "first": entry("U8", [TIB], 0, TIB),
        "wanted": entry("I32", [3], TIB, TIB + 12),
        "last": entry("U8", [TIB], TIB + 12, 2 * TIB + 12),
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    wanted = b"".join(i.to_bytes(4, "little") for i in (1, 2, 3))
    path = sparse(
        tmp_path / "m.safetensors", len(text).to_bytes(8, "little") + text, start + 2 * TIB + 12, {start + TIB: wanted}
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    file = open_file(path)
    assert file.read("wanted").tolist() == [1, 2, 3]
    assert file.read("last")[:10].tolist() == [0] * 10  # a part of a tensor costs what is touched of it
    assert time.monotonic() - began < 10  # a terabyte takes minutes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


def test_a_full_size_model_is_opened_from_headers_alone(tmp_path):
    s = sizes("qwen3.5-27b", layers=8)
    sites = synthetic_sites(s, "bf16")
    tensors = [t for site in sites for p in site.projections for t in p.weight.tensors.values()]
    header, offsets = file_header(tensors, {})
    total = len(header) + sum(t.bytes for t in tensors)
    assert total > 5e9
    sparse(tmp_path / "model.safetensors", header, total, {})
    (tmp_path / "config.json").write_text(json.dumps(s.config()))
    tracemalloc.start()
    checkpoint = open_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(checkpoint.sites) == sites
    assert checkpoint.store.bytes == total - len(header)
    assert peak < 4e6
    assert len(offsets) == len(tensors)


def test_opening_reads_no_byte_of_data(tmp_path, monkeypatch):
    text = json.dumps({"a": entry("U8", [100_000], 0, 100_000)}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100_000))
    reads = []
    real = type(path).open

    def counted(self, *args, **kwargs):
        file = real(self, *args, **kwargs)
        raw = file.read
        monkeypatch.setattr(file, "read", lambda n=-1: reads.append(n) or raw(n), raising=False)
        return file

    monkeypatch.setattr(type(path), "open", counted)
    Store.open(path)
    assert reads == [8, len(text)]
