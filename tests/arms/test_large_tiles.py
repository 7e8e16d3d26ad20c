"""Tiles that a full card is needed for, on a card of one multiprocessor: the suite's small shapes never reach them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas_lab.arms import atlas_arms
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments.case import Case, base_context
from atlas_lab.experiments.cases import launched
from atlas_lab.experiments.parity import run_case
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.gemm.tile import block_of
from atlas_lab.runtime.device import open_device
from atlas_lab.simt import Buffer, run

ONE_SM = replace(shipped_targets()[0], sms=1)
ARMS = {a.name: a for a in atlas_arms()}


@pytest.mark.parametrize(
    ("name", "form", "k"),
    [
        ("bf16_gemm", "bf16", 136),
        ("fp8_gemm", "fp8", 144),
        ("nvfp4_gemm", "nvfp4", 192),
        ("nvfp4_gemm", "nvfp4_ct", 64),
    ],
)
def test_more_than_one_in_each_direction_with_ragged_edges(name: str, form: str, k: int) -> None:
    case, base = Case(name, ("ffn.up",), 131, 130, k, form), base_context(ONE_SM)
    (kernel,) = launched(case, ARMS[name], base)
    assert dict(kernel.spec.parameters)["bm"] == 128
    with open_device("interpreter", ONE_SM) as device:
        result = run_case(case, ARMS[name], device, base)
    assert result.ok, result.sentence


@L.kernel
def corners(y: L.Out[L.i32], m: L.i32, n: L.i32, raster: L.i32):
    row, col = block_of(m, n, 16, 32, raster)
    L.stg_b32(y, 2 * L.cuda.blockIdx.x, row)
    L.stg_b32(y, 2 * L.cuda.blockIdx.x + 1, col)


@pytest.mark.parametrize(("m", "n", "raster"), [(1, 1, 2), (70, 100, 2), (70, 100, 3), (70, 100, 32), (33, 65, 1)])
def test_every_tile_is_some_blocks_whatever_the_raster(m: int, n: int, raster: int) -> None:
    expected = {(row, col) for row in range(0, m, 16) for col in range(0, n, 32)}
    y = Buffer("y", 8 * len(expected))
    run(corners, grid=len(expected), block=1, args=(y, m, n, raster))
    assert set(map(tuple, y.array(np.int32, (len(expected), 2)).tolist())) == expected
