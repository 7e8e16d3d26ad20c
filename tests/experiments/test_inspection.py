"""What an SM holds: the limits of NVIDIA's occupancy calculator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.inspection import occupancy

TARGETS = {t.name: t for t in shipped_targets()}


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "blocks", "limit"),
    [
        ("h200", 64, 40, 0, 24, "registers"),  # 12 warps a quarter, not 51 an SM
        ("h200", 128, 80, 0, 6, "registers"),
        ("h200", 256, 16, 0, 8, "threads"),
        ("h200", 32, 16, 0, 32, "blocks"),
        ("rtx5090", 32, 16, 0, 24, "blocks"),
        ("h200", 128, 16, 48 * 1024, 4, "shared memory"),
        ("h200", 1024, 128, 0, 0, "registers"),
    ],
)
def test_occupancy(target: str, threads: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    found = occupancy(SimpleNamespace(registers=registers, shared=0), threads, shared, TARGETS[target])
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.share == blocks * threads / TARGETS[target].threads_per_sm


def test_a_card_with_fewer_registers_holds_fewer() -> None:
    small = replace(TARGETS["h200"], registers_per_sm=32768)
    assert occupancy(SimpleNamespace(registers=40, shared=0), 64, 0, small).blocks == 12
