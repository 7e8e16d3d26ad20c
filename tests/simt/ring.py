"""y = x + 1 over a BF16 matrix through a ring of tiles, and its faulty siblings.

A producer warp loads 128-byte-swizzled tiles by TMA into a ring of stages with a full and an empty mbarrier each;
consumer warps take 16 rows of each tile, add 1 and store them by TMA from unswizzled memory of their own.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from atlas_lab.core.launch import Launch
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cuda

COLUMNS = 64  # of a tile: 128 bytes
ROWS = 16  # of a consumer warp
OUT = ROWS * 128
FAULTS = (
    "bytes short",
    "bytes over",
    "parity of full",
    "parity of empty",
    "no fence",
    "read early",
    "no empty",
    "swizzle",
)


@L.device
def pass_by(bars, i, parity):
    """What stands for a wait that is missing."""


@L.family
def ring(stages: int = 3, warps: int = 2, fault: str = "") -> L.Kernel:
    """`32·(warps + 1)` threads a block; blocks take tiles in turn. `fault` is one of FAULTS or none."""
    tile = 16 * warps * 128
    expected = tile + {"bytes short": -2048, "bytes over": 2048}.get(fault, 0)
    parity = int(fault == "parity of full")
    wait_full = pass_by if fault == "read early" else L.mbarrier_wait
    wait_empty = pass_by if fault == "no empty" else L.mbarrier_wait
    empty_parity = int(fault != "parity of empty")
    fence = L.fence_block if fault == "no fence" else L.fence_proxy_async
    turned = 0 if fault == "swizzle" else 7
    out_at, bars_at = stages * tile, stages * tile + warps * OUT

    @L.device
    def add_one(words):
        w = L.bf16x2(L.bf16_lo(words[0]) + L.f32(1), L.bf16_hi(words[0]) + L.f32(1))
        x = L.bf16x2(L.bf16_lo(words[1]) + L.f32(1), L.bf16_hi(words[1]) + L.f32(1))
        y = L.bf16x2(L.bf16_lo(words[2]) + L.f32(1), L.bf16_hi(words[2]) + L.f32(1))
        z = L.bf16x2(L.bf16_lo(words[3]) + L.f32(1), L.bf16_hi(words[3]) + L.f32(1))
        return w, x, y, z

    @L.kernel(launch_bounds=(32 * (warps + 1), 1))
    def kernel(x: L.InMap[L.bf16], y: L.OutMap[L.bf16], rows: L.i32, columns: L.i32):
        tiles = L.dynamic_shared(L.u8, 0)
        full = L.dynamic_shared(L.u64, bars_at)
        empty = L.dynamic_shared(L.u64, bars_at + 8 * stages)
        warp, lane = L.warp_id(), L.lane_id()
        across = (columns + COLUMNS - 1) // COLUMNS
        count = (rows + 16 * warps - 1) // (16 * warps) * across
        if cuda.threadIdx.x == 0:
            L.tma_prefetch(x)
            L.tma_prefetch(y)
            for s in range(stages):
                L.mbarrier_init(full, s, 1)
                L.mbarrier_init(empty, s, warps)
            L.fence_mbarrier_init()
        cuda.syncthreads()
        stage = L.i32(0)
        phase = L.u32(0)
        if warp == warps:
            if lane == 0:
                for t in range(cuda.blockIdx.x, count, cuda.gridDim.x):
                    wait_empty(empty, stage, phase ^ empty_parity)
                    row = t // across * (16 * warps)
                    column = t % across * COLUMNS
                    L.mbarrier_arrive_expect_tx(full, stage, expected)
                    L.tma_load_2d(tiles, stage * tile, x, (row, column), full, stage)
                    stage = L.i32(stage + 1)
                    if stage == stages:
                        stage = L.i32(0)
                        phase = L.u32(phase ^ 1)
        else:
            out = L.dynamic_shared(L.u8, out_at + warp * OUT)
            for t in range(cuda.blockIdx.x, count, cuda.gridDim.x):
                wait_full(full, stage, phase ^ parity)
                if lane == 0:
                    L.bulk_wait_read(0)
                cuda.syncwarp()
                for j in range(4):
                    r = j * 4 + (lane >> 3)
                    c = lane & 7
                    at = stage * tile + (warp * ROWS + r) * 128 + ((c ^ (r & turned)) << 4)
                    L.sts_v4_b32(out, r * 128 + c * 16, add_one(L.lds_v4_b32(tiles, at)))
                fence()
                cuda.syncwarp()
                if lane == 0:
                    L.mbarrier_arrive(empty, stage)
                    row = t // across * (16 * warps) + warp * ROWS
                    L.tma_store_2d(y, (row, t % across * COLUMNS), out, 0)
                    L.bulk_commit()
                stage = L.i32(stage + 1)
                if stage == stages:
                    stage = L.i32(0)
                    phase = L.u32(phase ^ 1)
            if lane == 0:
                L.bulk_wait_read(0)

    return kernel


def ring_launch(
    x: Tensor, y: Tensor, grid: int = 2, stages: int = 3, warps: int = 2, fault: str = "", **more: Any
) -> Launch:
    """The launch for views of two matrices of one shape."""
    rows, columns = x.shape
    maps = TensorMap(x, (16 * warps, COLUMNS), 128), TensorMap(y, (ROWS, COLUMNS))
    shared = stages * 16 * warps * 128 + warps * OUT + 16 * stages
    args = (*maps, rows, columns)
    return Launch(ring(stages, warps, fault), grid, 32 * (warps + 1), args, shared=shared, **more)


def ring_input(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """BF16 [rows, columns] of any magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-8, 8, (rows, columns))).astype(
        ml_dtypes.bfloat16
    )


def ring_expected(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) + np.float32(1)).astype(ml_dtypes.bfloat16)
