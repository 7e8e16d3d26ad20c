"""Our formats against the installed public libraries, on fresh weights; tests/formats reads what they once computed.

    /tmp/peers/bin/python -m pytest tests/peers/test_formats_live.py

in an environment made as tools/record_format_goldens.py says, with pytest. A library that is not installed is a skip.
"""

from __future__ import annotations

import pytest
from by_path import load

IMPORTS = {
    "torch": "torch",
    "compressed-tensors": "compressed_tensors",
    "nvidia-modelopt": "modelopt",
    "transformers": "transformers",
    "gguf": "gguf",
}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("library", IMPORTS)
def test_our_formats_agree_with(library: str, seed: int) -> None:
    for module in dict.fromkeys((IMPORTS[library], *(() if library == "gguf" else ("torch",)))):
        pytest.importorskip(module, reason=f"{module} is not installed")
    recorder = load("tools/record_format_goldens.py")
    agreement = load("tests/formats/test_formats_goldens.py").AGREEMENT
    given = recorder.inputs(seed)
    agreement[library](given, recorder.RECORDERS[library](given))
