"""Block formats against the installed gguf package and, where there is one, ggml's own quantizers, on fresh weights;
tests/formats reads what they once computed.

    /tmp/peers/bin/python -m pytest tests/peers/test_gguf_live.py

in an environment made as tools/record_gguf_goldens.py says, with pytest. The quantizers are those of libggml-base in
the wheel of pywhispercpp (its Q2_0, if any, is in groups of 64). What is not installed is a skip.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from by_path import load

from atlas_lab.formats import get, q8_1


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(5))
def test_blocks_stand_for_what_gguf_reads(seed: int) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    recorder, goldens = load("tools/record_gguf_goldens.py"), load("tests/formats/test_formats_ggml_goldens.py")
    given = recorder.blocks(seed)
    theirs = recorder.values(given)
    for name in goldens.READ:
        goldens.reads_as(name, given, theirs)


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(5))
def test_q8_0_and_codes_of_q8_1_are_quantized_as_by_gguf(seed: int) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    for w in load("tools/record_gguf_goldens.py").weights(seed).values():
        theirs = gguf.quantize(w, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(get("q8_0").quantize(w)["blocks"], theirs)
        codes = theirs.reshape(len(w), -1, 34)[..., 2:].view(np.int8).reshape(w.shape)
        np.testing.assert_array_equal(q8_1.quantize(w).codes, codes)


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_those_of_ggml(seed: int) -> None:
    found = importlib.util.find_spec("_pywhispercpp")
    if found is None or found.origin is None:
        pytest.skip("pywhispercpp is not installed")
    library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("libggml-base*"))))
    recorder, goldens = load("tools/record_gguf_goldens.py"), load("tests/formats/test_formats_ggml_goldens.py")
    quantizers = {f: q for f, q in recorder.QUANTIZERS.items() if f != "q2_0_g128" and hasattr(library, q[0])}
    assert {"q8_0", "q4_k", "q6_k"} <= set(quantizers)
    recorder.QUANTIZERS = quantizers
    given = recorder.weights(seed)
    theirs = recorder.quantized(given, lambda form: library)
    for name in quantizers:
        goldens.quantizes_as(name, given, theirs)
