"""Fresh checkpoints of the installed public libraries, read by us and by them; tests/checkpoint has recorded ones.

    /tmp/peers/bin/python -m pytest tests/peers/test_checkpoints_live.py

in an environment made as tools/record_checkpoint_goldens.py says, with pytest. A library that is not installed is a
skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from by_path import load

NAMES = [
    "transformers-bf16",
    "transformers-fp8",
    "transformers-fp8-f32",
    "compressed-tensors-nvfp4",
    "compressed-tensors-fp8-block",
    "compressed-tensors-fp8-channel",
    "compressed-tensors-mixed",
    "nvidia-modelopt-mixed",
    "nvidia-modelopt-nvfp4",
    "nvidia-modelopt-fp8-block",
    "nvidia-modelopt-fp8-channel",
]
NEEDED = ("torch", "transformers", "accelerate", "safetensors")
IMPORTS = {"compressed-tensors": "compressed_tensors", "nvidia-modelopt": "modelopt"}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_we_read_what_they_write(name: str, seed: int, tmp_path: Path) -> None:
    for module in (*NEEDED, *(m for library, m in IMPORTS.items() if name.startswith(library))):
        pytest.importorskip(module, reason=f"{module} is not installed")
    recorder = load("tools/record_checkpoint_goldens.py")
    _, write = (recorder.WRITERS | recorder.LIVE)[name]
    values = write(tmp_path / "m", seed)
    load("tests/checkpoint/test_checkpoint_recognise_goldens.py").agrees(
        name, tmp_path / "m", recorder.expected(values)
    )


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("format_name", "producer"),
    [("bf16", "huggingface"), ("fp8", "qwen"), ("fp8", "deepseek"), ("fp8_row", "compressed-tensors"),
     ("fp8_tensor", "compressed-tensors"), ("fp8", "compressed-tensors"), ("nvfp4_ct", "compressed-tensors")],
)  # fmt: skip
def test_they_read_what_we_write(format_name: str, producer: str, tmp_path: Path) -> None:
    for module in (*NEEDED, "compressed_tensors"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    from atlas_lab.checkpoint import open_checkpoint, sizes, write_checkpoint

    recorder = load("tools/record_checkpoint_goldens.py")
    agreement = load("tests/checkpoint/test_checkpoint_recognise_goldens.py")
    write_checkpoint(tmp_path / "m", sizes("tiny"), format_name, seed=4, producer=producer, text_only=True)
    theirs = recorder.loaded(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    for p in checkpoint.projections:
        held = agreement.arrays_of(checkpoint, p)
        if producer == "compressed-tensors" and p.weight.family == "fp8":
            held["scale"] = held["scale"].astype(agreement.BF16)  # their model in bf16 has such scales
        ours = agreement.as_theirs(p, held, agreement.BF16)
        assert ours.tobytes() == theirs[agreement.module_of(p)].tobytes(), p.label
