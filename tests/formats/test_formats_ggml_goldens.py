"""Our block formats against ggml's quantizers and the gguf package's values (tests/golden/gguf, recorded by
tools/record_gguf_goldens.py). Equality is exact."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from atlas_lab.formats import get, scan

GOLDEN = Path(__file__).parent.parent / "golden" / "gguf"
Arrays = dict[str, np.ndarray]
READ = ["q8_0", "q4_k", "q6_k", "block_nvfp4", "bf16"]
QUANTIZED = ["q8_0", "q4_k", "q6_k", "q2_0_g64", "q2_0_g128"]


def load(name: str) -> Arrays:
    with np.load(GOLDEN / f"{name}.npz") as f:
        return {key: f[key] for key in f.files if key != "versions"}


def stored(name: str, given: Arrays) -> Arrays:
    return {"weight": given["bf16"].view(ml_dtypes.bfloat16)} if name == "bf16" else {"blocks": given[name]}


def reads_as(name: str, given: Arrays, theirs: Arrays) -> None:
    ours = get(name).dequantize(stored(name, given))
    np.testing.assert_array_equal(ours.astype(np.float32), theirs[name])
    np.testing.assert_array_equal(ours, theirs[name].astype(np.float64) if name != "q4_k" else ours)
    if name == "q4_k":  # the difference of two products has more bits than float32; theirs is ours, rounded once
        assert (ours != theirs[name]).any()


def quantizes_as(name: str, given: Arrays, theirs: Arrays) -> None:
    for kind, w in given.items():
        np.testing.assert_array_equal(get(name).quantize(w)["blocks"], theirs[f"{kind}.{name}"], err_msg=kind)


@pytest.mark.parametrize("name", READ)
def test_blocks_stand_for_what_gguf_reads(name: str) -> None:
    reads_as(name, load("blocks"), load("gguf"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_are_those_of_the_reference_quantizer(name: str) -> None:
    quantizes_as(name, load("weights"), load("ggml"))


@pytest.mark.parametrize("chunk", [1, 3000])
@pytest.mark.parametrize("name", QUANTIZED)
def test_chunks_of_rows_change_nothing(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", chunk)
    quantizes_as(name, load("weights"), load("ggml"))
    if name in READ:
        reads_as(name, load("blocks"), load("gguf"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_flipped_bit_is_noticed(name: str) -> None:
    theirs = load("ggml")
    theirs[f"heavy.{name}"].flat[5] ^= 1
    with pytest.raises(AssertionError):
        quantizes_as(name, load("weights"), theirs)


def test_recordings_are_small_and_name_what_made_them() -> None:
    assert sum(p.stat().st_size for p in GOLDEN.iterdir()) < 200_000
    for name, made_with in (("gguf", "gguf 0.19.0"), ("ggml", "ggml of llama-cpp-python 0.3.36")):
        with np.load(GOLDEN / f"{name}.npz") as f:
            assert list(f["versions"]) == [made_with]
