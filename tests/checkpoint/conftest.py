"""What tests of this folder share."""

import io

import pytest

from atlas_lab.checkpoint import safetensors


@pytest.fixture
def reads(monkeypatch):
    """Offset and length of every read of a part."""
    seen = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            at = self.tell()
            count = super().readinto(buffer)
            seen.append((at, count, len(buffer)))
            return count

    monkeypatch.setattr(safetensors, "open_raw", Counted)
    return seen
